"""Construction of the heads of a text model, from the specs of its folder."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from torch import nn

from staged_pool.runtime.models.checkpoint.weights import Loaded
from staged_pool.runtime.models.heads.dense import DenseHead
from staged_pool.runtime.models.heads.head import Head
from staged_pool.runtime.models.heads.labels import LabelsHead, LogitScoreHead, TokenLabelsHead
from staged_pool.runtime.models.heads.layers_score import LayersScoreHead
from staged_pool.runtime.models.heads.multi_vector import MultiVectorHead
from staged_pool.runtime.models.heads.sparse import EachTokenHead, TokenLookup, TokenWeightsHead, build_splade
from staged_pool.runtime.models.heads.step_labels import StepLabelsHead
from staged_pool.runtime.models.specs.layers import LayersScoreSpec, StepLabelsSpec
from staged_pool.runtime.models.specs.model import (
    DenseSpec,
    HeadSpec,
    LabelsSpec,
    LogitScoreSpec,
    ModelFolder,
    MultiVectorSpec,
    OwnVectorSpec,
    PooledLabelsSpec,
    SpladeSpec,
    TokenLabelsSpec,
    TokenWeightsSpec,
)
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError


def build_heads(
    folder: ModelFolder, loaded: Loaded, transformer: PackedTransformer, tokenizer: Tokenizer, *, max_tokens: int
) -> dict[Output, Head]:
    """Build the heads on top of a transformer, by output. A dense model also gives its token vectors.

    Args:
        folder: Settings read from the folder.
        loaded: Its checkpoint.
        transformer: Transformer of the checkpoint, before any speedup.
        tokenizer: Tokenizer of the folder.
        max_tokens: Longest input of the model.

    Raises:
        ConfigError: Weights of a head are missing or do not fit, or the head cannot run apart from its model.
    """
    device = transformer.model.device
    heads: dict[Output, Head] = {}
    for spec in folder.heads:
        match spec:
            case OwnVectorSpec():
                raise ConfigError("the checkpoint makes no vector of a text by itself")
            case DenseSpec():
                heads[Output.DENSE] = DenseHead(spec, transformer.width, loaded.whole, loaded.base)
            case LabelsSpec():
                heads[Output.LABELS] = LabelsHead(loaded.whole, transformer, len(folder.labels))
            case PooledLabelsSpec():
                vector = DenseSpec(pooling=spec.pooling, modules=spec.modules, normalize=False)
                heads[Output.LABELS] = DenseHead(vector, transformer.width, loaded.whole, loaded.base)
            case TokenLabelsSpec():
                heads[Output.TOKEN_LABELS] = TokenLabelsHead(loaded.whole, transformer, len(folder.labels))
            case LogitScoreSpec():
                true, false = _answer_ids(spec, tokenizer)
                heads[Output.LABELS] = LogitScoreHead(
                    loaded.whole, transformer, true, false, divisor=spec.divisor, rounded=spec.rounded
                )
            case LayersScoreSpec():
                heads[Output.LABELS] = LayersScoreHead(spec, transformer.width, device)
            case StepLabelsSpec():
                heads[Output.TOKEN_LABELS] = StepLabelsHead(spec, transformer.width, len(folder.labels), device)
            case SpladeSpec():
                heads[Output.SPARSE] = build_splade(spec, loaded.whole, max_tokens=max_tokens)
            case TokenWeightsSpec():
                heads[Output.SPARSE] = TokenWeightsHead(spec, transformer.width, tokenizer, device)
            case MultiVectorSpec():
                own_layer = None if spec.own_layer is None else loaded.whole.get_submodule(spec.own_layer)
                if not isinstance(own_layer, nn.Linear | None):
                    raise ConfigError(f"{spec.own_layer} of the checkpoint is not a linear layer")
                heads[Output.MULTI_VECTOR] = MultiVectorHead(spec, transformer.width, device, own_layer)
    # Not for CLIP: without a projection, its token vectors cannot be compared with those of its patches.
    token_vectors = not folder.image_heads and folder.architecture != "static embedding"
    if Output.DENSE in heads and Output.MULTI_VECTOR not in heads and token_vectors:
        heads[Output.MULTI_VECTOR] = MultiVectorHead(MultiVectorSpec(), transformer.width, device)
    if isinstance(sparse := heads.get(Output.SPARSE), TokenWeightsHead):
        heads[Output.TOKEN_WEIGHTS] = EachTokenHead(sparse)
    return heads


def build_lookup(heads: Iterable[HeadSpec], tokenizer: Tokenizer) -> TokenLookup | None:
    """Load the weights of queries' tokens. None: the model has none.

    Raises:
        ConfigError: They are missing or damaged, or do not fit the tokenizer.
    """
    for spec in heads:
        if isinstance(spec, SpladeSpec) and spec.queries is not None:
            return TokenLookup(spec.queries, tokenizer, spec.max_active_dims)
    return None


def check_answers(heads: Iterable[HeadSpec], tokenizer: Tokenizer) -> None:
    """Check, before the weights load, that the tokenizer has the tokens that heads read.

    Raises:
        ConfigError: An answer of a generative reranker is not a single token, or both are the same token; or there is
            no tag of steps.
    """
    step_tag(heads, tokenizer)
    for spec in heads:
        if isinstance(spec, LogitScoreSpec):
            _answer_ids(spec, tokenizer)


def step_tag(heads: Iterable[HeadSpec], tokenizer: Tokenizer) -> int | None:
    """Return the token id of the tag behind each step. None: the model scores no steps.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    for spec in heads:
        if isinstance(spec, StepLabelsSpec):
            if (found := tokenizer.token_to_id(spec.tag)) is None:
                raise ConfigError(f"tokenizer.json: there is no token {spec.tag!r}, which marks the end of each step")
            return int(found)
    return None


def _answer_ids(spec: LogitScoreSpec, tokenizer: Tokenizer) -> tuple[int, int | None]:
    """Return the token ids of the answers that mean yes and no; None if no answer means no.

    Raises:
        ConfigError: An answer is not a single token, or both are the same token.
    """
    true, false = (_token_id(token, tokenizer) for token in (spec.true_token, spec.false_token))
    if true is None:
        raise ConfigError("the answer that means yes is missing")
    if true == false:
        raise ConfigError(
            f"the answers {spec.true_token!r} and {spec.false_token!r} are both token {true} of this tokenizer: every "
            "score would be the same"
        )
    return true, false


def _token_id(token: int | str | None, tokenizer: Tokenizer) -> int | None:
    """Return the token id of an answer: a vocabulary entry, or a text that is one token.

    Raises:
        ConfigError: The answer is neither.
    """
    if not isinstance(token, str):
        return token
    if (found := tokenizer.token_to_id(token)) is not None:
        return int(found)
    pieces = tokenizer.encode(token, add_special_tokens=False)
    # One token, but the unknown token: it decodes to another text.
    if len(pieces.ids) == 1 and (read := str(tokenizer.decode(pieces.ids)).strip()) != token:
        raise ConfigError(
            f"the tokenizer has no token {token!r}, so the model cannot be asked for it: it is read as {read!r}"
        )
    if len(pieces.ids) != 1:
        spelled = ", ".join(map(repr, pieces.tokens)) or "nothing"
        raise ConfigError(
            f"the tokenizer has no token {token!r}, so the model cannot be asked for it: it is {len(pieces.ids)} "
            f"tokens ({spelled}), and a score is read from one"
        )
    return int(pieces.ids[0])
