"""Card of a model: what requests and clients depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from staged_pool.runtime.requests import Output

Role: TypeAlias = Literal["query", "document"]
Scoring: TypeAlias = Literal["cross-encoder", "bi-encoder", "sparse", "late-interaction"]
Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]
Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]
Lane: TypeAlias = Literal["text", "image", "plugin"]
"""Kind of an input. Each lane has its own stages, so texts never wait behind images; plugins have their own engine."""


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
