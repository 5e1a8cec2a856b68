"""Settings of a model folder: its transformer and heads, as frozen values without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from staged_pool.runtime.card import Activation, Role, Scoring, Similarity
from staged_pool.runtime.models.specs.adapters import AdapterSpec
from staged_pool.runtime.models.specs.conversation import ConversationForm, ImageSpec
from staged_pool.runtime.models.specs.layers import LayersScoreSpec, Projection, StepLabelsSpec
from staged_pool.runtime.models.specs.pair_forms import PairForm

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
EndPooling: TypeAlias = Literal["end"]
"""CLIP's pooling: the vector of the first token that has the end token's id."""

SpladePooling: TypeAlias = Literal["max", "sum"]
SpladeActivation: TypeAlias = Literal["relu", "log1p_relu"]

Architecture: TypeAlias = Literal[
    "encoder",
    "static embedding",
    "sequence classifier",
    "token classifier",
    "masked language model",
    "causal language model",
    "vision-language model",
    "two towers",
    "image encoder",
    "image classifier",
]
"""Kind of model in the checkpoint, as the Auto classes of transformers distinguish them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A linear layer with an activation, after the pooling."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """Name of a class of `torch.nn`, such as `Tanh`."""
    residual: bool
    """Add the input to the result, through a second matrix if the widths differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """A layer normalisation, after the pooling."""

    folder: Path
    dimension: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """A normalisation to length 1 with more modules after it."""


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """A linear layer of the checkpoint's own class."""

    name: str
    """Attribute of the class, such as `text_projection`."""


HeadModule: TypeAlias = Dense | LayerNorm | Normalize | Projection | OwnLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """One vector per input."""

    pooling: tuple[PoolingMode | EndPooling, ...]
    """Pooling modes; several are concatenated in this order. `end` must be the only one."""
    modules: tuple[HeadModule, ...]
    """Modules after the pooling, without the normalisation at the end."""
    normalize: bool
    """Normalise vectors to length 1 at the end."""
    pools_prompt: bool = True
    """Include the tokens of a prompt in the pooling."""
    truncate_dim: int | None = None
    """Keep only this number of leading values of each vector. None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpladeSpec:
    """Sparse weights of the whole vocabulary, from the logits of a masked language model."""

    pooling: SpladePooling = "max"
    """Pooling over the tokens of an input."""
    activation: SpladeActivation = "relu"
    """`relu`: log(1 + relu(x)). `log1p_relu`: log(1 + log(1 + relu(x)))."""
    max_active_dims: int | None = None
    """Number of the largest weights to keep. None: all."""
    queries: Path | None = None
    """Folder with the weights of a query's tokens, which are looked up. None: queries are read like documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeightsSpec:
    """Sparse weights of the input's own tokens, as in BGE-M3."""

    projection: Projection
    """Linear layer from a token vector to one value."""
    left_out: tuple[str, ...]
    """Tokens without a weight, in the tokenizer's spelling. The first two stand before and after a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiVectorSpec:
    """One vector per token."""

    modules: tuple[HeadModule, ...] = ()
    """Modules applied to each token vector, without the normalisation at the end."""
    own_layer: str | None = None
    """Linear layer of the checkpoint's own class that is applied before `modules`. None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVectorSpec:
    """One vector per image, from `get_image_features` of the checkpoint's own class."""

    modules: tuple[HeadModule, ...] = ()
    """Modules applied to it, without the normalisation at the end."""
    normalize: bool
    """Normalise vectors to length 1 at the end."""
    truncate_dim: int | None = None
    """Dimensions that vectors are cut to; see `DenseSpec`."""


@dataclass(frozen=True, slots=True)
class LabelsSpec:
    """One logit per label, from the checkpoint's own head on the whole input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLabelsSpec:
    """One logit per label, from modules after a pooling, as in a cross-encoder of sentence-transformers."""

    pooling: tuple[PoolingMode, ...]
    """See `DenseSpec`."""
    modules: tuple[HeadModule, ...]
    """Modules after the pooling; the last one gives the logits."""


@dataclass(frozen=True, slots=True)
class TokenLabelsSpec:
    """One logit per label and token, from the checkpoint's own head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScoreSpec:
    """The logit of a "yes" token after the input, minus that of a "no" token."""

    true_token: int | str
    """The "yes" token or its id."""
    false_token: int | str | None
    """The "no" token or its id, whose logit is subtracted. None: nothing is subtracted."""
    divisor: float = 1.0
    """Temperature: the logit, or the difference, is divided by it."""
    rounded: bool = False
    """Round the score to bfloat16, as the authors do."""


