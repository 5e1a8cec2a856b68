"""Files of pipelines (TOML), checked before anything is loaded."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.pipelines.declaration import PipelineStage
from staged_pool.runtime.pipelines.pipeline import DEFAULT_WINDOW, Pipeline, check_limits
from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError

_PIPELINE_KEYS: Final = ("name", "window", "max_requests", "items", "output", "stage")

_STAGE_KEYS: Final[Mapping[str, str]] = {
    "name": "name",
    "model": "engine",
    "task": "task",
    "plugin": "plugin",
    "from": "source",
    "outputs": "outputs",
    "dimensions": "dimensions",
    "max_active_dims": "max_active_dims",
    "prompt_name": "prompt_name",
    "max_tokens": "max_tokens",
    "candidate_labels": "candidate_labels",
    "hypothesis_template": "hypothesis_template",
    "multi_label": "multi_label",
    "expand": "expand",
    "max_items": "max_items",
    "top_k": "top_k",
    "on_error": "on_error",
    "window": "window",
}
"""Settings of a stage by their keys in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A pipeline as its file describes it; its models are not loaded yet."""

    path: Path
    name: str
    stages: Sequence[PipelineStage]
    window: int = DEFAULT_WINDOW
    max_requests: int = DEFAULT_WINDOW
    items: str = "data"
    output: str | Mapping[str, str] | None = None

    @property
    def models(self) -> Mapping[str, str]:
        """Models that its stages use, by name, each with its first place in the file."""
        places: dict[str, str] = {}
        for stage in self.stages:
            if isinstance(stage.engine, str):
                places.setdefault(stage.engine, f"{self.path}, stage {stage.name}")
        return places

    def build(self, engines: Mapping[str, Engine]) -> Pipeline:
        """Make the pipeline on these engines.

        Raises:
            ConfigError: A stage does not fit the others or its model; names the file.
        """
        try:
            return Pipeline(
                self.stages,
                name=self.name,
                window=self.window,
                max_requests=self.max_requests,
                items=self.items,
                output=self.output,
                engines=engines,
            )
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None


def read_pipelines(paths: Iterable[str | Path]) -> Sequence[PipelineFile]:
    """Read the files of the pipelines of one server.

    Raises:
        ConfigError: A file cannot be read or something in it is wrong; or two pipelines have one name.
    """
    found: dict[str, PipelineFile] = {}
    for path in map(Path, paths):
        file = read_pipeline(path)
        if file.name in found:
            other = found[file.name].path
            raise ConfigError(f"{path}: name = {file.name!r}: the pipeline of {other} has this name; name them apart")
        found[file.name] = file
    return list(found.values())


def read_pipeline(path: Path) -> PipelineFile:
    """Read the file of a pipeline.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong; names the file, the stage and the key.
    """
    try:
        found = tomllib.loads(foreign_text.text_of(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"pipeline={str(path)!r}: cannot be read ({error.strerror})") from None
    except foreign_text.BadText as error:
        raise ConfigError(f"pipeline={str(path)!r}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    try:
        return _file(path, found)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _file(path: Path, found: dict[str, Any]) -> PipelineFile:
    _check_keys(found, _PIPELINE_KEYS, "")
    tables = found.pop("stage", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("stage: must be tables, each begun by [[stage]], at least one")
    stages = [_stage(number, table) for number, table in enumerate(tables, start=1)]
    check_limits(
        name=found.setdefault("name", path.stem),
        items=found.get("items", "data"),
        window=found.get("window", DEFAULT_WINDOW),
        max_requests=found.get("max_requests", DEFAULT_WINDOW),
    )
    return PipelineFile(path=path, stages=stages, **found)


def _stage(number: int, table: Mapping[str, Any]) -> PipelineStage:
    if "name" not in table:
        raise ConfigError(f'[[stage]] number {number} needs name, such as name = "vectors"')
    _check_keys(table, _STAGE_KEYS, f"stage {table['name']}: ")
    return PipelineStage(**{_STAGE_KEYS[key]: value for key, value in table.items()})


def _check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    for key in given:
        if key not in (names := list(known)):
            near = get_close_matches(key.replace("-", "_"), names, 1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(names)}"
            if key == "function":
                hint = "functions are for programs: staged_pool.Pipeline"
            raise ConfigError(f"{where}{key} is no key; {hint}")


def built_on(engines: Mapping[str, Engine], files: Iterable[PipelineFile]) -> Mapping[str, Pipeline]:
    """Make pipelines on engines, which stages name by served name, folder or hub id.

    Args:
        engines: Engines by served name, those of plugins among them.
        files: The pipelines.

    Raises:
        ConfigError: See `PipelineFile.build`.
    """
    by_source = {
        engine.config.model: engine
        for engine in engines.values()
        if engine.config.model is not None and not engine.card.is_plugin
    }
    return {file.name: file.build({**by_source, **engines}) for file in files}
