"""What was understood of a model folder: its transformer, and the heads on top of it. Frozen values, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from staged_pool.runtime.model import Activation, Role, Scoring, Similarity

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

EndPooling: TypeAlias = Literal["end"]
"""The vector of the token that ends a text for CLIP: the first one of its id, wherever it stands."""

SpladePooling: TypeAlias = Literal["max", "sum"]
SpladeActivation: TypeAlias = Literal["relu", "log1p_relu"]

Architecture: TypeAlias = Literal[
    "encoder",
    "sequence classifier",
    "token classifier",
    "masked language model",
    "causal language model",
    "vision-language model",
    "two towers",
    "image encoder",
    "image classifier",
]
"""What stands on top of the transformer in the checkpoint, as the Auto classes of transformers tell them apart."""


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
    """Whether the input is added to the result (through a second matrix where the widths differ)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """A layer normalisation, after the pooling."""

    folder: Path
    dimension: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """Vectors are brought to length 1 here, and more modules follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer whose tensors lie in a file by themselves, or among those of the transformer."""

    files: tuple[Path, ...]
    """The first of these that there is: safetensors, or what torch has pickled."""
    weight: str
    """Name of the tensor [out, in] in the file."""
    bias: str | None
    """Name of the tensor [out]. None: there is none."""


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """A linear layer of the checkpoint itself."""

    name: str
    """In its class, such as `text_projection`."""


HeadModule: TypeAlias = Dense | LayerNorm | Normalize | Projection | OwnLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """One vector for each input."""

    pooling: tuple[PoolingMode | EndPooling, ...]
    """Several are concatenated in this order; `end` stands alone."""
    modules: tuple[HeadModule, ...]
    """What follows the pooling, without the normalisation at the very end."""
    normalize: bool
    """Whether the chain ends by bringing vectors to length 1."""
    pools_prompt: bool = True
    """Whether the tokens of a prompt count in the pooling."""
    truncate_dim: int | None = None
    """Keep the first so many values of each vector. None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpladeSpec:
    """Weights for the whole vocabulary, from the logits of a masked language model."""

    pooling: SpladePooling = "max"
    """Over the tokens of an input."""
    activation: SpladeActivation = "relu"
    """`relu`: log(1 + relu(x)). `log1p_relu`: log(1 + log(1 + relu(x)))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeightsSpec:
    """Weights for the tokens that an input has, as BGE-M3 gives them."""

    projection: Projection
    """To one value."""
    left_out: tuple[str, ...]
    """Tokens that have no weight, in the tokenizer's own spelling. The first two stand before and behind a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiVectorSpec:
    """One vector for each token."""

    modules: tuple[HeadModule, ...] = ()
    """What every token vector goes through, without the normalisation at the very end."""
    own_layer: str | None = None
    """Name of a linear layer of the checkpoint's own class, through which every token vector goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVectorSpec:
    """One vector for each image, pooled and projected by the checkpoint's own class: its `get_image_features`."""

    modules: tuple[HeadModule, ...] = ()
    """What follows, without the normalisation at the very end."""
    normalize: bool
    """Whether the chain ends by bringing vectors to length 1."""
    truncate_dim: int | None = None
    """As for `DenseSpec`."""


@dataclass(frozen=True, slots=True)
class LabelsSpec:
    """One logit for each label, made of the whole input by the checkpoint's own head."""


