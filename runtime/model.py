"""The interface between the engine and a model: its functions, its payloads and its card."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.requests import Chat, Image, ImagePair, Output, Outputs, PairInput, PluginSource, TextInput
from staged_pool.runtime.spans import Span
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import InvalidInput, StagedPoolError
from staged_pool.stages.work import Prepared

Role: TypeAlias = Literal["query", "document"]
Scoring: TypeAlias = Literal["cross-encoder", "bi-encoder", "sparse", "late-interaction"]
Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]
Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]
Lane: TypeAlias = Literal["text", "image", "plugin"]
"""Kind of an input. Each lane has its own stages, so texts never wait behind images; plugins have their own engine."""


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The entries other than 0 of a vector over the vocabulary."""

    indices: NDArray[np.int32]
    """[entries]: token ids, ascending."""
    values: NDArray[np.float32]
    """[entries]: weights of these tokens."""

    @property
    def size(self) -> int:
        """Count of numbers in both arrays."""
        return self.indices.size + self.values.size


Values: TypeAlias = NDArray[np.float32] | SparseVector
"""One `Output` of one input, on the host.

dense [width], or [chunks, width] of a document in chunks, not normalised; multi_vector [kept tokens, width]; labels
[labels]; token_labels [tokens, labels]; token_weights [tokens]; or a sparse vector."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """One image or video, ready for the device."""

    values: NDArray[np.uint8] | NDArray[np.float32]
    """[3, height, width], or [patches, patch values] for models that take images of any shape.

    Bytes are normalised on the device; float32 values are normalised already.
    """
    grid: tuple[int, int] | None = None
    """Height and width in patches, for models that take images of any shape."""
    steps: int = 1
    step_s: float | None = None
    """Steps of a video, each with the patches of `grid`, and seconds of a step. None: an image."""
    times_s: tuple[float, ...] | None = None
    """Times of a video's steps in seconds, for a model whose text tells them. The device needs none."""

    @property
    def patches(self) -> int | None:
        """Number of patches in the grid, over all steps; None without a grid."""
        return None if self.grid is None else self.steps * self.grid[0] * self.grid[1]


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An input of one image without text, ready for the device."""

    pixels: Pixels
    outputs: Outputs
    tokens: int
    """Vectors that the transformer computes for it: its patches and the special tokens of the model."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """An input of tokens, ready for the device; it may hold images."""

    ids: list[int]
    """Token ids, at least one."""
    outputs: Outputs
    first_tokens: int | None = None
    """Tokens of the first segment of a pair; the rest is the second segment. None: one segment."""
    prompt_tokens: int = 0
    """Leading tokens that pooling leaves out."""
    unseen_tokens: int = 0
    """Trailing tokens that no token attends to, such as a query's expansion in late interaction."""
    kept: tuple[int, ...] | None = None
    """Indices of the tokens whose vectors multi_vector returns, or whose labels are those of steps. None: all."""
    spans: tuple[Span, ...] | None = None
    """The span of each token, for token_labels, or because the request wants offsets."""
    images: tuple[Pixels, ...] = ()
    """Images whose vectors replace the image tokens in `ids`, in order."""
    looked_up: bool = False
    """True: sparse weights of its tokens are looked up in a table, and the transformer does not read it."""
    chunks: tuple[int, ...] | None = None
    """Tokens of each chunk of a document, which sum to those in `ids`; each gets a dense vector. None: no chunks."""
    adapter: str | None = None
    """Adapter of the forward, the same for a whole batch. None: the base model."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids)


Payload: TypeAlias = TokenSequence | PreparedImage
"""An input that is ready for the device. A batch has payloads of one kind; their batch keys see to that."""


@dataclass(frozen=True, slots=True)
class Row:
    """The outputs of the device for one input."""

    values: Mapping[Output, Values]
    payload: Payload

    @property
    def numbers(self) -> int:
        """Count of numbers in all outputs."""
        return sum([value.size for value in self.values.values()])


class ModelRow(Protocol):
    """Result of a forward for one payload, as the engine sees it."""

    @property
    def numbers(self) -> int:
        """Count of numbers in it, of 4 bytes each, for the memory of answers."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input of preprocess: the source from the caller, and the requested outputs."""

    source: TextInput | PairInput | ImagePair | Image | PluginSource
    outputs: Outputs
    prompt: str = ""
    """Text to put before a text, or the instruction of a model that reads conversations."""
    role: Role | None = None
    """The role of the source, for models that treat queries and documents differently."""
    may_split: bool = False
    """Cut an input that is too long into several, instead of rejecting it."""
    chunk_ends: tuple[int, ...] = ()
    """Characters of the source up to the end of each of its chunks. Empty: it is not in chunks."""
    with_spans: bool = False
    """Find the span of each token."""
    adapter: str | None = None
    """Adapter of the model that reads it. None: the base model."""
    sharing_scope: Hashable = None
    """Scope of `share_between_tenants` and the salt: prepared images are shared only within it."""

    @property
    def images(self) -> tuple[Image, ...]:
        """All images and videos of the source, in order."""
        if isinstance(self.source, Image):
            return (self.source,)
        content = self.source.source if isinstance(self.source, TextInput) else self.source
        return content.images if isinstance(content, Chat | ImagePair) else ()

    @property
    def lane(self) -> Lane:
        """The lane of the input: `image` if it has an image."""
        return "plugin" if isinstance(self.source, PluginSource) else "image" if self.images else "text"

    def with_images(self, images: Sequence[Image]) -> ModelInput:
        """Return the same input with other images, one for each of its own."""
        if isinstance(self.source, Image):
            return replace(self, source=images[0])
        if isinstance(self.source, ImagePair):
            return replace(self, source=self.source.with_images(images))
        if isinstance(self.source, TextInput) and isinstance(self.source.source, Chat):
            return replace(self, source=replace(self.source, source=self.source.source.with_images(images)))
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Description of a loaded model, for the log, `/ready` and `/v1/models`."""

    name: str
    """Served name of the model."""
    architecture: str
    """Class of the transformer, such as `BertModel`."""
    parameters: int
    lanes: tuple[Lane, ...] = ("text",)
    """Kinds of inputs that it reads: texts, inputs with images, or both."""
    reads_videos: bool = False
    """True if inputs with images may have videos too."""
    outputs: tuple[Output, ...] = (Output.DENSE,)
    """Outputs of a forward."""
    scoring: Scoring | None = "bi-encoder"
    """Method of comparing a query with a document; None if the model has none."""
    similarity: Similarity = "cosine"
    """Similarity of two vectors, if `scoring` compares vectors."""
    width: int
    """Width of a dense vector; 0 if there is none."""
    token_width: int = 0
    """Width of a token's vector; 0 if there is none."""
    matryoshka: bool = False
    """True if dense vectors may be cut, because the model was trained for it."""
    dimensions: tuple[int, ...] = ()
    """Widths that it was trained for. Empty: any width."""
    max_active_dims: int | None = None
    """Most weights that a sparse vector keeps. None: all."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of their logits."""
    activation: Activation = "identity"
    """Function from logits to scores."""
    labels_steps: bool = False
    """True if labels are those of steps, each of which ends in a tag."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts of the model by name: texts to put before an input."""
    default_prompt: str = ""
    """Prompt to put before a text if the request names none."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Adapter for each name of a prompt; for the empty name, that of requests which name none."""
    max_tokens: int
    """Longest input in tokens, special tokens included."""
    vocabulary: int
    """Size of the vocabulary: token ids are below it."""
    pooling: str
    """Pooling of token vectors, such as `mean`, or `cls+max` for a concatenation."""
    normalize: bool
    """True if dense vectors are normalised to length 1."""
    splits_long_inputs: bool = False
    """True if the embedding of a longer input is the mean of its parts."""
    dtype: str
    device: str
    """Name of the device, such as `cpu` or `cuda:0`; several names with commas between them."""
    attention: str
    """Layout of batches: `packed` or `padded`."""
    torch_threads: int
    """Threads of torch for all forwards together."""
    forward_workers: int
    """Forwards at once on all devices. On a CPU a forward that is alone uses all threads, else its share."""
    launched_ahead: int = 0
    """Forwards launched behind each one that runs, so that a GPU does not wait."""
    notes: tuple[str, ...] = ()
    """Assumptions about the model folder, where its files are silent."""
    memory_tokens: int | None = None
    """Tokens of a batch that the device has memory for. None: unknown."""
    is_plugin: bool = False
    """True for a plugin: it takes data of its own, and does no task of models."""
    load_s: float
    """Seconds from the first byte read to the end of the warm-up."""

    @property
    def summary(self) -> dict[str, object]:
        """A few facts for the log."""
        return {"width": self.width, "dtype": self.dtype, "device": self.device, "load_s": round(self.load_s, 3)}

    @property
    def forward_calls(self) -> int:
        """Most calls of `Model.forward` at once, launched ones included."""
        return self.forward_workers * (1 + self.launched_ahead)


