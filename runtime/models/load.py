"""Load a model: find its folder, read it, build it, and run it once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog
import torch

from staged_pool.runtime.config import Device as DeviceName
from staged_pool.runtime.config import DType as DTypeName
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelCard, TokenIds, TokenSequence
from staged_pool.runtime.models.body import Body
from staged_pool.runtime.models.checkpoint import load_tokenizer, load_transformer
from staged_pool.runtime.models.folders.files import check_files, check_vocabulary
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.folders.resolver import resolve
from staged_pool.runtime.models.heads.build import build_heads
from staged_pool.runtime.models.heads.dense import DenseHead
from staged_pool.runtime.models.specs import DenseSpec, ModelFolder
from staged_pool.runtime.models.text_encoder import TextEncoder
from staged_pool.runtime.models.threads import ThreadPlan, plan_threads, plan_workers
from staged_pool.runtime.models.tokenizing.roles import resolve_roles, with_written_markers
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.requests import Output, Outputs
from staged_pool.stages.errors import ConfigError, ModelFailed, StagedPoolError

log = structlog.get_logger("staged_pool.models")


def load_model(config: EngineConfig) -> TextEncoder:
    """Load the model that `config` names, and warm it up. Takes seconds, or minutes where it downloads.

    Where other threads use the same cores, set OMP_WAIT_POLICY=PASSIVE before torch is first imported: its threads then
    sleep between parallel regions instead of spinning on a core that tokenizing needs.

    Raises:
        ConfigError: The model cannot be found, read or run here, or a setting does not fit it.
    """
    started = time.monotonic()
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    if device.type != "cpu" and (config.forward_workers or 1) > 1:
        raise ConfigError(
            f"forward_workers={config.forward_workers}: a {device.type} device runs one forward at a time"
        )
    threads = config.torch_threads or _usable_cores()
    torch.set_num_threads(threads)

    resolved = resolve(
        config.model,
        revision=config.revision,
        offline=config.offline,
        served_name=config.served_name,
        own_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )
    folder = read_folder(
        resolved.folder, task=config.task, score_template=config.score_template, allow_pickle=config.allow_pickle
    )
    check_files(folder)
    for note in folder.notes:
        log.info("model.assumed", model=resolved.name, note=note)

    source = load_tokenizer(folder, own_code=config.trust_remote_code)
    folder = with_written_markers(folder, source.backend)
    loaded = load_transformer(folder, dtype=dtype, device=device, own_code=config.trust_remote_code)
    body = Body(loaded.base)
    check_vocabulary(source.backend, body.vocabulary)
    max_tokens = _max_tokens(folder, source.max_tokens, body)
    heads = build_heads(folder, loaded, body, source.backend, max_tokens=max_tokens)
    del loaded  # what a head does not need of its own is given back
    dense = heads.get(Output.DENSE)
    dense_spec = next((spec for spec in folder.heads if isinstance(spec, DenseSpec)), None)
    tokenizer = TextTokenizer(
        source.backend,
        max_tokens=max_tokens,
        vocabulary=body.vocabulary,
        lower_case=folder.lower_case,
        pools_prompt=dense_spec is None or dense_spec.pools_prompt,
        gives_types=source.gives_types,
        chat_template=source.chat_template,
        special_tokens=source.special_tokens,
        pair_template=folder.pair_template,
        roles=resolve_roles(
            folder.roles,
            source.backend,
            special_tokens=source.special_tokens,
            vocabulary=body.vocabulary,
            max_tokens=max_tokens,
        ),
    )
    if folder.scoring == "cross-encoder":
        tokenizer.require_pairs()
    _check_body(resolved.name, body.check_positions)
    if why := body.choose_layout(config.attention, max_tokens):
        log.info("model.padded", model=resolved.name, reason=why)
    if body.layout == "padded":
        _check_body(resolved.name, partial(body.check_padding, max_tokens))
    parameters = sum(p.numel() for p in body.model.parameters()) + sum(head.parameters() for head in heads.values())
    if device.type == "cpu" and (why := body.prepack(max_tokens)):
        log.info("model.not_prepacked", model=resolved.name, reason=why)

    encoder = TextEncoder(
        card=ModelCard(
            name=resolved.name,
            architecture=type(body.model).__name__,
            parameters=parameters,
            outputs=tuple(heads),
            scoring=folder.scoring,
            similarity=folder.similarity or "cosine",
            width=dense.width if isinstance(dense, DenseHead) else 0,
            matryoshka=folder.matryoshka if config.matryoshka is None else config.matryoshka,
            dimensions=folder.dimensions,
            labels=folder.labels,
            activation=folder.activation,
            prompts=folder.prompts,
            default_prompt=folder.default_prompt,
            max_tokens=max_tokens,
            vocabulary=body.vocabulary,
            pooling="+".join(dense_spec.pooling) if dense_spec else "",
            normalize=bool(dense_spec and dense_spec.normalize),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            splits_long_inputs=config.split_long_inputs and Output.DENSE in heads,
            attention=body.layout,
            torch_threads=threads,
            forward_workers=config.forward_workers or 1,
            load_s=0.0,
        ),
        tokenizer=tokenizer,
        body=body,
        heads=heads,
        plan=ThreadPlan(threads, alone_tokens=0),
    )
    long = (tokenizer.tokenize("warm up", add_special_tokens=True).ids * max_tokens)[:max_tokens]
    _warm_up(encoder, long[: config.batch_tokens(device.type)])
    if device.type == "cpu":
        run = partial(_run, encoder)
        encoder = replace(encoder, plan=plan_threads(threads, run, long))
        workers = config.forward_workers or plan_workers(threads, run, long)
        encoder = replace(encoder, card=replace(encoder.card, forward_workers=workers))
        log.info("model.threads", threads=threads, alone_tokens=encoder.plan.alone_tokens, forward_workers=workers)
    encoder = replace(encoder, card=replace(encoder.card, load_s=time.monotonic() - started))
    _say(encoder.card)
    return encoder


def _say(card: ModelCard) -> None:
    """One line with what was understood of a model, for the people who know what it should be."""
    log.info(
        "model.understood",
        model=card.name,
        architecture=card.architecture,
        outputs=[*map(str, card.outputs)],
        scoring=card.scoring,
        similarity=card.similarity,
        activation=card.activation,
        pooling=card.pooling,
        normalize=card.normalize,
        matryoshka=card.matryoshka,
        labels=len(card.labels),
        prompts=[*card.prompts],
        has_default_prompt=bool(card.default_prompt),
        max_tokens=card.max_tokens,
        dtype=card.dtype,
        attention=card.attention,
    )


def _device(wanted: DeviceName) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return torch.device("cuda")
    return torch.device("cpu")


def _dtype(wanted: DTypeName, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 only where the device multiplies in it; emulated, it is slower than float32."""
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = torch.cpu.get_capabilities()
        native = bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    return torch.bfloat16 if native else torch.float32


