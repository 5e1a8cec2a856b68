"""Tower of texts: a tokenizer, a transformer, and the heads on its token vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from staged_pool.runtime.config import Attention
from staged_pool.runtime.models.checkpoint.tokenizer import LoadedTokenizer
from staged_pool.runtime.models.checkpoint.weights import Loaded
from staged_pool.runtime.models.folders.files import check_vocabulary
from staged_pool.runtime.models.heads.build import build_heads, build_lookup, step_tag
from staged_pool.runtime.models.heads.dense import DenseHead
from staged_pool.runtime.models.heads.head import Head
from staged_pool.runtime.models.heads.sparse import TokenLookup
from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS
from staged_pool.runtime.models.kernels.transfer import Later
from staged_pool.runtime.models.quantizing.agreement import LEAST_MEAN
from staged_pool.runtime.models.quantizing.texts import TYPICAL, UNSEEN
from staged_pool.runtime.models.specs.model import DenseSpec, ModelFolder, SpladeSpec
from staged_pool.runtime.models.specs.pair_forms import PairPieces, PairTemplate
from staged_pool.runtime.models.tokenizing.input_roles import LOOKED_UP, padded_roles, resolve_roles
from staged_pool.runtime.models.tokenizing.shared_tokenizer import copy_tokenizer
from staged_pool.runtime.models.tokenizing.text_settings import TextSettings
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.models.transformer import layout_checks
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.models.transformer.speedups import Speedups
from staged_pool.runtime.models.vision.image_embedder import ImageEmbedder
from staged_pool.runtime.payloads import Payload, TokenSequence, Values
from staged_pool.runtime.requests import DENSE_ONLY, Output
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


@dataclass(frozen=True, slots=True, eq=False)
class TextTower:
    """Tower of texts, see `Tower`; its payloads are token sequences."""

    architecture: str
    tokenizer: TextTokenizer
    transformer: PackedTransformer
    heads: Mapping[Output, Head]
    max_tokens: int
    parameters: int
    sample_ids: TokenIds
    """Token ids of a test input, `max_tokens` of them."""
    lookup: TokenLookup | None = None
    """Sparse weights of the tokens of a query. None: queries are read like documents."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(self.heads)

    @property
    def width(self) -> int:
        dense = self.heads.get(Output.DENSE)
        return dense.width if isinstance(dense, DenseHead) else 0

    @property
    def pads(self) -> bool:
        return self.transformer.layout == "padded"

    def launch(self, payloads: Sequence[Payload]) -> Mapping[Output, Later[Sequence[Values]]]:
        """Start one batch; see `Tower.launch`.

        One copy takes the ids to the device, and one copy brings each output back. A head that reads only some of the
        tokens sends their indices, too.
        """
        sequences = cast("Sequence[TokenSequence]", payloads)
        if self.lookup is not None and any(sequence.looked_up for sequence in sequences):
            return {Output.SPARSE: self._launch_queries(sequences, self.lookup)}
        batch = self.transformer.pack(sequences)
        hidden = self.transformer.hidden(batch)
        return {output: self.heads[output](hidden, batch) for output in payloads[0].outputs}

    def _launch_queries(self, sequences: Sequence[TokenSequence], lookup: TokenLookup) -> Later[Sequence[Values]]:
        """Start a batch with sequences that are looked up; the others go through the transformer."""
        others = [sequence for sequence in sequences if not sequence.looked_up]
        computed = self.launch(others)[Output.SPARSE] if others else list[Values]

        def rows() -> Sequence[Values]:
            rest = iter(computed())
            return [lookup(sequence.ids) if sequence.looked_up else next(rest) for sequence in sequences]

        return rows

    def sample_batch(self, sizes: Sequence[int]) -> Sequence[TokenSequence]:
        return [TokenSequence(self.sample_ids[:size], frozenset(self.heads)) for size in sizes]


