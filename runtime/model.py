"""The interface between the engine and a model: its functions and their inputs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from staged_pool.runtime.card import Lane, ModelCard, Role
from staged_pool.runtime.payloads import ModelRow, Payload
from staged_pool.runtime.requests import Chat, Image, ImagePair, Outputs, PairInput, PluginSource, TextInput
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import InvalidInput, StagedPoolError
from staged_pool.stages.work import Prepared


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
    chunk_tokens: int | None = None
    """Tokens of each chunk, special tokens included. None: its chunks are not runs of tokens."""
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
