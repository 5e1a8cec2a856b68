"""Texts, token ids and conversations as sequences: prompt, special tokens and truncation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from staged_pool.runtime.model import ModelInput, Role, Span, TokenSequence
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate, plain_text
from staged_pool.runtime.models.tokenizing.input_roles import PLAIN, ROLES, RoleSpec
from staged_pool.runtime.models.tokenizing.limits import (
    InputLimits,
    check_own_limit,
    check_text,
    token_limit,
    too_long_error,
    truncated,
)
from staged_pool.runtime.models.tokenizing.shared_tokenizer import (
    CALL_CHARACTERS,
    Encoding,
    SharedTokenizer,
    common_prefix,
)
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens
from staged_pool.runtime.requests import Chat, Output, Side, TextInput
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared

_MAX_PARTS: Final = 1024
"""Most parts that a long input may be split into."""

_NO_SPAN: Final = Span(0, 0, None)
_NONE: Final = SpecialTokens([], [])

ReadText: TypeAlias = "Prepared[TokenSequence] | tuple[Prepared[TokenSequence], ...] | InvalidInput"


@dataclass(slots=True, eq=False)
class _PendingText:
    """One input between the steps of its preparation."""

    given: ModelInput
    text: TextInput
    special: SpecialTokens
    """The special tokens around it."""
    role: RoleSpec
    limit: int | None
    """Length to cut to, in tokens. None: do not cut."""
    longest: int
    """Longest input that is accepted uncut, in tokens."""
    side: Side
    """The end that is cut off."""
    written: str = ""
    """The text that is tokenized, prompt included."""
    prompt: TokenIds | None = None
    """The ids of the prompt alone. None: not needed."""
    bare: TokenIds | None = None
    """The ids of the whole text, without special tokens."""
    encoding: Encoding = None

    @property
    def is_long(self) -> bool:
        """True if the text is far longer than a model's input: its beginning is enough to reject it."""
        return len(self.written) > CALL_CHARACTERS


