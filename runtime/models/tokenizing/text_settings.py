"""Settings of the tokenization of one model, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from staged_pool.runtime.card import Role
from staged_pool.runtime.models.specs.conversation import ConversationForm
from staged_pool.runtime.models.specs.pair_forms import PairPieces, PairTemplate
from staged_pool.runtime.models.tokenizing.input_roles import RoleSpec
from staged_pool.runtime.requests import Side

SpecialTexts: TypeAlias = Mapping[str, str | list[str]]
"""The text of each special token by its name, such as `mask_token`; some names have several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Settings of a `TextTokenizer` beside its vocabulary."""

    max_tokens: int
    """Longest input of the model in tokens, special tokens included."""
    vocabulary: int
    """Number of token ids: they run from 0 to `vocabulary` - 1."""
    empty_id: int | None = None
    """Token that stands for a text without tokens, beyond the vocabulary. None: such a text is rejected."""
    step_id: int | None = None
    """Tag behind each step of a text; only the vectors of tags are kept. None: the model scores no steps."""
    pools_prompt: bool = True
    """True if pooling includes the tokens of a prompt. False marks them in each sequence."""
    gives_types: bool = True
    """True if the model takes token types, which distinguish the texts of a pair."""
    chat_template: str | None = None
    """Jinja template that renders a conversation as one text. None: the model has none."""
    conversation: ConversationForm | None = None
    """Form of every input, by the chat template. None: texts are read as they are."""
    special_tokens: SpecialTexts = field(default_factory=dict)
    """Special tokens, for chat templates."""
    pair_template: PairTemplate | None = None
    """Prompt of a pair. None: `pair_pieces`."""
    pair_pieces: PairPieces | None = None
    """Prompt of a pair in pieces. Neither: two texts with the tokenizer's special tokens."""
    needs_pairs: bool = False
    """True if the tokenizer must support pairs."""
    roles: Mapping[Role, RoleSpec] = field(default_factory=dict)
    """Treatment of queries and documents. A text without a role is a document."""
    takes_parts: bool = False
    """True if the chat template takes messages with texts and images."""
    reads_one: bool = False
    """The model reads one text or one image at a time.

    Without a chat template, a conversation of texts is then read as the plain text of its messages.
    """
    truncation_side: Side = "right"
    """The end that is cut off unless the request names one."""
    cleans_up: bool = False
    """Remove spaces before punctuation from decoded text."""
