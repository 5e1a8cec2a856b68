"""What the engine asks of a model: plain functions, and a card that says what was understood of its folder."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.requests import Chat, Image, Output, Outputs, PairInput, TextInput
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.stages.errors import InvalidInput, ModelFailed
from staged_pool.stages.work import Prepared

TokenIds: TypeAlias = list[int]
Role: TypeAlias = Literal["query", "document"]
Scoring: TypeAlias = Literal["cross-encoder", "bi-encoder", "sparse", "late-interaction"]
Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]
Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]
Lane: TypeAlias = Literal["text", "image"]
"""What waits for what: inputs with images take ways of their own through preprocess and the device, so that texts
never wait behind them."""


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The entries of a vector as wide as the vocabulary that are not 0."""

    indices: NDArray[np.int32]
    """[entries], ascending: token ids."""
    values: NDArray[np.float32]
    """[entries]: their weights."""

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return self.indices.size + self.values.size


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
class Pixels:
    """One image as the device is to read it."""

    values: NDArray[np.uint8] | NDArray[np.float32]
    """[3, height, width], or [patches, values of one] for models that take images of any shape. As bytes, which the
    device brings to the scale that the model was trained on; as float32 where that has been done."""
    grid: tuple[int, int] | None = None
    """Patches high and wide, for models that take images of any shape."""

    @property
    def patches(self) -> int | None:
        """Of the grid; None where there is none."""
        return None if self.grid is None else self.grid[0] * self.grid[1]


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One input that is an image and nothing else."""

    pixels: Pixels
    outputs: Outputs
    tokens: int
    """Vectors that the transformer computes for it: its patches, and what the model puts beside them."""


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
    images: tuple[Pixels, ...] = ()
    """Images whose vectors take the places of the image tokens in `ids`, in order."""

    @property
    def tokens(self) -> int:
        return len(self.ids)


Payload: TypeAlias = TokenSequence | PreparedImage
"""What the device reads: all of one kind in a batch, as their batch keys say."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the device made of one input."""

    values: Mapping[Output, Values]
    payload: Payload


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input as the model's preprocess gets it: what the caller sent, and what is to be made of it."""

    source: TextInput | PairInput | Image
    outputs: Outputs
    prompt: str = ""
    """Goes before the text."""
    role: Role | None = None
    """For models that read queries and documents differently."""
    may_split: bool = False
    """An input that is too long is cut into several instead of being refused."""
    sharing_scope: Hashable = None
    """Its prepared images are shared with inputs of an equal scope only."""

    @property
    def images(self) -> tuple[Image, ...]:
        """The images in it, in order."""
        match self.source:
            case Image():
                return (self.source,)
            case TextInput(source=Chat() as chat):
                return chat.images
            case _:
                return ()

    @property
    def lane(self) -> Lane:
        return "image" if self.images else "text"

    def with_images(self, images: Sequence[Image]) -> ModelInput:
        """The same input with other images, as many as it has."""
        match self.source:
            case Image():
                return replace(self, source=images[0])
            case TextInput(source=Chat() as chat):
                return replace(self, source=replace(self.source, source=chat.with_images(images)))
            case _:
                return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What was understood of a model folder and how it runs. ImageEmbeds at start, in `/ready` and in `/v1/models`."""

    name: str
    """The served name."""
    architecture: str
    """Class of the transformer, such as `BertModel`."""
    parameters: int
    lanes: tuple[Lane, ...] = ("text",)
    """What it reads: texts, inputs with images, or both."""
    outputs: tuple[Output, ...] = (Output.DENSE,)
    """What a forward can give."""
    scoring: Scoring | None = "bi-encoder"
    """How a query and a document are compared; None where they cannot be."""
    similarity: Similarity = "cosine"
    """Of two vectors, where `scoring` compares vectors."""
    width: int
    """Values of one dense vector; 0 where there is none."""
    token_width: int = 0
    """Values of one token's vector; 0 where there are none."""
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
    """Such as `cpu` or `cuda:0`; several have commas between them."""
    attention: str
    """`packed` or `padded`."""
    torch_threads: int
    """Of all forwards together."""
    forward_workers: int
    """Forwards at once, over all devices. On a CPU, one that is alone uses all threads, else each has its share."""
    launched_ahead: int = 0
    """Forwards that may have begun behind each that runs, so that a GPU goes on at once."""
    notes: tuple[str, ...] = ()
    """What had to be assumed of the folder."""
    memory_tokens: int | None = None
    """Tokens of a batch that the device has memory for. None: not known."""
    load_s: float
    """Seconds from the first byte read to the end of the warm-up."""

    @property
    def forward_calls(self) -> int:
        """Calls of `Model.forward` at once, at most: those that run, and those behind them."""
        return self.forward_workers * (1 + self.launched_ahead)


@dataclass(frozen=True, slots=True)
class Tokens:
    """One tokenized text."""

    ids: TokenIds
    strings: list[str]
    """What each id stands for, in the tokenizer's own spelling."""
    spans: list[tuple[int, int] | None]
    """Where each stands in the text, in characters; None for a special token that was added."""


class Model(Protocol):
    """A loaded model. `forward` may run in `card.forward_calls` threads at once, the other methods in any number."""

    @property
    def card(self) -> ModelCard: ...

    def pads(self, lane: Lane) -> bool:
        """Whether a batch of a lane costs its longest input times its items, rather than the sum of its tokens."""
        ...

    def preprocess(
        self, inputs: Sequence[ModelInput]
    ) -> Sequence[Prepared[Payload] | tuple[Prepared[Payload], ...] | InvalidInput]:
        """Turn each input into what the device reads, or say what is wrong with it. Order and number are kept.

        Args:
            inputs: All of one lane; their images are at hand.
        """
        ...

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> Sequence[Row | ModelFailed]:
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

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        """Tokenize a text or a conversation without prompt and without cutting it.

        Args:
            source: Its images are at hand.
            add_special_tokens: Whether those are added that the model was trained with.

        Raises:
            InvalidInput: It cannot be tokenized.
            Unsupported: The model makes no tokens of what is in it.
        """
        ...

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text that tokens spell.

        Raises:
            InvalidInput: An id is out of vocabulary.
        """
        ...

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        """What each device does, in the order in which they were named."""
        ...

    @property
    def image_cache(self) -> ImageCacheStatistics | None:
        """What the cache of prepared images has done; None where there is none."""
        ...

    def clear_image_cache(self) -> None:
        """Forget every prepared image that is kept."""
        ...

    def close(self) -> None:
        """End the processes that the model has, if any, and whatever they do: calls that wait for them fail with
        `EngineStopped`. Blocks until they have ended."""
        ...


class LoadedModel(Model, Protocol):
    """A model whose threads are not its own."""

    def warm_up(self, lane: Lane) -> None:
        """Run a short forward of a lane on the calling thread, and on every device.

        Much of what a forward needs belongs to the thread that asks for it: worker threads to share it with on the CPU,
        handles and workspaces on a GPU. Without this they would be made while requests wait.
        """
        ...
