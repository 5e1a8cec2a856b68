"""Models that pipelines name, beside those that the user has given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from staged_pool.api.commands.given import Given, Source
from staged_pool.runtime.config import OF_ONE_MODEL


class NamesModels(Protocol):
    """A pipeline whose models are not loaded yet."""

    @property
    def models(self) -> Mapping[str, str]: ...


def with_models_of(pipelines: Iterable[NamesModels], given: Sequence[Given]) -> Sequence[Given]:
    """Return the settings of all models to load.

    A stage names a served model, by its name, folder or hub id. What nobody has given is a folder or hub id to load, by
    the settings that hold for all models. Without `--model`, only the models of pipelines are loaded.

    Args:
        pipelines: The pipelines.
        given: Settings of each model that the user has given; at least one.
    """
    wanted: dict[str, str] = {}
    for pipeline in pipelines:
        wanted = {**pipeline.models, **wanted}
    if not wanted:
        return given
    names_none = len(given) == 1 and not {"model", "plugin"} & given[0].values.keys()
    models = [] if names_none else list(given)
    known = {name for each in models for name in _names(each)}
    shared = {key: value for key, value in given[0].values.items() if key not in OF_ONE_MODEL}
    sources = {key: source for key, source in given[0].sources.items() if key in shared}
    return models + [
        Given(values={**shared, "model": name}, sources={**sources, "model": Source("file", place)})
        for name, place in wanted.items()
        if name not in known
    ]


def _names(given: Given) -> Iterable[str]:
    """Yield the names by which a stage may mean a given model."""
    if (model := given.values.get("model")) is not None:
        yield model
        folder = Path(model).expanduser()
        yield given.values.get("served_name") or (folder.resolve().name if folder.exists() else model)
