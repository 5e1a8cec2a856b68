"""Load a model: find its folder, read it, build it, and run it once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch

from staged_pool.runtime.config import DType as DTypeName
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.model import Lane, ModelCard, Row
from staged_pool.runtime.models.checkpoint.special_ids import with_note
from staged_pool.runtime.models.checkpoint.tokenizer import LoadedTokenizer, load_tokenizer
from staged_pool.runtime.models.checkpoint.weights import load_transformer
from staged_pool.runtime.models.devices.accelerators import (
    bytes_a_token,
    fitting_tokens,
    free_bytes,
    multiplies_bfloat16,
    open_devices,
    record_forwards,
)
from staged_pool.runtime.models.devices.kernel_choices import Tuning, tuning
from staged_pool.runtime.models.devices.launch import Launcher, Replica, Replicas
from staged_pool.runtime.models.devices.processor import bfloat16_pays, bfloat16_usually_pays
from staged_pool.runtime.models.encoder import Encoder, compute
from staged_pool.runtime.models.find import FoundModel, find_model
from staged_pool.runtime.models.folders.files import check_files
from staged_pool.runtime.models.heads.build import check_answers
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.settings import read_image_settings
from staged_pool.runtime.models.kernels.torch_threads import ThreadPlan, short_tokens, use_threads, usual_workers
from staged_pool.runtime.models.specs.model import DenseSpec, ModelFolder
from staged_pool.runtime.models.tokenizing.images import MultimodalReader
from staged_pool.runtime.models.tokenizing.input_roles import with_written_markers
from staged_pool.runtime.models.towers.image import build_image_tower
from staged_pool.runtime.models.towers.text import TextTower, build_text_tower
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.models.towers.vision_language import VisionLanguageTower, load_vision
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError, ModelFailed, StagedPoolError
from staged_pool.stages.log import get_logger

_MOST_WORKERS: Final = 16
"""Forwards at once where each has one thread."""

_TRIED_ON_ONE_THREAD: Final = 200_000_000
"""Weights. What a smaller model computes is tried on one thread: the forwards are short, and where other programs use
the cores, threads that share one wait for each other at every part of every layer."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = get_logger("staged_pool.models")


def load_model(config: EngineConfig, found: FoundModel | None = None, memory: MemoryBudget | None = None) -> Encoder:
    """Load the model that `config` names, and warm it up. Takes seconds, or minutes where it downloads.

    On GPUs, `share_memory` says how large its batches may be, when all models are loaded.

    Args:
        config: Settings of the engine.
        found: What `find_model` gave for them. None: it is found now.
        memory: Where image decodes find room. None: as much as they like.

    Where other threads use the same cores, call `openmp.spin_briefly` before torch is first imported: its threads then
    soon sleep between parallel regions instead of spinning on a core that tokenizing needs.

    Raises:
        ConfigError: The model cannot be found, read or run here, or a setting does not fit it.
    """
    threads = config.torch_threads or usable_cores()
    choices = Tuning("off" if config.deterministic else config.tune, threads=threads)
    with ExitStack() as undo:
        with choices.current():
            encoder = _load(config, found or find_model(config), memory, undo)
        undo.pop_all()
    if choices.measured:
        log.info("model.measured", model=encoder.card.name, decisions=choices.measured)
    return encoder


def share_memory(models: Sequence[Encoder], free: Callable[[torch.device], int] = free_bytes) -> list[Encoder]:
    """Divide the memory of GPUs among models that are all loaded, and say it in their cards. Models on a CPU stay.

    Args:
        models: All that this process serves.
        free: Gives the free memory of a device, in bytes.
    """
    on_gpus = [model for model in models if not model.card.device.startswith("cpu")]
    fits = fitting_tokens(
        [{replica.device: replica.token_bytes for replica in model.replicas} for model in on_gpus],
        [len(model.towers) for model in on_gpus],
        free,
    )
    told = {model.card.name: tokens for model, tokens in zip(on_gpus, fits, strict=True)}
    for name, tokens in told.items():
        log.info("model.memory", model=name, memory_tokens=tokens, models=len(told))
    return [replace(one, card=replace(one.card, memory_tokens=told.get(one.card.name))) for one in models]