Preprocessed: TypeAlias = Prepared[Payload] | tuple[Prepared[Payload], ...] | InvalidInput
"""Result of preprocess for one input: its payload, those of the parts that it was cut into, or its error."""


class Preparer(Protocol):
    """The part of a model that prepares its inputs, without weights. Any number of threads may call it at once."""

    @property
    def card(self) -> ModelCard: ...

    def pads(self, lane: Lane) -> bool:
        """Return True if batches of a lane are padded to their longest input."""

    def preprocess(
        self, inputs: Sequence[ModelInput]
    ) -> Sequence[Prepared[Any] | tuple[Prepared[Any], ...] | StagedPoolError]:
        """Turn each input, in order, into a payload or its error. Only the model looks into payloads.

        Args:
            inputs: Inputs of one lane. Their images are fetched already.
        """

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        """Tokenize a text or a conversation, without a prompt and without cutting it.

        Args:
            source: Images of a conversation are fetched already.
            add_special_tokens: Add the special tokens that the model was trained with.

        Raises:
            InvalidInput: It cannot be tokenized.
            Unsupported: The model makes no tokens of texts, or of images.
        """

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids.

        Raises:
            InvalidInput: An id is out of vocabulary.
        """

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        """Statistics of each device, in the order of the setting."""

    @property
    def image_cache(self) -> ImageCacheStatistics | None:
        """Statistics of the cache of prepared images; None without a cache."""

    def clear_image_cache(self) -> None:
        """Drop all cached images."""

    def close(self) -> None:
        """End the processes of the model, if any. Calls that wait for them fail with `EngineStopped`."""


class Model(Preparer, Protocol):
    """A loaded model. At most `card.forward_calls` threads may call `forward` at once."""

    def forward(self, payloads: Sequence[Any], at_once: int = 1, /) -> Sequence[ModelRow | StagedPoolError]:
        """Run one batch of payloads of the same batch key.

        A row that holds NaN or Inf becomes `ModelFailed`. Other rows of the batch are not affected.

        Args:
            payloads: At least one.
            at_once: Number of forwards that share the device: 1 if this one has it to itself.

        Raises:
            OutOfMemory: The device has no room for this batch.
            DeviceLost: The device can no longer be trusted.
        """


class LoadedModel(Model, Protocol):
    """A model that runs on the threads of its caller."""

    def warm_up(self, lane: Lane) -> None:
        """Run a short forward of a lane on the calling thread, on every device.

        Else its first requests would wait for OpenMP threads on a CPU, or for handles and workspaces on a GPU.
        """

    def release(self) -> None:
        """Give the weights back. Nothing but its statistics is asked for after that."""