def build_text_tower(
    name: str,
    folder: ModelFolder,
    source: LoadedTokenizer,
    loaded: Loaded,
    *,
    attention: Attention,
    int8: bool = False,
    image_embedder: ImageEmbedder | None = None,
) -> TextTower:
    """Build the tower that a folder describes, in the fastest form that is right.

    Args:
        name: Name of the model, for the log.
        folder: Settings read from the folder.
        source: Its tokenizer.
        loaded: Its checkpoint.
        attention: See `EngineConfig`.
        int8: Run the transformer's layers in int8.
        image_embedder: Image part of a vision language model: layout and speedups are checked for images, too.

    Raises:
        ConfigError: Tokenizer, transformer and heads do not fit each other, or cannot be run here.
    """
    transformer = PackedTransformer(loaded.base if image_embedder is None else image_embedder.language)
    if loaded.adapters:
        transformer.use_adapters(loaded.adapters)
    empty = transformer.vocabulary - 1 if folder.architecture == "static embedding" else None
    vocabulary = transformer.vocabulary if empty is None else empty
    check_vocabulary(source.backend, vocabulary)
    max_tokens = _max_tokens(folder, source.max_tokens, transformer)
    _run_check(name, partial(layout_checks.check_state, transformer, max_tokens))
    heads = build_heads(folder, loaded, transformer, source.backend, max_tokens=max_tokens)
    tokenizer = _build_tokenizer(folder, source, loaded, vocabulary=vocabulary, empty_id=empty, max_tokens=max_tokens)
    _choose_layout(name, transformer, attention, max_tokens, image_embedder)
    speedups = Speedups(transformer, max_tokens)
    if reason := speedups.attend_in_one_call():
        log.debug("model.attends_in_groups", model=name, reason=reason)
    parameters = _count_parameters(loaded, transformer, heads)  # before the speedups replace modules
    if int8:
        _quantize(name, transformer, heads, tokenizer, speedups)
    _speed_up(name, transformer, speedups, image_embedder)
    reads_images = folder.image_heads or image_embedder is not None
    return TextTower(
        architecture=type(loaded.whole if reads_images else transformer.model).__name__,
        tokenizer=tokenizer,
        transformer=transformer,
        heads=heads,
        max_tokens=max_tokens,
        parameters=parameters,
        lookup=build_lookup(folder.heads, source.backend),
        sample_ids=(tokenizer.tokenize("warm up", add_special_tokens=True).ids * max_tokens)[:max_tokens],
    )


def _max_tokens(folder: ModelFolder, declared_tokens: int | None, transformer: PackedTransformer) -> int:
    """Return the longest input in tokens: as the folder says, within the positions that the model has.

    Raises:
        ConfigError: Nothing in the folder says how long an input may be.
    """
    wanted, limit = folder.max_seq_length, transformer.position_limit
    if wanted is None:
        trained: int | None = getattr(transformer.model.config, "max_position_embeddings", None)
        declared = [tokens for tokens in (declared_tokens, trained) if tokens is not None and tokens > 0]
        wanted = min(declared, default=limit)
    if wanted is None:
        raise ConfigError(
            f"{folder.path}: nothing says how long an input may be: set max_seq_length in sentence_bert_config.json"
        )
    return wanted if limit is None else min(wanted, limit)


def _build_tokenizer(
    folder: ModelFolder,
    source: LoadedTokenizer,
    loaded: Loaded,
    *,
    vocabulary: int,
    empty_id: int | None,
    max_tokens: int,
) -> TextTokenizer:
    dense_spec = next((spec for spec in folder.heads if isinstance(spec, DenseSpec)), None)
    takes_conversations = folder.images is None or folder.images.takes_conversations
    splade = next((spec for spec in folder.heads if isinstance(spec, SpladeSpec)), None)
    roles = (
        LOOKED_UP
        if splade is not None and splade.queries is not None
        else padded_roles(source.padding, side=source.padding_side, masked=source.masks_padding, max_tokens=max_tokens)
        if folder.pads_texts
        else resolve_roles(
            folder.roles,
            source.backend,
            special_tokens=source.special_tokens,
            vocabulary=vocabulary,
            max_tokens=max_tokens,
        )
    )
    form = folder.pair_template
    settings = TextSettings(
        max_tokens=max_tokens,
        vocabulary=vocabulary,
        empty_id=empty_id,
        step_id=step_tag(folder.heads, source.backend),
        pools_prompt=dense_spec is None or dense_spec.pools_prompt,
        gives_types=source.gives_types,
        chat_template=source.chat_template if takes_conversations else None,
        conversation=folder.conversation,
        special_tokens=source.special_tokens,
        pair_template=form if isinstance(form, PairTemplate) else None,
        pair_pieces=form if isinstance(form, PairPieces) else None,
        needs_pairs=folder.scoring == "cross-encoder",
        roles=roles,
        takes_parts=folder.images is not None,
        reads_one=loaded.image is not None or not takes_conversations,
        truncation_side=source.truncation_side,
        cleans_up=source.cleans_up,
    )
    return TextTokenizer(copy_tokenizer(source.backend, lower_case=folder.lower_case), settings)


