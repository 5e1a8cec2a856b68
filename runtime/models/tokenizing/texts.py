"""Turn texts, token ids and conversations into what the device reads: prompt, special tokens, and cutting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from staged_pool.runtime.model import ModelInput, Role, Span, TokenIds, TokenSequence
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate, plain_text
from staged_pool.runtime.models.tokenizing.input_roles import PLAIN, ROLES, RoleSpec
from staged_pool.runtime.models.tokenizing.limits import (
    InputLimits,
    check_text,
    kept,
    not_to_be_cut,
    own_limit,
    token_limit,
)
from staged_pool.runtime.models.tokenizing.shared_tokenizer import PORTION, Encoding, SharedTokenizer, shared_beginning
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens
from staged_pool.runtime.requests import Chat, Output, Side, TextInput
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared

_MOST_PARTS: Final = 1024
"""Into which one input may be cut."""

_NO_SPAN: Final = Span(0, 0, None)
_NONE: Final = SpecialTokens([], [])

Outcome: TypeAlias = "Prepared[TokenSequence] | tuple[Prepared[TokenSequence], ...] | InvalidInput"


@dataclass(slots=True, eq=False)
class _Reading:
    """One input on its way."""

    given: ModelInput
    text: TextInput
    special: SpecialTokens
    """What goes around it."""
    role: RoleSpec
    limit: int | None
    longest: int
    """What it may have uncut."""
    side: Side
    """The end that is cut off."""
    written: str = ""
    """The text that is tokenized, its prompt included."""
    prompt: TokenIds | None = None
    """The ids of its prompt alone, where something depends on them."""
    bare: TokenIds | None = None
    """The ids of all of it, without special tokens."""
    encoding: Encoding = None

    @property
    def is_long(self) -> bool:
        """No model takes so much, but for texts of long words: a beginning of it says that it is too long."""
        return len(self.written) > PORTION


class TextReader:
    """What `TextTokenizer` does with inputs that are not pairs. `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        special: What goes around a text.
        limits: The model's.
        pools_prompt: Whether pooling counts the tokens of a prompt. False marks them in each sequence.
        chat_template: What makes one text of a conversation. None: nothing does.
        roles: How queries and documents are read, where that differs; a text without a role is a document.
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

    def read(self, inputs: Sequence[tuple[ModelInput, TextInput]]) -> list[Outcome]:
        """What the device is to read for each input, or what is wrong with it."""
        readings = [self._begin(given, text) for given, text in inputs]
        self._encode([reading for reading in readings if isinstance(reading, _Reading)])
        return [self._finish(reading) if isinstance(reading, _Reading) else reading for reading in readings]

    def _begin(self, given: ModelInput, text: TextInput) -> _Reading | InvalidInput:
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
                own_limit(text.max_own_tokens)
            if isinstance(source, tuple):
                return _Reading(given, text, _NONE, role, limit, longest, side, bare=list(source))
            written = given.prompt + source if isinstance(source, str) else self.write_chat(source, given.prompt)
            check_text(written)
        except InvalidInput as error:
            return error
        special = self._marked[name] if text.add_special_tokens else _NONE
        return _Reading(given, text, special, role, limit, longest, side, written)

    def write_chat(self, chat: Chat, prompt: str = "") -> str:
        """A conversation as one text. A prompt becomes a system message before it, as in sentence-transformers.

        Raises:
            InvalidInput: There is no chat template, or it does not take this conversation.
        """
        if self._plain_chats:
            return prompt + plain_text(chat)
        if self._chat_template is None:
            raise InvalidInput("The model's tokenizer has no chat template, so it takes no messages.", param="messages")
        return self._chat_template.chat(chat, prompt)

    def _encode(self, readings: Sequence[_Reading]) -> None:
        self._encode_prompts(readings)
        written = [reading for reading in readings if reading.bare is None]
        with_spans = [reading for reading in written if Output.TOKEN_LABELS in reading.given.outputs]
        others = [reading for reading in written if Output.TOKEN_LABELS not in reading.given.outputs]
        texts = [reading.written for reading in others]
        found = self._shared.encode_ids(texts, [self._wanted(reading) for reading in others])
        for reading, ids in zip(others, found, strict=True):
            reading.bare = ids
        texts = [reading.written for reading in with_spans]
        encodings = self._shared.encode(texts, [self._wanted(reading) for reading in with_spans], offsets=True)
        for reading, encoding in zip(with_spans, encodings, strict=True):
            reading.bare = encoding.ids
            reading.encoding = encoding

    def _wanted(self, reading: _Reading) -> int | None:
        """How many leading tokens of a text have to be known; None for all."""
        own = reading.text.max_own_tokens
        limit = reading.limit if reading.side == "right" else None
        if own is None:
            if limit is None and reading.is_long and not reading.given.may_split:
                return reading.longest + 1  # more is not needed to reject it
            return None if limit is None else limit + 1
        if self._limits.truncation_side == "left":
            return None
        own += len(reading.prompt or ())
        return own if limit is None else min(own, limit + 1)

    def _encode_prompts(self, readings: Sequence[_Reading]) -> None:
        some = [
            reading
            for reading in readings
            if reading.given.prompt
            and isinstance(reading.text.source, str)
            and (not self._pools_prompt or reading.given.may_split or reading.text.max_own_tokens is not None)
        ]
        if some:
            prompts = list({reading.given.prompt for reading in some})
            ids = dict(zip(prompts, self._shared.encode_ids(prompts), strict=True))
            for reading in some:
                reading.prompt = ids[reading.given.prompt]

    def _finish(self, reading: _Reading) -> Outcome:
        """Cut, add special tokens and check."""
        text, special, limit = reading.text, reading.special, reading.limit
        bare = reading.bare if reading.bare is not None else []
        if text.max_own_tokens is not None:
            before = shared_beginning(bare, reading.prompt)
            bare = [*bare[:before], *kept(bare[before:], text.max_own_tokens, self._limits.truncation_side)]
        around = len(special)
        tokens = len(bare) + around
        start, end = 0, len(bare)
        try:
            if limit is not None and tokens > limit:
                if text.must_fit:
                    raise not_to_be_cut(limit)
                room = max(limit - around, 0)
                start, end = (0, room) if reading.side == "right" else (end - room, end)
            elif tokens > reading.longest:
                if reading.given.may_split and limit is None:
                    return tuple(self._split(reading, bare))
                replace(self._limits, max_tokens=reading.longest).check_length(tokens, is_all=not reading.is_long)
            # A limit below the special tokens leaves no text at all, and not even all of them.
            ids = [*special.prefix, *bare[start:end], *special.suffix][:limit]
            self._limits.check_ids(ids)
        except InvalidInput as error:
            return error
        sequence = reading.role.sequence(
            ids,
            reading.given.outputs,
            expand=special is not _NONE,
            prompt_tokens=0 if self._pools_prompt else self._prompt_tokens(reading, cut=start),
            spans=None if reading.encoding is None else _spans(reading, start, end),
        )
        return Prepared(sequence, cost=len(sequence.ids), batch_key=reading.given.outputs)

    def _split(self, reading: _Reading, bare: TokenIds) -> Iterator[Prepared[TokenSequence]]:
        """Parts that each are as long as the model takes: of the tokens behind the prompt's, which stand in each."""
        special = reading.special
        before = shared_beginning(bare, reading.prompt)
        room = self._limits.max_tokens - len(special) - before
        if room <= 0:
            message = f"The prompt leaves no room for a text: this model takes {self._limits.max_tokens} tokens."
            raise InvalidInput(message, param="input")
        if len(bare) - before > room * _MOST_PARTS:
            raise InvalidInput(
                f"The input has {len(bare)} tokens, and would have to be cut into more than {_MOST_PARTS} parts. "
                "Please reduce its length, or set $max_tokens.",
                param="input",
            )
        for start in range(before, len(bare), room):
            ids = [*special.prefix, *bare[:before], *bare[start : start + room], *special.suffix]
            self._limits.check_ids(ids)
            prompt_tokens = self._prompt_tokens(reading, cut=0)
            if start > before:  # what follows the prompt's tokens here did not become one of them
                prompt_tokens = min(prompt_tokens, len(special.prefix) + before)
            sequence = TokenSequence(ids, reading.given.outputs, prompt_tokens=prompt_tokens)
            yield Prepared(sequence, cost=len(ids), batch_key=reading.given.outputs)

    def _prompt_tokens(self, reading: _Reading, *, cut: int) -> int:
        """Leading tokens that pooling leaves out, when `cut` tokens of prompt and text were cut off before them.

        Counted as sentence-transformers does (`_get_prompt_length`): those of the prompt alone with special tokens,
        but one less where the last of these is a special one.
        """
        if self._pools_prompt or reading.prompt is None:
            return 0
        alone = [*reading.special.prefix, *reading.prompt, *reading.special.suffix]
        tokens = len(alone) - (bool(alone) and alone[-1] in self._special_ids)
        return tokens if cut == 0 else max(tokens - cut, len(reading.special.prefix))


def _spans(reading: _Reading, start: int, end: int) -> tuple[Span, ...] | None:
    """Where the tokens `start` to `end` and the special ones around them stand in the caller's text.

    A token of the prompt stands for nothing of that text; one that reaches from the prompt into it, for what it holds
    of it. No token stands for a text of the caller's where that was a conversation.
    """
    if isinstance(reading.text.source, Chat):
        return None
    prompt = len(reading.given.prompt)
    offsets, words = reading.encoding.offsets, reading.encoding.word_ids
    first_word: int = next((words[place] for place, (_, stop) in enumerate(offsets) if stop > prompt), None) or 0
    own = [
        Span(max(a - prompt, 0), b - prompt, None if word is None else word - first_word) if b > prompt else _NO_SPAN
        for (a, b), word in zip(offsets[start:end], words[start:end], strict=True)
    ]
    special = reading.special
    return (*[_NO_SPAN] * len(special.prefix), *own, *[_NO_SPAN] * len(special.suffix))[: reading.limit]
