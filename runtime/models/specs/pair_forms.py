"""Prompts of pairs, for rerankers that are language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTemplate:
    """An LLM reranker's prompt: renders query, document and instruction as one text."""

    text: str | None = None
    """Prompt with the fields `{query}` and `{document}`, and `{instruction}` if it takes one.

    None: the chat template of the folder's tokenizer. As in sentence-transformers, it gets one message of role `query`
    and one of role `document`, and before them one of role `system` if there is an instruction.
    """
    instruction: str | None = None
    """Instruction of requests that bring none. None: the chat template's own default."""
    structured: bool = False
    """For a chat template: a message's content is a list of `{"type": "text", "text": ...}`, not a string."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a chat template besides the messages, such as `add_generation_prompt`."""
    add_special_tokens: bool = False
    """Add the tokenizer's special tokens around the text."""
    instruction_format: str = "{instruction}"
    """For `text`: the form of an instruction that is not empty."""
    roles: tuple[str, str] = ("query", "document")
    """For a chat template: the roles of the messages with the query and the document."""
    strips: bool = False
    """For a chat template: strip white space around both texts."""
    empty: str = ""
    """For `text`: the text that stands for an empty query or document."""
    image: str | None = None
    """For `text`: the text that stands for an image. None: the model reads no images in pairs."""
    video: str | None = None
    """For `text`: the text that stands for a video. None: the model reads no videos in pairs."""
    end: tuple[int, ...] = ()
    """Token ids after the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPieces:
    """An LLM reranker's prompt in pieces, each of which is tokenized by itself."""

    starts_with_bos: bool = False
    """Begin with the tokenizer's `bos_token`, unless it is the padding token too."""
    before: str = ""
    """Piece before the query. Empty: there is none."""
    query: str
    """Piece with the field `{query}`."""
    instruction: str | None = None
    """Text with the field `{instruction}`, put before the query in its piece.

    It is left out if there is no instruction. None: the model takes no instruction.
    """
    between: str
    """Piece between query and document."""
    document: str
    """Piece with the field `{document}`."""
    after: tuple[str, ...]
    """Pieces after the document."""
    max_tokens: int
    """The authors' `max_length`: tokens of query and document together. The query has at most 3/4 of them."""
    counts_after: bool = False
    """Let the whole sequence exceed `max_tokens` by the tokens of `after`, as in FlagEmbedding."""


PairForm: TypeAlias = PairTemplate | PairPieces
"""The prompt of an LLM reranker."""