def _usable_cores() -> int:
    """Cores that this process may run on, which may be fewer than the machine has (and only Linux says so)."""
    usable: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _max_tokens(folder: ModelFolder, declared_tokens: int | None, body: Body) -> int:
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
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"the model fails on a few tokens: {error}") from error
    if why:
        log.info("model.peculiar", model=name, reason=why)


def _warm_up(encoder: TextEncoder, long: TokenIds) -> None:
    """Run a short and a long batch, so that the first request finds memory and kernels ready.

    Raises:
        ConfigError: The model gives NaN or Inf, or fails on an input of a length that it should take.
    """
    for batch in ([long[:1], long[:2]], [long]):
        try:
            rows = _run(encoder, batch)
        except (RuntimeError, LookupError, ValueError, StagedPoolError) as error:
            raise ConfigError(f"the model fails on an input of {len(batch[-1])} tokens: {error}") from error
        for row in rows:
            if isinstance(row, ModelFailed):
                raise ConfigError(f"the weights cannot be used: {row}")


def _run(encoder: TextEncoder, batch: Sequence[TokenIds]) -> Sequence[object]:
    """Run a batch of token ids for everything that the model gives."""
    outputs: Outputs = frozenset(encoder.card.outputs)
    return encoder.compute([TokenSequence(list(ids), outputs) for ids in batch])
