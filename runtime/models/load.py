"""Model loading: read the folder, build the towers on each device, and warm them up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.load_deadline import LoadDeadline
from staged_pool.runtime.load_progress import LoadPhase, LoadProgress
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.memory.governor import MemoryGovernor, NoRoom
from staged_pool.runtime.models.checkpoint.special_ids import note_unknown_ids
from staged_pool.runtime.models.checkpoint.static import load_static_tokenizer
from staged_pool.runtime.models.checkpoint.stored_size import stored_weights
from staged_pool.runtime.models.checkpoint.tokenizer import LoadedTokenizer, load_tokenizer
from staged_pool.runtime.models.checkpoint.weights import load_transformer
from staged_pool.runtime.models.data_types import choose_dtype
from staged_pool.runtime.models.devices.accelerators import (
    bytes_per_token,
    fitting_tokens,
    free_bytes,
    open_devices,
    record_forwards,
)
from staged_pool.runtime.models.devices.kernel_choices import Tuning, tuning
from staged_pool.runtime.models.devices.launch import Launcher, Replica, Replicas
from staged_pool.runtime.models.encoder import Encoder, compute
from staged_pool.runtime.models.find import FoundModel, find_model
from staged_pool.runtime.models.folders.files import check_files
from staged_pool.runtime.models.heads.build import check_answers
from staged_pool.runtime.models.images.open_reader import open_images
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.input_preparer import open_text_workers
from staged_pool.runtime.models.kernels.torch_threads import ThreadPlan, default_workers, short_tokens, use_threads
from staged_pool.runtime.models.model_card import build_card, log_card
from staged_pool.runtime.models.preparation import TextPreparation
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.tokenizing.images import MultimodalReader
from staged_pool.runtime.models.tokenizing.input_roles import unknown_markers_to_prompts
from staged_pool.runtime.models.tokenizing.lone_images import LoneImageReader
from staged_pool.runtime.models.towers.image import ImageTower, build_image_tower
from staged_pool.runtime.models.towers.text import TextTower, build_text_tower
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.models.towers.vision_language import VisionLanguageTower, load_vision
from staged_pool.runtime.models.videos.open_reader import open_videos
from staged_pool.stages.errors import ConfigError, ModelFailed, StagedPoolError
from staged_pool.stages.exhausted import is_out_of_memory
from staged_pool.stages.log import get_logger

_MAX_WORKERS: Final = 16
"""Largest number of concurrent forwards with one thread each."""

_PROBED_ON_ONE_THREAD: Final = 200_000_000
"""Weights. The checks at load of a smaller model use one thread: their forwards are short, and threads that share one
wait for each other in every layer if other programs use the cores."""

log = get_logger("staged_pool.models")


def load_model(
    config: EngineConfig,
    found: FoundModel | None = None,
    memory: MemoryGovernor | None = None,
    progress: LoadProgress | None = None,
    *,
    deadline: LoadDeadline | None = None,
) -> Encoder:
    """Load the model that `config` names, and warm it up. Takes seconds, or minutes with a download.

    It is the only door to models: what a folder asks for is compared with its weights before anything is built, and
    memory is reserved before they are read.

    On GPUs, `share_memory` sets the size of its batches once all models are loaded.

    If other threads use the same cores, call `openmp.spin_briefly` before torch is first imported. Its threads then
    sleep soon between parallel regions, instead of spinning on a core that tokenizing needs.

    Args:
        config: Settings of the engine.
        found: Result of `find_model` for them. None: it is called here.
        memory: Memory governor of the process. None: the load has the whole limit, and image decodes have none.
        progress: Told of the phases. None: they are only logged.
        deadline: Looked at between steps. None: there is no deadline.

    Raises:
        ConfigError: The model cannot be found, read or run here, or a setting does not fit it.
        NoRoom: There is no memory for its weights. It is a `ConfigError`, too.
        LoadTimedOut: The deadline has passed.
    """
    threads = config.torch_threads or usable_cores()
    choices = Tuning("off" if config.deterministic else config.tune, threads=threads)
    about = (
        memory or MemoryGovernor(config.memory_limit_bytes),
        progress or LoadProgress(),
        deadline or LoadDeadline(),
    )
    try:
        with ExitStack() as undo, ExitStack() as until_loaded:
            with choices.current():
                encoder = _load(config, found or find_model(config), *about, undo=undo, until_loaded=until_loaded)
            undo.pop_all()
    except Exception as error:
        if isinstance(error, StagedPoolError) or not is_out_of_memory(error):
            raise
        raise NoRoom("There was no memory to load the model") from error
    if choices.measured:
        log.debug("model.measured", model=encoder.card.name, decisions=choices.measured)
    return encoder


def share_memory(models: Sequence[Encoder], free: Callable[[torch.device], int] = free_bytes) -> list[Encoder]:
    """Divide the free memory of GPUs among models that are all loaded.

    Args:
        models: All models of this process. Those on a CPU are returned as they are.
        free: Gives the free memory of a device, in bytes.

    Returns:
        The models, with `memory_tokens` in the cards of those on GPUs.
    """
    on_gpus = [model for model in models if not model.card.device.startswith("cpu")]
    fits = fitting_tokens(
        [{replica.device: replica.token_bytes for replica in model.replicas} for model in on_gpus],
        [len(model.towers) for model in on_gpus],
        free,
    )
    memory_tokens = {model.card.name: tokens for model, tokens in zip(on_gpus, fits, strict=True)}
    for name, tokens in memory_tokens.items():
        log.info("model.memory", model=name, memory_tokens=tokens, models=len(memory_tokens))
    return [
        replace(model, card=replace(model.card, memory_tokens=memory_tokens.get(model.card.name))) for model in models
    ]


def _load(
    config: EngineConfig,
    found: FoundModel,
    memory: MemoryGovernor,
    progress: LoadProgress,
    deadline: LoadDeadline,
    *,
    undo: ExitStack,
    until_loaded: ExitStack,
) -> Encoder:
    started = time.monotonic()
    devices = open_devices(config.device)
    kind = devices[0].type
    if kind != "cpu" and (config.forward_workers or 1) > 1:
        raise ConfigError(f"forward_workers={config.forward_workers}: a {kind} device runs one forward at a time")
    threads = tuning().threads
    use_threads(threads)
    folder, source = _read(found, config)
    looked_up = folder.architecture == "static embedding" and config.dtype == "auto"
    dtype = torch.float32 if looked_up else choose_dtype(config.dtype, devices)
    deadline.check()
    reader = open_images(folder, config, memory.budget, undo)
    # A GPU gets its weights from the memory of the process, one device after the other.
    needed = stored_weights(folder.body) * dtype.itemsize * (len(devices) if kind == "cpu" else 1)
    until_loaded.enter_context(memory.reserved(needed, f"The weights of {found.name}"))
    with progress.phase(found.name, LoadPhase.WEIGHTS):
        replicas = _load_replicas(found.name, folder, source, config, reader, dtype=dtype, devices=devices)
    deadline.check()
    towers = replicas[0].towers
    text = towers.get("text")
    tokenizer = text.tokenizer if isinstance(text, TextTower) else None
    text_workers = open_text_workers(config, None if tokenizer is None else TextPreparation.of(tokenizer))
    if text_workers is not None:
        undo.callback(text_workers.close)
    image_inputs = None if reader is None else _image_inputs(folder, config, reader, towers)
    reads_videos = isinstance(image_inputs, MultimodalReader) and image_inputs.videos is not None
    dtype_name = "int8" if config.dtype == "int8" else str(dtype).removeprefix("torch.")
    card = build_card(found.name, folder, source, replicas, config, dtype=dtype_name)
    encoder = Encoder(
        card=replace(card, reads_videos=reads_videos),
        padded=tuple(lane for lane, tower in towers.items() if tower.pads),
        tokenizer=tokenizer,
        text_workers=text_workers,
        images=reader,
        image_inputs=image_inputs,
        replicas=Replicas(replicas),
        plan=ThreadPlan(threads, _short_tokens(text), always_alone=config.deterministic),
        each_alone=config.deterministic,
    )
    with progress.phase(found.name, LoadPhase.WARM_UP):
        _prepare_forwards(replicas, config, found.name)
    deadline.check()
    if kind == "cpu":
        encoder = _with_workers(encoder, config, threads)
    encoder = replace(encoder, card=replace(encoder.card, load_s=time.monotonic() - started))
    log_card(encoder.card)
    return encoder


def _prepare_forwards(replicas: Sequence[Replica], config: EngineConfig, name: str) -> None:
    """Warm the devices up. On GPUs, measure the memory of a batch, and record forwards."""
    for replica in replicas:
        batch_tokens = config.batch_tokens(replica.device.type)
        for tower in dict.fromkeys(replica.towers.values()):
            _warm_up(replica, tower, batch_tokens)
    for replica in replicas:
        if replica.device.type != "cpu":
            batch_tokens = config.batch_tokens(replica.device.type)
            replica.token_bytes = bytes_per_token(replica, partial(_run, replica), batch_tokens)
            if config.cuda_graphs:  # after the measurement: a replay takes no memory, and other forwards do
                record_forwards(name, replica, batch_tokens)


def _read(found: FoundModel, config: EngineConfig) -> tuple[ModelFolder, LoadedTokenizer | None]:
    """Check the files of a folder and load its tokenizer. None: the model reads no texts.

    All of this comes before the weights, which may take minutes, so that errors are found early.
    """
    folder = note_unknown_ids(found.folder)
    check_files(folder, own_code=config.trust_remote_code)
    for note in folder.notes:
        log.info("model.assumed", model=found.name, note=note)
    for note in folder.warnings:
        log.warning("model.assumed", model=found.name, note=note)
    if not folder.heads:
        return folder, None
    if folder.architecture == "static embedding":
        source = load_static_tokenizer(folder)
    else:
        source = load_tokenizer(folder, own_code=config.trust_remote_code)
    for note in source.notes:
        log.info("model.tokenizer", model=found.name, note=note)
    folder = unknown_markers_to_prompts(folder, source.backend)
    check_answers(folder.heads, source.backend)
    return folder, source


def _image_inputs(
    folder: ModelFolder, config: EngineConfig, reader: ImageReader, towers: Mapping[Lane, Tower]
) -> LoneImageReader | MultimodalReader:
    """Build the preprocessor of the lane of images."""
    image = towers["image"]
    if isinstance(image, ImageTower):
        return LoneImageReader(reader, image.tokens)
    assert isinstance(image, VisionLanguageTower)
    assert folder.images is not None
    layout = image.image_embedder.layout
    videos = open_videos(folder, layout.video_rule, config, reader)
    return MultimodalReader(image.texts.tokenizer, folder.images, layout, reader, videos)


def _load_replicas(
    name: str,
    folder: ModelFolder,
    source: LoadedTokenizer | None,
    config: EngineConfig,
    reader: ImageReader | None,
    *,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
) -> list[Replica]:
    """Load the weights on each device."""
    replicas: list[Replica] = []
    for device in devices:
        towers = _load_towers(name, folder, source, config, reader, dtype=dtype, device=device)
        launchers = {} if device.type == "cpu" else {lane: Launcher(device) for lane in towers}
        replicas.append(Replica(device, towers, launchers))
    return replicas


def _short_tokens(text: Tower | None) -> int:
    """Return the largest batch, in tokens, that runs on one thread; see `short_tokens`. Images never do."""
    if not isinstance(text, TextTower):
        return 0
    embedding = text.transformer.vocabulary * text.transformer.width  # looked up, not multiplied
    return short_tokens(text.parameters - embedding)


def _with_workers(encoder: Encoder, config: EngineConfig, threads: int) -> Encoder:
    """Set the number of concurrent forwards on a CPU."""
    use_threads(threads)
    usual = min(threads, _MAX_WORKERS) if config.deterministic else default_workers(threads)
    workers = max(len(encoder.devices), config.forward_workers or usual)
    log.debug("model.threads", threads=threads, forward_workers=workers)
    return replace(encoder, card=replace(encoder.card, forward_workers=workers))


def _load_towers(
    name: str,
    folder: ModelFolder,
    source: LoadedTokenizer | None,
    config: EngineConfig,
    reader: ImageReader | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Mapping[Lane, Tower]:
    """Load the towers of a folder, by lane."""
    own_code, int8 = config.trust_remote_code, config.dtype == "int8"
    if int8 and source is None:
        raise ConfigError("dtype='int8': is for texts, and the model reads images only; use float32 or bfloat16")
    loaded = load_transformer(folder, dtype=dtype, device=device, own_code=own_code, allow_pickle=config.allow_pickle)
    if sum(weight.numel() for weight in loaded.whole.parameters()) < _PROBED_ON_ONE_THREAD:
        use_threads(1)
    if folder.images is not None and source is not None and reader is not None:
        image_embedder = load_vision(loaded, reader)
        text = build_text_tower(
            name, folder, source, loaded, attention=config.attention, int8=int8, image_embedder=image_embedder
        )
        return {"text": text, "image": VisionLanguageTower(text, image_embedder)}
    towers: dict[Lane, Tower] = {}
    if source is not None:
        towers["text"] = build_text_tower(name, folder, source, loaded, attention=config.attention, int8=int8)
    if reader is not None:
        towers["image"] = build_image_tower(name, folder, reader, loaded)
    if len({tower.width for tower in towers.values()}) > 1:
        widths = " and ".join(f"{tower.width} for {lane}s" for lane, tower in towers.items())
        raise ConfigError(f"vectors of texts and of images cannot be compared: they have widths of {widths}")
    return towers


def _warm_up(replica: Replica, tower: Tower, batch_tokens: int) -> None:
    """Run a short and a long batch, which allocate memory and prepare kernels.

    Raises:
        ConfigError: The model gives NaN or Inf, or fails on an input within its length limit.
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
    """Run a batch of test inputs with these numbers of tokens."""
    return compute(replica, tower.sample_batch(sizes))