def _choose_layout(
    name: str,
    transformer: PackedTransformer,
    attention: Attention,
    max_tokens: int,
    image_embedder: ImageEmbedder | None,
) -> None:
    """Check how the transformer may run, and set its layout."""
    _run_check(name, partial(layout_checks.check_positions, transformer))
    if image_embedder is not None:
        image_embedder.check(transformer.hidden)
    image_probe = None if image_embedder is None else image_embedder.probe()
    if reason := layout_checks.choose_layout(transformer, attention, max_tokens, image_probe):
        log.info("model.padded", model=name, reason=reason)
    layout_checks.check_directions(transformer)
    if transformer.layout == "padded":
        _run_check(name, partial(layout_checks.check_batch_independence, transformer, max_tokens))


def _run_check(name: str, check: Callable[[], str | None]) -> None:
    """Run a check of the transformer, and log the peculiarity that it reports.

    Raises:
        ConfigError: The transformer fails on a few tokens.
    """
    try:
        reason = check()
    except MISUSE_ERRORS as error:
        raise ConfigError(f"the model fails on a few tokens: {error}") from error
    if reason:
        log.debug("model.peculiar", model=name, reason=reason)


def _count_parameters(loaded: Loaded, transformer: PackedTransformer, heads: Mapping[Output, Head]) -> int:
    if loaded.image is None:
        weights: int = sum(weight.numel() for weight in transformer.model.parameters())
        return weights + sum(head.parameters() for head in heads.values())
    weights = sum(weight.numel() for weight in loaded.whole.parameters())  # with the heads, which are copies of layers
    return weights - loaded.image_parameters()


def _quantize(
    name: str,
    transformer: PackedTransformer,
    heads: Mapping[Output, Head],
    tokenizer: TextTokenizer,
    speedups: Speedups,
) -> None:
    """Run linear layers in int8.

    Raises:
        ConfigError: They cannot, or the vectors of texts would differ too much from those of float32.
    """

    def sequences(texts: Sequence[str]) -> Sequence[TokenSequence]:
        ids = [tokenizer.tokenize(text, add_special_tokens=True).ids for text in texts]
        return [TokenSequence(some[: tokenizer.settings.max_tokens], DENSE_ONLY) for some in ids if some]

    dense, unseen = heads.get(Output.DENSE), sequences(UNSEEN)

    def vector(sequence: TokenSequence) -> Tensor:
        """Compute what clients get; for a model that gives no vectors, the mean token vector."""
        batch = transformer.pack([sequence])
        hidden = transformer.hidden(batch)
        return hidden.float().mean(dim=0) if dense is None else torch.as_tensor(dense(hidden, batch)()[0])

    try:
        agreement = speedups.quantize(sequences(TYPICAL), lambda: torch.stack([vector(one) for one in unseen]))
    except MISUSE_ERRORS as error:
        raise ConfigError(f"dtype='int8': {name} fails in it: {error}; use float32 or bfloat16") from error
    if not agreement.mean >= LEAST_MEAN:
        raise ConfigError(
            f"dtype='int8': vectors of {name} agree too little with those of float32: cosines are {agreement}, and the "
            f"mean must be {LEAST_MEAN} or more; use float32 or bfloat16"
        )
    log.info("model.int8", model=name, cosine_mean=round(agreement.mean, 4), cosine_least=round(agreement.least, 4))


def _speed_up(
    name: str, transformer: PackedTransformer, speedups: Speedups, image_embedder: ImageEmbedder | None
) -> None:
    """Use the speedups that give the same vectors, and log why others are not used."""
    if transformer.model.device.type == "cpu":
        if reason := speedups.fuse():
            log.debug("model.not_fused", model=name, reason=reason)
        if reason := speedups.prepack():
            log.debug("model.not_prepacked", model=name, reason=reason)
        if reason := speedups.call_parts():
            log.debug("model.called_whole", model=name, reason=reason)
    if image_embedder is not None and (reason := image_embedder.fuse()):
        log.debug("model.not_fused", model=name, reason=reason)
    if image_embedder is not None and (reason := image_embedder.prepack()):
        log.debug("model.not_prepacked", model=name, reason=reason)
