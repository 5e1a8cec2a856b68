"""Texts, token ids and conversations as sequences: prompt, special tokens and truncation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from staged_pool.runtime.card import Role
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.tokenizing.chat import ChatTemplate, plain_text
from staged_pool.runtime.models.tokenizing.chunks import around, check_runs, runs, windows
from staged_pool.runtime.models.tokenizing.conversations import ConversationWriter
from staged_pool.runtime.models.tokenizing.input_roles import PLAIN, ROLES, RoleSpec
from staged_pool.runtime.models.tokenizing.limits import (
    InputLimits,
    check_own_limit,
    check_text,
    token_limit,
    too_long_error,
    truncated,
)
from staged_pool.runtime.models.tokenizing.pending_texts import PendingText, spans_of
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer, common_prefix
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens, read_frame
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Chat, TextInput
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared

_MAX_PARTS: Final = 1024
"""Most parts that a long input may be split into."""

_NONE: Final = SpecialTokens([], [])

ReadText: TypeAlias = "Prepared[TokenSequence] | tuple[Prepared[TokenSequence], ...] | InvalidInput"


class TextReader:
    """Tokenizer of inputs that are not pairs. `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        special: The special tokens around a text.
        limits: The model's limits.
        pools_prompt: True if pooling includes the tokens of a prompt. False marks them in each sequence.
        chat_template: Renders a conversation as one text. None: the model has no chat template.
        conversations: Renders every input as a conversation. None: texts are read as they are.
        plain_chats: Read a conversation as the texts of its messages, without a template.
        roles: Treatment of queries and documents. A text without a role is a document.
        empty_id: Token that stands for a text without tokens. None: such a text is rejected.
        step_id: See `TextSettings`.
    """

    def __init__(
        self,
        shared: SharedTokenizer,
        special: SpecialTokens,
        limits: InputLimits,
        *,
        pools_prompt: bool,
        chat_template: ChatTemplate | None,
        conversations: ConversationWriter | None = None,
        plain_chats: bool,
        roles: Mapping[Role, RoleSpec],
        empty_id: int | None = None,
        step_id: int | None = None,
    ) -> None:
        self._empty_id = empty_id
        self._step_id = step_id
        self._shared = shared
        self._special = special
        self._roles = {role: roles.get(role, PLAIN) for role in ROLES}
        framed = {role: special if spec.frame is None else spec.frame for role, spec in self._roles.items()}
        self._marked = {
            role: SpecialTokens([*framed[role].prefix, *spec.marker], framed[role].suffix)
            for role, spec in self._roles.items()
        }
        self._limits = limits
        self._pools_prompt = pools_prompt
        self._chat_template = chat_template
        self._conversations = conversations
        self._end = _NONE if conversations is None else read_frame(("", conversations.end), shared.tokenizer)
        self._plain_chats = plain_chats
        added = shared.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, added_token in added.items() if added_token.special)

    def read(self, inputs: Sequence[tuple[ModelInput, TextInput]]) -> list[ReadText]:
        """Tokenize each input, or return the error of its request."""
        entries = [self._begin(given, text) for given, text in inputs]
        self._encode([entry for entry in entries if isinstance(entry, PendingText)])
        return [self._finish(entry) if isinstance(entry, PendingText) else entry for entry in entries]

    def _begin(self, given: ModelInput, text: TextInput) -> PendingText | InvalidInput:
        if self._plain_chats and isinstance(text.source, Chat):
            text = replace(text, source=plain_text(text.source), add_special_tokens=True)
        source = text.source
        name: Role = given.role or "document"
        role = self._roles[name]
        try:
            asked = token_limit(text.max_tokens, self._limits.max_tokens)
            limit, longest = role.limit(asked, self._limits.max_tokens)
            if given.chunk_tokens is not None:
                check_runs(role)
                limit = None  # a role that always cuts would lose text of which the caller gets the ranges
            side = self._limits.side(text.truncate_side)
            if text.max_own_tokens is not None:
                check_own_limit(text.max_own_tokens)
            if isinstance(source, tuple):
                return PendingText(given, text, _NONE, role, limit, longest, side, bare=list(source))
            if self._conversations is not None:
                before, written, special = self._conversation(source, given.prompt, self._conversations)
            else:
                before = given.prompt if isinstance(source, str) else ""
                written = before + source if isinstance(source, str) else self.write_chat(source, given.prompt)
                special = self._marked[name] if text.add_special_tokens else _NONE
            check_text(written)
        except InvalidInput as error:
            return error
        keeps = self._conversations is not None
        return PendingText(given, text, special, role, limit, longest, side, written, before, keeps)

    def _conversation(
        self, source: str | Chat, prompt: str, writer: ConversationWriter
    ) -> tuple[str, str, SpecialTokens]:
        """Render an input as a conversation.

        Returns:
            The beginning that is not the caller's, the text up to the usual end, and the tokens of that end.
        """
        if isinstance(source, str):
            before, _ = writer.around(prompt)
            return before, before + writer.text(source), self._end
        written = writer.write(source, prompt)
        if not written.endswith(writer.end):
            return "", written, _NONE
        return "", written.removesuffix(writer.end), self._end

    def place(self, prompt: str) -> SpecialTokens:
        """See `TextTokenizer.place`."""
        if self._conversations is None:
            return _NONE
        return SpecialTokens(self._shared.ids(self._conversations.around(prompt)[0]), self._end.suffix)

    def write_chat(self, chat: Chat, prompt: str = "") -> str:
        """Render a conversation as one text. A prompt becomes a system message, as in sentence-transformers.

        Raises:
            InvalidInput: There is no chat template, or it does not accept this conversation.
        """
        if self._conversations is not None:
            return self._conversations.write(chat, prompt)
        if self._plain_chats:
            return prompt + plain_text(chat)
        if self._chat_template is None:
            raise InvalidInput("The model's tokenizer has no chat template, so it takes no messages.", param="messages")
        return self._chat_template.chat(chat, prompt)

    def _encode(self, entries: Sequence[PendingText]) -> None:
        self._encode_prompts(entries)
        written = [entry for entry in entries if entry.bare is None]
        with_spans = [entry for entry in written if entry.needs_offsets]
        others = [entry for entry in written if not entry.needs_offsets]
        found = self._shared.encode_ids([entry.written for entry in others], [self._wanted(entry) for entry in others])
        for entry, ids in zip(others, found, strict=True):
            entry.bare = ids
        texts = [entry.written for entry in with_spans]
        encodings = self._shared.encode(texts, [self._wanted(entry) for entry in with_spans], offsets=True)
        for entry, encoding in zip(with_spans, encodings, strict=True):
            entry.bare = encoding.ids
            entry.encoding = encoding

    def _wanted(self, entry: PendingText) -> int | None:
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

    def _encode_prompts(self, entries: Sequence[PendingText]) -> None:
        some = [
            entry
            for entry in entries
            if entry.before
            and (
                not self._pools_prompt
                or entry.given.may_split
                or entry.text.max_own_tokens is not None
                or (entry.keeps_before and entry.side == "left")
            )
        ]
        if some:
            prompts = list({entry.before for entry in some})
            ids = dict(zip(prompts, self._shared.encode_ids(prompts), strict=True))
            for entry in some:
                entry.prompt = ids[entry.before]

    def _finish(self, entry: PendingText) -> ReadText:
        """Cut the text, add special tokens, and check the result."""
        text, special, limit = entry.text, entry.special, entry.limit
        bare = entry.bare if entry.bare is not None else []
        if text.max_own_tokens is not None:
            before = common_prefix(bare, entry.prompt)
            bare = [*bare[:before], *truncated(bare[before:], text.max_own_tokens, self._limits.truncation_side)]
        added = len(special)
        tokens = len(bare) + added
        start, end = 0, len(bare)
        try:
            if limit is not None and tokens > limit:
                if text.must_fit:
                    raise too_long_error(limit)
                room = max(limit - added, 0)
                if entry.keeps_before and entry.side == "left":
                    kept = min(common_prefix(bare, entry.prompt), room)
                    bare = [*bare[:kept], *bare[end - (room - kept) :]]
                    end = len(bare)
                else:
                    start, end = (0, room) if entry.side == "right" else (end - room, end)
            elif tokens > entry.longest:
                if entry.given.may_split and limit is None:
                    return tuple(self._split(entry, bare))
                replace(self._limits, max_tokens=entry.longest).check_length(tokens, is_all=not entry.is_long)
            # A limit below the special tokens leaves no text at all, and not even all of them.
            ids = [*special.prefix, *bare[start:end], *special.suffix][:limit]
            if not ids and self._empty_id is not None and not isinstance(text.source, tuple):
                ids = [self._empty_id]
            else:
                self._limits.check_ids(ids)
            if entry.given.chunk_tokens is None:
                chunks = around(entry.own_chunks(start, end), len(special.prefix), len(special.suffix))
            else:
                chunks = runs(len(ids), entry.given.chunk_tokens)
            steps = None if self._step_id is None else self._steps(ids, self._step_id)
        except InvalidInput as error:
            return error
        sequence = entry.role.sequence(
            ids,
            entry.given.outputs,
            expand=special is not _NONE,
            prompt_tokens=0 if self._pools_prompt else self._prompt_tokens(entry, cut=start),
            spans=None if entry.encoding is None or entry.given.chunk_ends else spans_of(entry, start, end),
            chunks=chunks,
        )
        if steps is not None:
            sequence = replace(sequence, kept=steps)
        return Prepared(sequence, tokens=len(sequence.ids), batch_key=entry.given.outputs)

    def _steps(self, ids: TokenIds, tag: int) -> tuple[int, ...]:
        """Return the places of the tags that end steps.

        Raises:
            InvalidInput: There is none.
        """
        places = tuple(place for place, token in enumerate(ids) if token == tag)
        if not places:
            written = self._shared.tokenizer.id_to_token(tag)
            message = f"The text has no step: put {written} behind each step, within the limit of its tokens."
            raise InvalidInput(message, param="input")
        return places

    def _split(self, entry: PendingText, bare: TokenIds) -> Iterator[Prepared[TokenSequence]]:
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
        chunks = entry.own_chunks(before, len(bare))
        places, start = range(before, len(bare), room), before
        divided = windows(chunks, room) if chunks else ([min(room, len(bare) - place)] for place in places)
        for counts in divided:
            ids = [*special.prefix, *bare[:before], *bare[start : start + sum(counts)], *special.suffix]
            self._limits.check_ids(ids)
            prompt_tokens = self._prompt_tokens(entry, cut=0)
            if start > before:  # only in the first part can the text share a token with the prompt
                prompt_tokens = min(prompt_tokens, len(special.prefix) + before)
            own = around(counts if chunks else None, len(special.prefix) + before, len(special.suffix))
            sequence = TokenSequence(ids, entry.given.outputs, prompt_tokens=prompt_tokens, chunks=own)
            yield Prepared(sequence, tokens=len(ids), batch_key=entry.given.outputs)
            start += sum(counts)

    def _prompt_tokens(self, entry: PendingText, *, cut: int) -> int:
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
