"""Texts between the steps of their preparation, and the spans of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.tokenizing.chunks import chunk_tokens
from staged_pool.runtime.models.tokenizing.input_roles import RoleSpec
from staged_pool.runtime.models.tokenizing.shared_tokenizer import CALL_CHARACTERS, Encoding
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens
from staged_pool.runtime.requests import Chat, Output, Side, TextInput
from staged_pool.runtime.spans import NO_TEXT, Span
from staged_pool.runtime.tokens import TokenIds


@dataclass(slots=True, eq=False)
class PendingText:
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
    before: str = ""
    """The beginning of `written` that is not the caller's: the prompt, or what a chat template writes."""
    keeps_before: bool = False
    """Never cut off `before`."""
    prompt: TokenIds | None = None
    """The ids of `before` alone. None: not needed."""
    bare: TokenIds | None = None
    """The ids of the whole text, without special tokens."""
    encoding: Encoding = None

    @property
    def is_long(self) -> bool:
        """True if the text is far longer than a model's input: its beginning is enough to reject it."""
        return len(self.written) > CALL_CHARACTERS

    @property
    def needs_offsets(self) -> bool:
        """True if the characters of its tokens are needed."""
        return self.given.with_spans or bool(self.given.chunk_ends) or Output.TOKEN_LABELS in self.given.outputs

    def own_chunks(self, start: int, end: int) -> list[int] | None:
        """Count the tokens of each chunk, of those from `start` to `end`. None: there are no chunks."""
        ends = self.given.chunk_ends
        return chunk_tokens(self.encoding.offsets, ends, len(self.before), start, end) if ends else None


def spans_of(entry: PendingText, start: int, end: int) -> tuple[Span, ...] | None:
    """Spans of the tokens `start` to `end`, and their special tokens, in the caller's text.

    A token of the prompt has an empty span. A token that reaches from the prompt into the text has the span of its part
    in the text. Returns None for a conversation, since no token then stands for a text of the caller.
    """
    if isinstance(entry.text.source, Chat):
        return None
    prompt = len(entry.before)
    offsets, words = entry.encoding.offsets, entry.encoding.word_ids
    first_word: int = next((words[place] for place, (_, stop) in enumerate(offsets) if stop > prompt), None) or 0
    own = [
        Span(max(a - prompt, 0), b - prompt, None if word is None else word - first_word) if b > prompt else NO_TEXT
        for (a, b), word in zip(offsets[start:end], words[start:end], strict=True)
    ]
    special = entry.special
    return (*[NO_TEXT] * len(special.prefix), *own, *[NO_TEXT] * len(special.suffix))[: entry.limit]