def _load(config: EngineConfig, resolved: FoundModel, memory: MemoryBudget | None, undo: ExitStack) -> Encoder:
    started = time.monotonic()
    devices = open_devices(config.device)
    kind = devices[0].type
    dtype = _dtype(config.dtype, devices)
    if kind != "cpu" and (config.forward_workers or 1) > 1:
        raise ConfigError(f"forward_workers={config.forward_workers}: a {kind} device runs one forward at a time")
    threads = tuning().threads
    use_threads(threads)

    folder = with_note(resolved.folder)
    check_files(folder, own_code=config.trust_remote_code)
    for note in folder.notes:
        log.info("model.assumed", model=resolved.name, note=note)
    for note in folder.doubts:
        log.warning("model.assumed", model=resolved.name, note=note)

    # What is quick to find wrong comes first: weights may take minutes.
    source = _load_tokenizer(resolved.name, folder, config)
    if source is not None:
        folder = with_written_markers(folder, source.backend)
        check_answers(folder.heads, source.backend)
    replicas: list[Replica] = []
    readers: list[ImageReader] = []
    for device in devices:
        towers, reader = _load_towers(
            resolved.name, folder, source, config, undo, memory=memory, dtype=dtype, device=device
        )
        if reader is not None:
            readers.append(reader)
        launchers = {} if kind == "cpu" else {lane: Launcher(device) for lane in towers}
        replicas.append(Replica(device, towers, launchers))
    for reader in readers[1:]:  # the first one reads for all
        reader.close()
    towers = replicas[0].towers
    text, first = towers.get("text"), next(iter(towers.values()))
    tokenizer = text.tokenizer if isinstance(text, TextTower) else None
    outputs = tuple(output for output in first.outputs if all(output in tower.outputs for tower in towers.values()))
    specs = (*folder.heads, *folder.image_heads)
    dense_spec = next((spec for spec in specs if isinstance(spec, DenseSpec)), None)
    encoder = Encoder(
        card=ModelCard(
            name=resolved.name,
            architecture=first.architecture,
            parameters=sum(tower.parameters for tower in dict.fromkeys(towers.values())),
            lanes=tuple(towers),
            outputs=outputs,
            scoring=folder.scoring,
            similarity=folder.similarity or "cosine",
            width=first.width,
            token_width=_token_width(replicas[0], first),
            matryoshka=folder.matryoshka if config.matryoshka is None else config.matryoshka,
            dimensions=folder.dimensions,
            labels=folder.labels,
            activation=folder.activation,
            prompts=folder.prompts,
            default_prompt=folder.default_prompt,
            max_tokens=first.max_tokens,
            vocabulary=text.body.vocabulary if isinstance(text, TextTower) else 0,
            pooling="+".join(dense_spec.pooling) if dense_spec else "",
            normalize=bool(dense_spec and dense_spec.normalize),
            dtype=str(dtype).removeprefix("torch."),
            device=",".join(map(str, devices)),
            splits_long_inputs=config.split_long_inputs and tokenizer is not None and Output.DENSE in outputs,
            attention="padded" if first.pads else "packed",
            torch_threads=threads,
            forward_workers=max(len(devices), config.forward_workers or 1),
            launched_ahead=0 if kind == "cpu" else 1,
            notes=(*folder.doubts, *folder.notes, *(source.notes if source is not None else ())),
            load_s=0.0,
        ),
        replicas=Replicas(replicas),
        tokenizer=tokenizer,
        plan=ThreadPlan(threads, _short_tokens(text), always_alone=config.deterministic),
        images=readers[0] if readers else None,
        each_alone=config.deterministic,
        multimodal=sight.reader if isinstance(sight := towers.get("image"), VisionLanguageTower) else None,
    )
    batch_tokens = config.batch_tokens(kind)
    for replica in replicas:
        for tower in dict.fromkeys(replica.towers.values()):
            _warm_up(replica, tower, batch_tokens)
    if kind == "cpu":
        encoder = _with_threads(encoder, config, threads)
    else:
        for replica in replicas:
            record_forwards(resolved.name, replica, wanted=config.cuda_graphs)
            replica.token_bytes = bytes_a_token(replica, partial(_run, replica), batch_tokens)
    encoder = replace(encoder, card=replace(encoder.card, load_s=time.monotonic() - started))
    _say(encoder.card)
    return encoder


def _token_width(replica: Replica, tower: Tower) -> int:
    """Return the values of one token's vector; 0 where the tower gives none."""
    if Output.MULTI_VECTOR not in tower.outputs:
        return 0
    (row,) = _run(replica, tower, [2])
    vectors = row.values[Output.MULTI_VECTOR] if isinstance(row, Row) else None
    return vectors.shape[-1] if isinstance(vectors, np.ndarray) else 0


def _short_tokens(text: Tower | None) -> int:
    """See `short_tokens`. A forward of images is never short."""
    if not isinstance(text, TextTower):
        return 0
    return short_tokens(text.parameters - text.body.vocabulary * text.body.width)  # a token is looked up there