class TextReader:
    """Tokenizer of inputs that are not pairs. `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        special: The special tokens around a text.
        limits: The model's limits.
        pools_prompt: True if pooling includes the tokens of a prompt. False marks them in each sequence.
        chat_template: Renders a conversation as one text. None: the model has no chat template.
        plain_chats: Read a conversation as the texts of its messages, without a template.
        roles: Treatment of queries and documents. A text without a role is a document.
    """

    def __init__(
        self,
        shared: SharedTokenizer,
        special: SpecialTokens,
        limits: InputLimits,
        *,
        pools_prompt: bool,
        chat_template: ChatTemplate | None,
        plain_chats: bool,
        roles: Mapping[Role, RoleSpec],
    ) -> None:
        self._shared = shared
        self._special = special
        self._roles = {role: roles.get(role, PLAIN) for role in ROLES}
        framed = {role: spec.frame or special for role, spec in self._roles.items()}
        self._marked = {
            role: SpecialTokens([*framed[role].prefix, *spec.marker], framed[role].suffix)
            for role, spec in self._roles.items()
        }
        self._limits = limits
        self._pools_prompt = pools_prompt
        self._chat_template = chat_template
        self._plain_chats = plain_chats
        added = shared.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, added_token in added.items() if added_token.special)

    def read(self, inputs: Sequence[tuple[ModelInput, TextInput]]) -> list[ReadText]:
        """Tokenize each input, or return the error of its request."""
        entries = [self._begin(given, text) for given, text in inputs]
        self._encode([entry for entry in entries if isinstance(entry, _PendingText)])
        return [self._finish(entry) if isinstance(entry, _PendingText) else entry for entry in entries]

    def _begin(self, given: ModelInput, text: TextInput) -> _PendingText | InvalidInput:
        if self._plain_chats and isinstance(text.source, Chat):
            text = replace(text, source=plain_text(text.source), add_special_tokens=True)
        source = text.source
        name: Role = given.role or "document"
        role = self._roles[name]
        try:
            asked = token_limit(text.max_tokens, self._limits.max_tokens)
            limit, longest = role.limit(asked, self._limits.max_tokens)
            side = self._limits.side(text.truncate_side)
            if text.max_own_tokens is not None:
                check_own_limit(text.max_own_tokens)
            if isinstance(source, tuple):
                return _PendingText(given, text, _NONE, role, limit, longest, side, bare=list(source))
            written = given.prompt + source if isinstance(source, str) else self.write_chat(source, given.prompt)
            check_text(written)
        except InvalidInput as error:
            return error
        special = self._marked[name] if text.add_special_tokens else _NONE
        return _PendingText(given, text, special, role, limit, longest, side, written)

    def write_chat(self, chat: Chat, prompt: str = "") -> str:
        """Render a conversation as one text. A prompt becomes a system message, as in sentence-transformers.

        Raises:
            InvalidInput: There is no chat template, or it does not accept this conversation.
        """
        if self._plain_chats:
            return prompt + plain_text(chat)
        if self._chat_template is None:
            raise InvalidInput("The model's tokenizer has no chat template, so it takes no messages.", param="messages")
        return self._chat_template.chat(chat, prompt)

    def _encode(self, entries: Sequence[_PendingText]) -> None:
        self._encode_prompts(entries)
        written = [entry for entry in entries if entry.bare is None]
        with_spans = [entry for entry in written if Output.TOKEN_LABELS in entry.given.outputs]
        others = [entry for entry in written if Output.TOKEN_LABELS not in entry.given.outputs]
        texts = [entry.written for entry in others]
        found = self._shared.encode_ids(texts, [self._wanted(entry) for entry in others])
        for entry, ids in zip(others, found, strict=True):
            entry.bare = ids
        texts = [entry.written for entry in with_spans]
        encodings = self._shared.encode(texts, [self._wanted(entry) for entry in with_spans], offsets=True)
        for entry, encoding in zip(with_spans, encodings, strict=True):
            entry.bare = encoding.ids
            entry.encoding = encoding

    def _wanted(self, entry: _PendingText) -> int | None:
        """Count the leading tokens of a text that are needed. None: all."""
        own = entry.text.max_own_tokens
        limit = entry.limit if entry.side == "right" else None
        if own is None:
            if limit is None and entry.is_long and not entry.given.may_split:
                return entry.longest + 1  # enough to reject it
            return None if limit is None else limit + 1
        if self._limits.truncation_side == "left":
            return None
        own += len(entry.prompt or ())
        return own if limit is None else min(own, limit + 1)

    def _encode_prompts(self, entries: Sequence[_PendingText]) -> None:
        some = [
            entry
            for entry in entries
            if entry.given.prompt
            and isinstance(entry.text.source, str)
            and (not self._pools_prompt or entry.given.may_split or entry.text.max_own_tokens is not None)
        ]
        if some:
            prompts = list({entry.given.prompt for entry in some})
            ids = dict(zip(prompts, self._shared.encode_ids(prompts), strict=True))
            for entry in some:
                entry.prompt = ids[entry.given.prompt]

    def _finish(self, entry: _PendingText) -> ReadText:
        """Cut the text, add special tokens, and check the result."""
        text, special, limit = entry.text, entry.special, entry.limit
        bare = entry.bare if entry.bare is not None else []
        if text.max_own_tokens is not None:
            before = common_prefix(bare, entry.prompt)
            bare = [*bare[:before], *truncated(bare[before:], text.max_own_tokens, self._limits.truncation_side)]
        around = len(special)
        tokens = len(bare) + around
        start, end = 0, len(bare)
        try:
            if limit is not None and tokens > limit:
                if text.must_fit:
                    raise too_long_error(limit)
                room = max(limit - around, 0)
                start, end = (0, room) if entry.side == "right" else (end - room, end)
            elif tokens > entry.longest:
                if entry.given.may_split and limit is None:
                    return tuple(self._split(entry, bare))
                replace(self._limits, max_tokens=entry.longest).check_length(tokens, is_all=not entry.is_long)
            # A limit below the special tokens leaves no text at all, and not even all of them.
            ids = [*special.prefix, *bare[start:end], *special.suffix][:limit]
            self._limits.check_ids(ids)
        except InvalidInput as error:
            return error
        sequence = entry.role.sequence(
            ids,
            entry.given.outputs,
            expand=special is not _NONE,
            prompt_tokens=0 if self._pools_prompt else self._prompt_tokens(entry, cut=start),
            spans=None if entry.encoding is None else _spans(entry, start, end),
        )
        return Prepared(sequence, tokens=len(sequence.ids), batch_key=entry.given.outputs)

    def _split(self, entry: _PendingText, bare: TokenIds) -> Iterator[Prepared[TokenSequence]]:
        """Yield parts of the model's full length; each begins with the tokens of the prompt."""
        special = entry.special
        before = common_prefix(bare, entry.prompt)
        room = self._limits.max_tokens - len(special) - before
        if room <= 0:
            message = f"The prompt leaves no room for a text: this model takes {self._limits.max_tokens} tokens."
            raise InvalidInput(message, param="input")
        if len(bare) - before > room * _MAX_PARTS:
            raise InvalidInput(
                f"The input has {len(bare)} tokens, and would have to be cut into more than {_MAX_PARTS} parts. "
                "Please reduce its length, or set $max_tokens.",
                param="input",
            )
        for start in range(before, len(bare), room):
            ids = [*special.prefix, *bare[:before], *bare[start : start + room], *special.suffix]
            self._limits.check_ids(ids)
            prompt_tokens = self._prompt_tokens(entry, cut=0)
            if start > before:  # only in the first part can the text share a token with the prompt
                prompt_tokens = min(prompt_tokens, len(special.prefix) + before)
            sequence = TokenSequence(ids, entry.given.outputs, prompt_tokens=prompt_tokens)
            yield Prepared(sequence, tokens=len(ids), batch_key=entry.given.outputs)

    def _prompt_tokens(self, entry: _PendingText, *, cut: int) -> int:
        """Count the leading tokens that pooling excludes.

        The count is that of sentence-transformers (`_get_prompt_length`): the tokens of the prompt with special tokens,
        minus one if the last is a special token.

        Args:
            entry: The input.
            cut: Number of tokens cut off the beginning of prompt and text.
        """
        if self._pools_prompt or entry.prompt is None:
            return 0
        alone = [*entry.special.prefix, *entry.prompt, *entry.special.suffix]
        tokens = len(alone) - (bool(alone) and alone[-1] in self._special_ids)
        return tokens if cut == 0 else max(tokens - cut, len(entry.special.prefix))


def _spans(entry: _PendingText, start: int, end: int) -> tuple[Span, ...] | None:
    """Spans of the tokens `start` to `end`, and their special tokens, in the caller's text.

    A token of the prompt has an empty span. A token that reaches from the prompt into the text has the span of its part
    in the text. Returns None for a conversation, since no token then stands for a text of the caller.
    """
    if isinstance(entry.text.source, Chat):
        return None
    prompt = len(entry.given.prompt)
    offsets, words = entry.encoding.offsets, entry.encoding.word_ids
    first_word: int = next((words[place] for place, (_, stop) in enumerate(offsets) if stop > prompt), None) or 0
    own = [
        Span(max(a - prompt, 0), b - prompt, None if word is None else word - first_word) if b > prompt else _NO_SPAN
        for (a, b), word in zip(offsets[start:end], words[start:end], strict=True)
    ]
    special = entry.special
    return (*[_NO_SPAN] * len(special.prefix), *own, *[_NO_SPAN] * len(special.suffix))[: entry.limit]
