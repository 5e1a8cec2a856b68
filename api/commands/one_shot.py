"""The commands that ask a model without a server. Each prints one JSON object a line."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import anyio
import typer

from staged_pool.api.commands.flags import (
    AllowPickle,
    AttentionFlag,
    Backend,
    BackendFlag,
    DeviceFlag,
    DTypeFlag,
    ForwardWorkers,
    ImageDraft,
    ImagePathFlag,
    LogFormat,
    LogFormatFlag,
    LogLevel,
    LogLevelFlag,
    Matryoshka,
    MaxImagePixels,
    Model,
    Offline,
    Revision,
    ScoreTemplate,
    ScoreTokens,
    SplitLongInputs,
    TaskFlag,
    TorchThreads,
    TrustRemoteCode,
    flag,
)
from staged_pool.api.commands.process import errors_in_flag_words, prepare_environment, run
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.find import check_model, find_model
from staged_pool.runtime.models.images.torchvision import leave_out_broken_torchvision
from staged_pool.runtime.requests import MODEL_MAX, Image
from staged_pool.stages.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from staged_pool.runtime.engine.engine import Engine

T = TypeVar("T")

Texts = Annotated[
    list[str] | None, typer.Argument(help="The texts. Without any: one text a line from the standard input.")
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", exists=True, dir_okay=False, readable=True, help="The file of an image. Repeat it for several."
    ),
]
Activate = Annotated[
    bool, typer.Option("--activate/--logits", help="Print what the model's activation makes of its logits, or these.")
]
Use: TypeAlias = Callable[["Engine", EngineConfig], Awaitable[None]]

_DEFAULT = EngineConfig()


def embed(
    *,
    texts: Texts = None,
    image: Images = None,
    dimensions: Annotated[
        int | None,
        flag("--dimensions", "Vectors", "Keep the first so many values. Only Matryoshka models lose little by it."),
    ] = None,
    backend: BackendFlag = "asyncio",
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    task: TaskFlag = _DEFAULT.task,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
    device: DeviceFlag = _DEFAULT.device,
    dtype: DTypeFlag = _DEFAULT.dtype,
    attention: AttentionFlag = _DEFAULT.attention,
    image_path: ImagePathFlag = _DEFAULT.image_path,
    image_draft: ImageDraft = _DEFAULT.image_draft,
    max_image_pixels: MaxImagePixels = _DEFAULT.max_image_pixels,
    matryoshka: Matryoshka = None,
    split_long_inputs: SplitLongInputs = False,
    torch_threads: TorchThreads = None,
    forward_workers: ForwardWorkers = None,
    log_level: LogLevelFlag = "warning",
    log_format: LogFormatFlag = "auto",
) -> None:
    """Embed texts and images without a server. Prints one JSON object for each: {"index", "text" or "image",
    "embedding"}."""

    with errors_in_flag_words():
        if dimensions is not None and dimensions < 1:
            raise ConfigError(f"dimensions={dimensions}: must be at least 1")
        given = _given(texts, image)

    async def use(engine: Engine, config: EngineConfig) -> None:
        for first, some in _portions(given, config):
            with _errors_by_name(some, first):
                result = await engine.embed(await _read(some), dimensions=dimensions)
            for index, (each, vector) in enumerate(zip(some, result.embeddings.tolist(), strict=True), start=first):
                _print(index=index, **_named(each), embedding=vector)

    _ask(
        use,
        backend=backend,
        log_level=log_level,
        log_format=log_format,
        model=model,
        revision=revision,
        offline=offline,
        task=task,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        device=device,
        dtype=dtype,
        attention=attention,
        image_path=image_path,
        image_draft=image_draft,
        max_image_pixels=max_image_pixels,
        matryoshka=matryoshka,
        split_long_inputs=split_long_inputs,
        torch_threads=torch_threads,
        forward_workers=forward_workers,
    )


def score(
    *,
    query: Annotated[str, typer.Argument(help="What documents are to answer.")],
    documents: Annotated[
        list[str] | None, typer.Argument(help="Texts. Without any: one a line from the standard input.")
    ] = None,
    activate: Activate = True,
    backend: BackendFlag = "asyncio",
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    task: TaskFlag = _DEFAULT.task,
    score_template: ScoreTemplate = None,
    score_tokens: ScoreTokens = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
    device: DeviceFlag = _DEFAULT.device,
    dtype: DTypeFlag = _DEFAULT.dtype,
    attention: AttentionFlag = _DEFAULT.attention,
    torch_threads: TorchThreads = None,
    forward_workers: ForwardWorkers = None,
    log_level: LogLevelFlag = "warning",
    log_format: LogFormatFlag = "auto",
) -> None:
    """Score documents without a server. Prints one JSON object a document: {"index", "document", "score"}.

    Documents that are longer than the model takes are cut.
    """

    with errors_in_flag_words():
        if not query:
            raise ConfigError("the query is empty; it must say what is looked for")
        given = _lines(documents, "document")

    async def use(engine: Engine, config: EngineConfig) -> None:
        for first, some in _portions(given, config, spare=1):
            result = await engine.score(query, some, activate=activate, max_tokens=MODEL_MAX)
            for index, (document, value) in enumerate(zip(some, result.scores.tolist(), strict=True), start=first):
                _print(index=index, document=document, score=value)

    _ask(
        use,
        backend=backend,
        log_level=log_level,
        log_format=log_format,
        model=model,
        revision=revision,
        offline=offline,
        task=task,
        score_template=score_template,
        score_tokens=score_tokens,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        device=device,
        dtype=dtype,
        attention=attention,
        torch_threads=torch_threads,
        forward_workers=forward_workers,
    )


def classify(
    *,
    texts: Texts = None,
    image: Images = None,
    activate: Activate = True,
    backend: BackendFlag = "asyncio",
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
    device: DeviceFlag = _DEFAULT.device,
    dtype: DTypeFlag = _DEFAULT.dtype,
    attention: AttentionFlag = _DEFAULT.attention,
    image_path: ImagePathFlag = _DEFAULT.image_path,
    image_draft: ImageDraft = _DEFAULT.image_draft,
    max_image_pixels: MaxImagePixels = _DEFAULT.max_image_pixels,
    torch_threads: TorchThreads = None,
    forward_workers: ForwardWorkers = None,
    log_level: LogLevelFlag = "warning",
    log_format: LogFormatFlag = "auto",
) -> None:
    """Classify texts and images without a server. Prints one JSON object for each: {"index", "text" or "image",
    "label", "probs"}."""

    with errors_in_flag_words():
        given = _given(texts, image)

    async def use(engine: Engine, config: EngineConfig) -> None:
        for first, some in _portions(given, config):
            with _errors_by_name(some, first):
                result = await engine.classify(await _read(some), activate=activate)
            best = result.best.tolist()
            rows = zip(some, best, result.scores.tolist(), strict=True)
            for index, (each, place, probs) in enumerate(rows, start=first):
                _print(index=index, **_named(each), label=result.labels[place] if result.labels else None, probs=probs)

    _ask(
        use,
        backend=backend,
        log_level=log_level,
        log_format=log_format,
        model=model,
        revision=revision,
        offline=offline,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        device=device,
        dtype=dtype,
        attention=attention,
        image_path=image_path,
        image_draft=image_draft,
        max_image_pixels=max_image_pixels,
        torch_threads=torch_threads,
        forward_workers=forward_workers,
    )


def check(
    *,
    folder: Annotated[str, typer.Argument(help="The model: a folder, or a hub id.")],
    revision: Revision = None,
    offline: Offline = False,
    task: TaskFlag = _DEFAULT.task,
    score_template: ScoreTemplate = None,
    score_tokens: ScoreTokens = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
    device: DeviceFlag = _DEFAULT.device,
    dtype: DTypeFlag = _DEFAULT.dtype,
    attention: AttentionFlag = _DEFAULT.attention,
    log_level: LogLevelFlag = "warning",
    log_format: LogFormatFlag = "auto",
) -> None:
    """Read, load and run a model without serving it. Prints what was understood of it as one JSON object, or says in
    one line why it cannot be served (exit code 2)."""
    with errors_in_flag_words():
        config = EngineConfig(
            model=folder,
            revision=revision,
            offline=offline,
            task=task,
            score_template=score_template,
            score_tokens=score_tokens,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            device=device,
            dtype=dtype,
            attention=attention,
        )
        check_model(config)
        prepare_environment(offline=offline)

        from staged_pool.api.commands import logs

        logs.configure(log_level, log_format)
        found = find_model(config)

        leave_out_broken_torchvision()
        from staged_pool.runtime.models.load import load_model

        _print(**dataclasses.asdict(load_model(config, found).card))


def _ask(use: Use, *, backend: Backend, log_level: LogLevel, log_format: LogFormat, **settings: Any) -> None:
    """Load the model that the flags name, and run `use` with it."""
    with errors_in_flag_words():
        config = EngineConfig(**settings)
        check_model(config)
        prepare_environment(offline=config.offline)

        from staged_pool.api.commands import logs

        logs.configure(log_level, log_format)
        run(backend, lambda: _with_engine(config, use))


async def _with_engine(config: EngineConfig, use: Use) -> None:
    from staged_pool.runtime.engine.open import open_engine

    async with open_engine(config) as engine:
        await use(engine, config)


def _lines(given: list[str] | None, name: str) -> list[str]:
    """What the command line gives, or else the lines of the standard input.

    Raises:
        ConfigError: There are none; says how to give one.
    """
    lines = given or [line.rstrip("\r\n") for line in sys.stdin]
    if not any(lines):
        raise ConfigError(f"no {name}: give one as an argument, or one a line on the standard input")
    return lines


def _given(texts: list[str] | None, images: list[Path] | None) -> list[str | Path]:
    """The texts, then the files of images."""
    return [*images] if images and not texts else [*_lines(texts, "text"), *(images or ())]


async def _read(given: Sequence[str | Path]) -> list[str | Image]:
    """The same with the images that lie in the files."""
    return [each if isinstance(each, str) else Image(await anyio.Path(each).read_bytes()) for each in given]


@contextmanager
def _errors_by_name(given: Sequence[str | Path], first: int) -> Iterator[None]:
    """Say which of the inputs is wrong: an image by its file, a text by its place, of which the first is `first`."""
    try:
        yield
    except InvalidInput as error:
        if error.index is None:
            raise
        wrong = given[error.index]
        name = f"input {first + error.index}" if isinstance(wrong, str) else str(wrong)
        raise type(error)(f"{name}: {error}", param=error.param, index=error.index) from error


def _named(given: str | Path) -> dict[str, str]:
    return {"text": given} if isinstance(given, str) else {"image": str(given)}


def _portions(given: Sequence[T], config: EngineConfig, *, spare: int = 0) -> Iterator[tuple[int, Sequence[T]]]:
    """As many inputs at once as a request may have, less `spare`; with the place of the first."""
    size = max(1, config.max_request_items - spare)
    for first in range(0, len(given), size):
        yield first, given[first : first + size]


def _print(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