def _with_threads(encoder: Encoder, config: EngineConfig, threads: int) -> Encoder:
    """Say how many forwards run at once on a CPU."""
    use_threads(threads)
    usual = min(threads, _MOST_WORKERS) if config.deterministic else usual_workers(threads)
    workers = config.forward_workers or usual
    workers = max(len(encoder.devices), workers)
    log.info("model.threads", threads=threads, forward_workers=workers)
    return replace(encoder, card=replace(encoder.card, forward_workers=workers))


def _load_tokenizer(name: str, folder: ModelFolder, config: EngineConfig) -> LoadedTokenizer | None:
    """The folder's tokenizer, with a word in the log on what was decided about it. None: the model reads no texts."""
    if not folder.heads:
        return None
    source = load_tokenizer(folder, own_code=config.trust_remote_code)
    for note in source.notes:
        log.info("model.tokenizer", model=name, note=note)
    return source


def _load_towers(
    name: str,
    folder: ModelFolder,
    source: LoadedTokenizer | None,
    config: EngineConfig,
    undo: ExitStack,
    *,
    memory: MemoryBudget | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Mapping[Lane, Tower], ImageReader | None]:
    """The towers of a folder, by what they read; and what prepares its images, which `undo` closes."""
    own_code = config.trust_remote_code
    sees = folder.image_heads or folder.images
    settings = read_image_settings(folder.body, trust_remote_code=own_code) if sees else None
    reader = None if settings is None else ImageReader(settings, config, memory)
    if reader is not None:
        undo.callback(reader.close)
    loaded = load_transformer(folder, dtype=dtype, device=device, own_code=own_code, allow_pickle=config.allow_pickle)
    if sum(weight.numel() for weight in loaded.whole.parameters()) < _TRIED_ON_ONE_THREAD:
        use_threads(1)
    if folder.images is not None and source is not None and reader is not None:
        sight = load_vision(loaded, reader)
        text = build_text_tower(name, folder, source, loaded, attention=config.attention, sight=sight)
        images = MultimodalReader(text.tokenizer, folder.images, sight.layout, reader)
        return {"text": text, "image": VisionLanguageTower(text, images, sight)}, reader
    towers: dict[Lane, Tower] = {}
    if source is not None:
        towers["text"] = build_text_tower(name, folder, source, loaded, attention=config.attention)
    if reader is not None:
        towers["image"] = build_image_tower(name, folder, reader, loaded)
    if len({tower.width for tower in towers.values()}) > 1:
        widths = " and ".join(f"{tower.width} for {lane}s" for lane, tower in towers.items())
        raise ConfigError(f"vectors of texts and of images cannot be compared: they have widths of {widths}")
    return towers, reader


def _say(card: ModelCard) -> None:
    """One line with what was understood of a model, for the people who know what it should be."""
    log.info(
        "model.understood",
        model=card.name,
        architecture=card.architecture,
        lanes=[*card.lanes],
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


def _dtype(wanted: DTypeName, devices: Sequence[torch.device]) -> torch.dtype:
    """`auto`: bfloat16 where every device multiplies in it, and a CPU quicker than in float32."""
    on_cpu = devices[0].type == "cpu"
    if wanted != "auto":
        if wanted == "float16" and on_cpu:
            raise ConfigError("dtype='float16': is for GPUs; a CPU takes float32 or bfloat16")
        return _DTYPES[wanted]
    if on_cpu:
        pays = tuning().choose(
            "bfloat16",
            table=bfloat16_usually_pays(),
            measure=bfloat16_pays,
            allowed=lambda kept: isinstance(kept, bool),
        )
        return torch.bfloat16 if pays else torch.float32
    return torch.bfloat16 if all(map(multiplies_bfloat16, devices)) else torch.float16


def _warm_up(replica: Replica, tower: Tower, batch_tokens: int) -> None:
    """Run a short and a long batch, so that the first request finds memory and kernels ready.

    Raises:
        ConfigError: The model gives NaN or Inf, or fails on an input of a length that it should take.
    """
    for sizes in ([1, 2], [min(tower.max_tokens, batch_tokens)]):
        try:
            rows = _run(replica, tower, sizes)
        except (RuntimeError, LookupError, ValueError, StagedPoolError) as error:
            raise ConfigError(f"the model fails on an input of {sizes[-1]} tokens: {error}") from error
        for row in rows:
            if isinstance(row, ModelFailed):
                raise ConfigError(f"the weights cannot be used: {row}")


def _run(replica: Replica, tower: Tower, sizes: Sequence[int]) -> Sequence[object]:
    """Run a batch of made-up inputs of so many tokens each, for everything that the tower gives."""
    return compute(replica, tower.made_up(sizes))