@dataclass(frozen=True, slots=True)
class TokenLabelsSpec:
    """One logit for each label and token, made by the checkpoint's own head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScoreSpec:
    """One logit, of a language model: how much likelier one answer to the input is than another."""

    true_token: int | str
    """The token of the vocabulary that says yes, or its id."""
    false_token: int | str | None
    """The one that says no, whose logit is subtracted. None: nothing is subtracted."""
    rounded: bool = False
    """Whether the score is rounded to bfloat16, as its authors give it."""


HeadSpec: TypeAlias = (
    DenseSpec
    | OwnVectorSpec
    | SpladeSpec
    | TokenWeightsSpec
    | MultiVectorSpec
    | LabelsSpec
    | TokenLabelsSpec
    | LogitScoreSpec
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """What the folder says is done to a query, or to a document, for late interaction."""

    marker: str = ""
    """Goes before the text, behind the tokens that the tokenizer puts first."""
    max_tokens: int | None = None
    """Longest input, special tokens and marker included. None: what the model takes."""
    always_cut: bool = False
    """Whether longer inputs are cut without being asked: the model knows no others."""
    expand_to: int = 0
    """Fill shorter inputs up to so many tokens. 0: do not."""
    expansion: str | None = None
    """The token that they are filled up with. None: the tokenizer's mask token, else its last token of a text."""
    attend_to_expansion: bool = False
    """Whether tokens attend to those that were filled in."""
    skipped: tuple[str, ...] = ()
    """Tokens whose vectors are left out."""
    skipped_first: str | None = None
    """A token whose vector is left out where it stands first, such as `<s>`."""
    frame: tuple[str, str] | None = None
    """What stands before and behind the text instead of the tokenizer's special tokens. None: those do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTemplate:
    """What makes one text of a query, a document and an instruction, for rerankers that are language models."""

    text: str | None = None
    """Has the fields `{query}` and `{document}`, and `{instruction}` where there is a place for one. None: the chat
    template of the folder's tokenizer, which is given a message of each of the roles `query` and `document`, and one of
    `system` before them where there is an instruction, as sentence-transformers does it."""
    instruction: str | None = None
    """What the model is to look for unless the request says it. None: what the chat template says by itself."""
    structured: bool = False
    """For a chat template: the content of a message is a list of `{"type": "text", "text": ...}`, and not a text."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What a chat template is given beside the messages, such as `add_generation_prompt`."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds special tokens around the text."""
    instruction_format: str = "{instruction}"
    """For `text`: what an instruction that is not empty is written as."""
    roles: tuple[str, str] = ("query", "document")
    """For a chat template: the roles of the messages that hold the query and the document."""
    strips: bool = False
    """For a chat template: whether blanks around both texts are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPieces:
    """Pieces of a pair that are tokenized each by itself, for rerankers that are language models."""

    begins: bool = False
    """Whether the tokenizer's first token of a text (`bos_token`) stands first, where it is not the padding."""
    before: str = ""
    """Stands before the query; empty: nothing does."""
    query: str
    """With the field `{query}`."""
    instruction: str | None = None
    """With the field `{instruction}`: goes before the query, into the same piece, where a request has one. None: the
    model takes none."""
    between: str
    """Separates query and document."""
    document: str
    """With the field `{document}`."""
    after: tuple[str, ...]
    """The pieces behind the document."""
    max_tokens: int
    """The authors' `max_length`: tokens of query and document together. Three quarters of it bound the query."""
    counts_after: bool = False
    """Whether that is exceeded by as many tokens as `after` has, as in FlagEmbedding."""


PairForm: TypeAlias = PairTemplate | PairPieces
"""What a language model reads of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """How a language model is shown images: by vectors in the places of image tokens, many for each image."""

    alone: tuple[str, str] | None
    """What stands before and behind an image by itself. None: what the chat template writes around it."""
    converses: bool
    """Whether images and texts may stand together, as a conversation."""
    words: tuple[str, ...] = ()
    """Without conversations: texts that may stand beside an image, as they say what stands around it anyway."""


Reading: TypeAlias = Literal["folder", "assumed", "user"]
"""Who says that the transformer's own vectors are what is wanted: the folder's files (such as `modules.json`), nobody,
or the user (`task="embed"`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What a model folder says about itself."""

    path: Path

    body: Path
    """Where `config.json`, the weights and the tokenizer of the transformer lie: `path` or a folder in it."""

    config: Mapping[str, Any]
    """The transformer's own `config.json`."""

    architecture: Architecture = "encoder"

    reading: Reading = "folder"
    """Who says what is read of the checkpoint. A head that is left out is only harmless where somebody does."""

    heads: tuple[HeadSpec, ...]
    """What is made of the token vectors of a text; empty where none is read."""

    image_heads: tuple[HeadSpec, ...] = ()
    """What is made of an image that goes through a tower of its own; empty where there is no such tower."""

    fills_texts: bool = False
    """Whether a text is always filled up to the longest one with the tokenizer's padding token, which the model was
    trained to see."""

    scoring: Scoring | None = "bi-encoder"
    """How a query and a document are compared."""

    similarity: Similarity | None = None
    """How vectors are to be compared. None: not said."""

    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of their logits."""

    activation: Activation = "identity"
    """What makes scores of logits."""

    pair_template: PairForm | None = None
    """What makes one text of a pair. None: the tokenizer's special tokens do."""

    matryoshka: bool = False
    """Whether vectors may be cut: the model was trained for it."""

    dimensions: tuple[int, ...] = ()
    """The widths that it was trained for; empty: not said."""

    max_seq_length: int | None = None
    """Longest input that the folder's author wants, special tokens included. None: not said."""

    lower_case: bool = False
    """Whether text is lowercased before the tokenizer sees it."""

    prompts: Mapping[str, str]
    """Texts that the model was trained to see before an input, by name, such as `query`."""

    default_prompt: str = ""
    """The prompt that the folder puts before every text; empty for most models."""

    roles: Mapping[Role, RoleSettings] = field(default_factory=dict)
    """How queries and documents are read; empty where they are read alike."""

    images: ImageSpec | None = None
    """How it is shown images between texts. None: it is not."""

    notes: tuple[str, ...] = ()
    """What the reader had to assume, for the log."""

    doubts: tuple[str, ...] = ()
    """What it assumed on little evidence, for the log as a warning."""
