"""The commands `embed`, `score` and `classify`: ask a model without a server, one JSON object a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from staged_pool.api.commands.given import given_settings
from staged_pool.api.commands.inputs import (
    IMAGE_OPTION,
    VIDEO_OPTION,
    Given,
    check_argument,
    errors_by_name,
    lines_or_stdin,
    portions,
    read_files,
    texts_and_files,
)
from staged_pool.api.commands.options import SettingsCommand, setting_options
from staged_pool.api.commands.process import errors_in_flag_words, prepare_environment, run
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.runtime import arguments
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.requests import HYPOTHESIS, MODEL_MAX
from staged_pool.runtime.settings import ENV_PREFIX
from staged_pool.stages.errors import ConfigError

if TYPE_CHECKING:
    from staged_pool.runtime.engine.engine import Engine

Use: TypeAlias = Callable[["Engine", EngineConfig], Awaitable[None]]

_MODEL: Final = ("model", "revision", "offline")
_TRUST: Final = ("allow_pickle", "trust_remote_code")
_DEVICE: Final = ("device", "dtype", "attention")
_IMAGES: Final = ("image_path", "image_draft", "max_image_pixels")
_VIDEOS: Final = ("max_video_bytes", "max_video_seconds", "max_video_frames", "video_timeout_s")
_THREADS: Final = ("torch_threads", "forward_workers")
_SCORING: Final = ("score_template", "score_tokens")

_TEXTS: Final = click.Argument(["texts"], nargs=-1)
_ACTIVATE: Final = click.Option(
    ["--activate/--logits"], default=True, help="Apply the model's activation to the logits (default), or print them."
)


def _embed(
    *, texts: tuple[str, ...], image: tuple[Path, ...], video: tuple[Path, ...], dimensions: int | None, **_: Any
) -> None:
    with errors_in_flag_words():
        if dimensions is not None and dimensions < 1:
            raise ConfigError(f"dimensions={dimensions}: must be at least 1")
        given = texts_and_files(texts, image, video)

    async def use(engine: Engine, config: EngineConfig) -> None:
        for first, some in portions(given, config.max_request_items):
            with errors_by_name(some, first):
                result = await engine.embed(await read_files(some), dimensions=dimensions)
            for index, (each, vector) in enumerate(zip(some, result.embeddings.tolist(), strict=True), start=first):
                _print(index=index, **_named(each), embedding=vector)

    _run_with_engine(use)


def _score(*, query: str, documents: tuple[str, ...], activate: bool, **_: Any) -> None:
    with errors_in_flag_words():
        if not query:
            raise ConfigError("the query is empty; it must say what is looked for")
        check_argument(query, "the query")
        given = lines_or_stdin(documents, "document")

    async def use(engine: Engine, config: EngineConfig) -> None:
        for first, some in portions(given, config.max_request_items - 1):  # the query is an item too
            result = await engine.score(query, some, activate=activate, max_tokens=MODEL_MAX)
            for index, (document, value) in enumerate(zip(some, result.scores.tolist(), strict=True), start=first):
                _print(index=index, document=document, score=value)

    _run_with_engine(use)


def _classify(
    *,
    texts: tuple[str, ...],
    image: tuple[Path, ...],
    activate: bool,
    candidate_labels: str | None,
    hypothesis_template: str,
    multi_label: bool,
    **_: Any,
) -> None:
    with errors_in_flag_words():
        given = texts_and_files(texts, image)
    labels = arguments.candidate_labels(candidate_labels)

    async def use(engine: Engine, config: EngineConfig) -> None:
        for first, some in portions(given, max(1, config.max_request_items // len(labels or ("",)))):
            with errors_by_name(some, first):
                result = await engine.classify(
                    await read_files(some),
                    activate=activate,
                    candidate_labels=labels,
                    hypothesis_template=hypothesis_template,
                    multi_label=multi_label,
                )
            best = result.best.tolist()
            rows = zip(some, best, result.scores.tolist(), strict=True)
            for index, (each, place, probs) in enumerate(rows, start=first):
                _print(index=index, **_named(each), label=result.labels[place] if result.labels else None, probs=probs)

    _run_with_engine(use)


def _run_with_engine(use: Use) -> None:
    """Load the model that the flags name, and run `use` with its engine."""
    from staged_pool.runtime.models.find import check_model

    with errors_in_flag_words():
        given = given_settings(click.get_current_context())
        process, config = given.build(ProcessConfig), given.build(EngineConfig)
        check_model(config)
        prepare_environment(offline=config.offline)

        from staged_pool.api.commands import logs

        logs.configure(process.log_level, process.log_format)
        run(process.backend, lambda: _with_engine(config, use))


async def _with_engine(config: EngineConfig, use: Use) -> None:
    from staged_pool.runtime.engine.open import open_engine

    async with open_engine(config) as engine:
        await use(engine, config)


def _named(given: Given) -> dict[str, str]:
    return {"text": given} if isinstance(given, str) else {given.kind: str(given.path)}


def _print(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")


def _settings(*engine: str) -> list[click.Parameter]:
    process = setting_options(ProcessConfig, ("backend", "log_level", "log_format"), log_level="warning")
    return [*setting_options(EngineConfig, engine), *process]


embed: Final = SettingsCommand(
    "embed",
    callback=_embed,
    params=[
        _TEXTS,
        IMAGE_OPTION,
        VIDEO_OPTION,
        click.Option(
            ["--dimensions"],
            type=click.INT,
            envvar=f"{ENV_PREFIX}DIMENSIONS",
            metavar="N",
            help="Keep the first N values of each vector, such as 256. Only Matryoshka models lose little by it.",
        ),
        *_settings(
            *_MODEL, "task", *_TRUST, *_DEVICE, *_IMAGES, *_VIDEOS, "matryoshka", "split_long_inputs", *_THREADS
        ),
    ],
    help="""Embed texts, images and videos without a server.

    TEXTS: the texts; without any, one text a line from the standard input. Prints one JSON object for each input:
    {"index", "text", "image" or "video", "embedding"}.
    """,
)  # fmt: skip
score: Final = SettingsCommand(
    "score",
    callback=_score,
    params=[
        click.Argument(["query"]),
        click.Argument(["documents"], nargs=-1),
        _ACTIVATE,
        *_settings(*_MODEL, "task", *_SCORING, *_TRUST, *_DEVICE, *_THREADS),
    ],
    help="""Score documents for a query without a server.

    DOCUMENTS: the texts; without any, one text a line from the standard input. A document that is longer than the
    model takes is cut. Prints one JSON object for each document: {"index", "document", "score"}.
    """,
)
classify: Final = SettingsCommand(
    "classify",
    callback=_classify,
    params=[
        _TEXTS,
        IMAGE_OPTION,
        _ACTIVATE,
        click.Option(
            ["--candidate-labels"],
            envvar=f"{ENV_PREFIX}CANDIDATE_LABELS",
            metavar="LABELS",
            help="Labels to choose among, with commas between them. For models of natural language inference, such as "
            "bart-large-mnli.",
        ),
        click.Option(
            ["--hypothesis-template"],
            envvar=f"{ENV_PREFIX}HYPOTHESIS_TEMPLATE",
            metavar="TEXT",
            default=HYPOTHESIS,
            help="Statement that each candidate label completes; {} stands for the label.",
        ),
        click.Option(
            ["--multi-label/--one-label"],
            default=False,
            help="Score each candidate label by itself, or let the scores of a text add up to 1 (default).",
        ),
        *_settings(*_MODEL, *_TRUST, *_DEVICE, *_IMAGES, *_THREADS),
    ],
    help="""Classify texts and images without a server.

    TEXTS: the texts; without any, one text a line from the standard input. Prints one JSON object for each input:
    {"index", "text" or "image", "label", "probs"}. With candidate labels, "probs" are in their order.
    """,
)