_VectorSpec: TypeAlias = DenseSpec | OwnVectorSpec | SpladeSpec | TokenWeightsSpec | MultiVectorSpec
_LabelSpec: TypeAlias = LabelsSpec | PooledLabelsSpec | TokenLabelsSpec | StepLabelsSpec
HeadSpec: TypeAlias = _VectorSpec | _LabelSpec | LogitScoreSpec | LayersScoreSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """Treatment of queries, or of documents, for late interaction."""

    marker: str = ""
    """Text between the tokenizer's leading special tokens and the input."""
    max_tokens: int | None = None
    """Longest input in tokens, special tokens and marker included. None: the model's limit."""
    always_cut: bool = False
    """Cut longer inputs even if the request does not ask for it: the model was not trained on them."""
    expand_to: int = 0
    """Length in tokens that shorter inputs are expanded to. 0: no expansion."""
    expansion: str | None = None
    """The token added by the expansion. None: the tokenizer's mask token, else its last token of a text."""
    attend_to_expansion: bool = False
    """Let other tokens attend to the added ones."""
    skipped: tuple[str, ...] = ()
    """Tokens whose vectors are dropped."""
    skipped_first: str | None = None
    """A token whose vector is dropped if it is the first, such as `<s>`."""
    frame: tuple[str, str] | None = None
    """Text before and after the input, instead of the tokenizer's special tokens. None: the special tokens."""
    keeps_special_tokens: bool = False
    """Put the tokenizer's special tokens around `frame`."""


DecidedBy: TypeAlias = Literal["folder", "assumed", "user"]
"""Source of the decision to use the transformer's vectors without a head of the checkpoint.

`folder`: its files, such as `modules.json`. `assumed`: nothing says so. `user`: `task="embed"`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The settings of a model folder."""

    path: Path

    body: Path
    """Folder with the transformer's `config.json`, weights and tokenizer: `path` or a folder inside it."""

    config: Mapping[str, Any]
    """The transformer's `config.json`."""

    architecture: Architecture = "encoder"

    decided_by: DecidedBy = "folder"
    """Source of the decision to use no head of the checkpoint. If it is `assumed`, an unread head is an error."""

    heads: tuple[HeadSpec, ...]
    """Heads on the token vectors of a text. Empty: the model reads no text."""

    image_heads: tuple[HeadSpec, ...] = ()
    """Heads of the image tower. Empty: there is no separate image tower."""

    pads_texts: bool = False
    """Pad each text to the longest input with the tokenizer's padding token, as in training."""

    scoring: Scoring | None = "bi-encoder"
    """Method of scoring a query and a document. None: the model has no scores."""

    similarity: Similarity | None = None
    """Similarity function of vectors. None: not set."""

    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of their logits."""

    activation: Activation = "identity"
    """Function from logits to scores."""

    pair_template: PairForm | None = None
    """Prompt of a pair. None: two texts with the tokenizer's special tokens."""

    matryoshka: bool = False
    """True if the model was trained for truncated vectors."""

    dimensions: tuple[int, ...] = ()
    """Vector widths that it was trained for. Empty: not set."""

    max_seq_length: int | None = None
    """Longest input by the folder's settings, in tokens with special tokens. None: not set."""

    lower_case: bool = False
    """Lowercase text before tokenization."""

    prompts: Mapping[str, str]
    """Prompts that the model was trained with, by name, such as `query`."""

    default_prompt: str = ""
    """The prompt before every text; empty for most models."""

    adapters: tuple[AdapterSpec, ...] = ()
    """Adapters of which a request chooses one."""

    adapter_of: Mapping[str, str] = field(default_factory=dict)
    """Adapter for each name of a prompt; for the empty name, that of requests which name none."""

    roles: Mapping[Role, RoleSettings] = field(default_factory=dict)
    """Treatment of queries and documents. Empty: both are treated alike."""

    conversation: ConversationForm | None = None
    """Form of every input, for models trained on messages only. None: texts are read as they are."""

    images: ImageSpec | None = None
    """Image input of a vision-language model. None: the model is of another kind."""

    notes: tuple[str, ...] = ()
    """Assumptions, for the log."""

    warnings: tuple[str, ...] = ()
    """Assumptions on little evidence, logged as warnings."""
