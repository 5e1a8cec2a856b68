"""What the engine asks of a model: plain functions, and a card that says what was understood of its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.requests import Chat, Output, Outputs, PairInput, TextInput
from staged_pool.stages.errors import InvalidInput, ModelFailed
from staged_pool.stages.work import Prepared

TokenIds: TypeAlias = list[int]
Role: TypeAlias = Literal["query", "document"]
Scoring: TypeAlias = Literal["cross-encoder", "bi-encoder", "sparse", "late-interaction"]
Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]
Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The entries of a vector as wide as the vocabulary that are not 0."""

    indices: NDArray[np.int32]
    """[entries], ascending: token ids."""
    values: NDArray[np.float32]
    """[entries]: their weights."""


Values: TypeAlias = NDArray[np.float32] | SparseVector
"""One `Output` of one input, on the host: dense [width] (not yet normalised); multi_vector [tokens kept, width]; labels
[labels]; token_labels [tokens, labels]; or a sparse vector."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a token stands in its text."""

    start: int
    """In characters; `start == end` for a token that stands for no text, such as [CLS]."""
    end: int
    word: int | None
    """Which word of the text it belongs to; None for a token that stands for no text."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One input as the device is to read it."""

    ids: TokenIds
    """At least one."""
    outputs: Outputs
    first_tokens: int | None = None
    """Tokens of the first segment of a pair; the others are of the second. None: there is one segment."""
    prompt_tokens: int = 0
    """Leading tokens that pooling leaves out."""
    unseen_tokens: int = 0
    """Trailing tokens that no token attends to, themselves included: a query's expansion in late interaction."""
    kept: tuple[int, ...] | None = None
    """The places whose vectors are given for multi_vector. None: all."""
    spans: tuple[Span, ...] | None = None
    """One a token, where token_labels are wanted."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the device made of one sequence."""

    values: Mapping[Output, Values]
    sequence: TokenSequence


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input as the model's preprocess gets it: what the caller sent, and what is to be made of it."""

    source: TextInput | PairInput
    outputs: Outputs
    prompt: str = ""
    """Goes before the text."""
    role: Role | None = None
    """For models that read queries and documents differently."""
    may_split: bool = False
    """An input that is too long is cut into several instead of being refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What was understood of a model folder and how it runs. Shown at start, in `/ready` and in `/v1/models`."""

    name: str
    """The served name."""
    architecture: str
    """Class of the transformer, such as `BertModel`."""
    parameters: int
    outputs: tuple[Output, ...] = (Output.DENSE,)
    """What a forward can give."""
    scoring: Scoring | None = "bi-encoder"
    """How a query and a document are compared; None where they cannot be."""
    similarity: Similarity = "cosine"
    """Of two vectors, where `scoring` compares vectors."""
    width: int
    """Values of one dense vector; 0 where there is none."""
    matryoshka: bool = False
    """Whether dense vectors may be cut: the model was trained for it."""
    dimensions: tuple[int, ...] = ()
    """The widths that it was trained for, where the folder says so; empty: any."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of their logits."""
    activation: Activation = "identity"
    """What makes scores of logits."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that the model was trained to see before an input, by name."""
    default_prompt: str = ""
    """Goes before a text unless the request names another one."""
    max_tokens: int
    """Longest input, special tokens included."""
    vocabulary: int
    """Token ids run from 0 to one less."""
    pooling: str
    """How token vectors become one vector, such as `mean`, or `cls+max` where several are concatenated."""
    normalize: bool
    """Whether dense vectors are brought to length 1."""
    splits_long_inputs: bool = False
    """Whether an embedding of a longer input is the mean of its parts'."""
    dtype: str
    device: str
    attention: str
    """`packed` or `padded`."""
    torch_threads: int
    """Of all forwards together."""
    forward_workers: int
    """Forwards at once. One that has the device to itself uses all threads, else each has its share of them."""
    load_s: float
    """Seconds from the first byte read to the end of the warm-up."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One tokenized text."""

    ids: TokenIds
    strings: list[str]
    """What each id stands for, in the tokenizer's own spelling."""


class Model(Protocol):
    """A loaded model. `forward` may run in `card.forward_workers` threads at once, the other methods in any number."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def pads(self) -> bool:
        """Whether a batch costs its longest input times its items, rather than the sum of its tokens."""
        ...

    def preprocess(
        self, inputs: Sequence[ModelInput]
    ) -> Sequence[Prepared[TokenSequence] | tuple[Prepared[TokenSequence], ...] | InvalidInput]:
        """Turn each input into token ids, or say what is wrong with it. Order and number are kept."""
        ...

    def forward(self, payloads: Sequence[TokenSequence], at_once: int = 1, /) -> Sequence[Row | ModelFailed]:
        """Run one batch, all of it for the same outputs. A row that holds NaN or Inf is returned as `ModelFailed`; the
        others stand.

        Args:
            payloads: At least one.
            at_once: How many forwards are to share the device: 1 if this one has it to itself.

        Raises:
            OutOfMemory: The device has no room for this batch.
            DeviceLost: The device can no longer be trusted.
        """
        ...

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens: ...

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text that tokens spell.

        Raises:
            InvalidInput: An id is out of vocabulary.
        """
        ...
