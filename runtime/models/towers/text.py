"""The tower that texts go through: a tokenizer, a transformer, and the heads on its token vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from staged_pool.runtime.config import Attention
from staged_pool.runtime.model import ModelInput, Payload, TokenIds, TokenSequence, Values
from staged_pool.runtime.models.checkpoint.tokenizer import LoadedTokenizer
from staged_pool.runtime.models.checkpoint.weights import Loaded
from staged_pool.runtime.models.folders.files import check_vocabulary
from staged_pool.runtime.models.heads.build import build_heads
from staged_pool.runtime.models.heads.dense import DenseHead
from staged_pool.runtime.models.heads.head import Head
from staged_pool.runtime.models.kernels.self_check import MISUSE_ERRORS
from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.models.specs.model import DenseSpec, ModelFolder
from staged_pool.runtime.models.tokenizing.input_roles import filling_roles, resolve_roles
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.models.towers.tower import Outcome
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.models.vision.image_embedder import ImageEmbedder
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


@dataclass(frozen=True, slots=True, eq=False)
class TextTower:
    """See `Tower`; its payloads are token sequences."""

    architecture: str
    tokenizer: TextTokenizer
    body: PackedTransformer
    heads: Mapping[Output, Head]
    max_tokens: int
    parameters: int
    text: TokenIds
    """As long as an input may be: token ids to try the tower with."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(self.heads)

    @property
    def width(self) -> int:
        dense = self.heads.get(Output.DENSE)
        return dense.width if isinstance(dense, DenseHead) else 0

    @property
    def pads(self) -> bool:
        return self.body.layout == "padded"

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Outcome]:
        return cast("Sequence[Outcome]", self.tokenizer.preprocess(inputs))

    def launch(self, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
        """One copy of the ids to the device, one copy of each output back. A head that reads only some of the tokens
        sends their places, too."""
        batch = self.body.pack(cast("Sequence[TokenSequence]", payloads))
        hidden = self.body.hidden(batch)
        return {output: self.heads[output](hidden, batch) for output in payloads[0].outputs}

    def made_up(self, sizes: Sequence[int]) -> Sequence[TokenSequence]:
        return [TokenSequence(self.text[:size], frozenset(self.heads)) for size in sizes]


def build_text_tower(
    name: str,
    folder: ModelFolder,
    source: LoadedTokenizer,
    loaded: Loaded,
    *,
    attention: Attention,
    sight: ImageEmbedder | None = None,
) -> TextTower:
    """Build the tower that a folder describes, in the fastest form that is found to be right.

    Args:
        name: Of the model, for the log.
        folder: What was read of it.
        source: Its tokenizer.
        loaded: Its checkpoint.
        attention: See `EngineConfig`.
        sight: The eyes of a model that is shown images between texts; what is chosen is right for those, too.

    Raises:
        ConfigError: Tokenizer, transformer and heads do not fit each other, or cannot be run here.
    """
    body = PackedTransformer(loaded.base if sight is None else sight.language)
    check_vocabulary(source.backend, body.vocabulary)
    max_tokens = _max_tokens(folder, source.max_tokens, body)
    _check_body(name, partial(body.check_state, max_tokens))
    heads = build_heads(folder, loaded, body, source.backend, max_tokens=max_tokens)
    dense_spec = next((spec for spec in folder.heads if isinstance(spec, DenseSpec)), None)
    roles = (
        filling_roles(source.padding, side=source.padding_side, masked=source.masks_padding, max_tokens=max_tokens)
        if folder.fills_texts
        else resolve_roles(
            folder.roles,
            source.backend,
            special_tokens=source.special_tokens,
            vocabulary=body.vocabulary,
            max_tokens=max_tokens,
        )
    )
    tokenizer = TextTokenizer(
        source.backend,
        max_tokens=max_tokens,
        vocabulary=body.vocabulary,
        lower_case=folder.lower_case,
        pools_prompt=dense_spec is None or dense_spec.pools_prompt,
        gives_types=source.gives_types,
        chat_template=source.chat_template if folder.images is None or folder.images.converses else None,
        special_tokens=source.special_tokens,
        pair_template=folder.pair_template,
        roles=roles,
        sees=sight is not None,
        reads_one=loaded.image is not None or (folder.images is not None and not folder.images.converses),
        truncation_side=source.truncation_side,
        cleans_up=source.cleans_up,
    )
    if folder.scoring == "cross-encoder":
        tokenizer.require_pairs()
    _check_body(name, body.check_positions)
    if sight is not None:
        sight.check(body.hidden)
    if why := body.choose_layout(attention, max_tokens, None if sight is None else sight.probe()):
        log.info("model.padded", model=name, reason=why)
    if body.layout == "padded":
        _check_body(name, partial(body.check_company, max_tokens))
    if why := body.attend_in_one_call(max_tokens):
        log.info("model.attends_in_groups", model=name, reason=why)
    if loaded.image is None:
        parameters = sum(p.numel() for p in body.model.parameters()) + sum(head.parameters() for head in heads.values())
    else:  # heads are copies of layers in it
        parameters = sum(p.numel() for p in loaded.whole.parameters()) - loaded.image_parameters()
    if body.model.device.type == "cpu":
        if why := body.fuse(max_tokens):
            log.info("model.not_fused", model=name, reason=why)
        if why := body.prepack(max_tokens):
            log.info("model.not_prepacked", model=name, reason=why)
        if why := body.call_parts(max_tokens):
            log.info("model.called_whole", model=name, reason=why)
    if sight is not None and (why := sight.fuse()):
        log.info("model.not_fused", model=name, reason=why)
    if sight is not None and (why := sight.prepack()):
        log.info("model.not_prepacked", model=name, reason=why)
    text = (tokenizer.tokenize("warm up", add_special_tokens=True).ids * max_tokens)[:max_tokens]
    return TextTower(
        type(loaded.whole if folder.image_heads or sight is not None else body.model).__name__,
        tokenizer,
        body,
        heads,
        max_tokens,
        parameters,
        text,
    )


def _max_tokens(folder: ModelFolder, declared_tokens: int | None, body: PackedTransformer) -> int:
    """The longest input: what the folder's author wants, within what the model has positions for.

    Raises:
        ConfigError: Nothing in the folder says how long an input may be.
    """
    wanted = folder.max_seq_length
    if wanted is None:
        trained: int | None = getattr(body.model.config, "max_position_embeddings", None)
        said = [tokens for tokens in (declared_tokens, trained) if tokens is not None and tokens > 0]
        wanted = min(said, default=body.position_limit)
    if wanted is None:
        raise ConfigError(
            f"{folder.path}: nothing says how long an input may be: set max_seq_length in sentence_bert_config.json"
        )
    return wanted if body.position_limit is None else min(wanted, body.position_limit)


def _check_body(name: str, check: Callable[[], str | None]) -> None:
    """Log what a check of the transformer has found out about it.

    Raises:
        ConfigError: The transformer fails on a few tokens.
    """
    try:
        why = check()
    except MISUSE_ERRORS as error:
        raise ConfigError(f"the model fails on a few tokens: {error}") from error
    if why:
        log.info("model.peculiar", model=name, reason=why)
