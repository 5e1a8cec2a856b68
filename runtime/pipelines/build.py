"""Building of pipelines: stages with their inputs and engines, all checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.waiting_engine import WaitingEngine
from staged_pool.runtime.pipelines.declaration import QUERY, PipelineStage
from staged_pool.runtime.pipelines.meter import PipelineStageMeter
from staged_pool.runtime.pipelines.parts import Expansion
from staged_pool.runtime.pipelines.references import ITEM, REQUEST, Reference, reference
from staged_pool.runtime.pipelines.steps import (
    ClassifyStep,
    EmbedStep,
    EngineStep,
    FunctionStep,
    MaxSimStep,
    PluginStep,
    ScoreStep,
    Step,
)
from staged_pool.runtime.pipelines.window import Window
from staged_pool.runtime.requests import Output
from staged_pool.runtime.tasks.zero_shot import entailment
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.offload import Offload


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """A stage that is ready to run."""

    declared: PipelineStage
    inputs: tuple[Reference, ...]
    step: Step
    window: Window
    meter: PipelineStageMeter

    @property
    def name(self) -> str:
        return self.declared.name


def build_stages(
    declared: Sequence[PipelineStage | Callable[..., Any]],
    engines: Mapping[str, Engine],
    *,
    window: int,
    offload: Offload,
) -> list[BuiltStage]:
    """Build the stages of a pipeline.

    Args:
        declared: The stages, in order. A function stands for a stage of its name.
        engines: Engines by name, for stages that name theirs.
        window: Most items in a stage that does not say.
        offload: Runs plain functions.

    Raises:
        ConfigError: A stage is wrong, or does not fit the others or its model.
    """
    built: list[BuiltStage] = []
    for given in declared:
        stage = _as_stage(given)
        if stage.name in (earlier.name for earlier in built):
            raise ConfigError(f"stage {stage.name}: two stages have this name; name them apart")
        step = _step(stage, engines, offload)
        inputs = _inputs(stage, built)
        if isinstance(step, MaxSimStep):
            step.embeds = _query_embedder(stage, inputs[1], built, step)
        if isinstance(step, ClassifyStep):
            step.labels_are_of_request = len(inputs) > 1 and inputs[1].source == REQUEST
        limit = stage.window or window
        built.append(BuiltStage(stage, inputs, step, Window(stage.name, limit), PipelineStageMeter()))
    if not built:
        raise ConfigError("a pipeline needs at least one stage")
    return built


def _as_stage(given: object) -> PipelineStage:
    if isinstance(given, PipelineStage):
        return given
    if isinstance(given, Engine):
        raise ConfigError('an engine is no stage by itself: write PipelineStage("vectors", engine=engine)')
    if callable(given):
        return PipelineStage(getattr(given, "__name__", type(given).__name__), function=given)
    raise ConfigError(f"a stage must be a PipelineStage or a function, not of type {type(given).__name__}")


def _inputs(stage: PipelineStage, earlier: Sequence[BuiltStage]) -> tuple[Reference, ...]:
    """Return the references of the inputs of a stage."""
    known = dict.fromkeys((ITEM, REQUEST, *(each.name for each in earlier)))
    before = earlier[-1].name if earlier else ITEM
    compares, labels = stage.kind in ("score", "maxsim"), stage.kind == "classify"
    sources = stage.sources or ((QUERY, before) if compares else (before,))
    if stage.kind != "function" and not 1 + compares <= len(sources) <= 1 + (compares or labels):
        what = "a query and an item" if compares else "one input, and candidate labels" if labels else "one input"
        raise ConfigError(f"{stage.where('source')} = {list(sources)}: the task {stage.kind} takes {what}")
    return tuple(reference(source, known, stage.where("source")) for source in sources)


def _step(stage: PipelineStage, engines: Mapping[str, Engine], offload: Offload) -> Step:
    kind = stage.kind
    expansion = Expansion(stage, offload) if stage.expand else None
    if stage.function is not None:
        return FunctionStep(stage.function, offload, expansion)
    if kind == "plugin":
        return PluginStep(stage, _plugin_engine(stage, engines), expansion)
    engine = None if stage.engine is None else WaitingEngine(_engine(stage, stage.engine, engines))
    if kind == "maxsim":
        embeds = None if engine is None else EmbedStep(_of_queries(stage), engine)
        return MaxSimStep(embeds, offload)
    assert engine is not None, "checked by the stage"
    _check_card(stage, engine)
    steps: dict[str, type[EngineStep]] = {"embed": EmbedStep, "score": ScoreStep, "classify": ClassifyStep}
    return steps[kind](stage, engine)


def _engine(stage: PipelineStage, given: Engine | str, engines: Mapping[str, Engine]) -> Engine:
    if isinstance(given, Engine):
        return given
    if given not in engines:
        raise ConfigError(f"{stage.where('engine')} = {given!r}: {_unknown(given, 'model', engines)}")
    return engines[given]


def _plugin_engine(stage: PipelineStage, engines: Mapping[str, Engine]) -> WaitingEngine:
    name = stage.plugin or ""
    plugins: Mapping[str, Any] = engines
    if stage.engine is not None:
        plugins = _engine(stage, stage.engine, engines).plugins
    elif name not in plugins:
        plugins = {name: engine for of in engines.values() for name, engine in of.plugins.items()}
    if not isinstance(engine := plugins.get(name), Engine):
        raise ConfigError(f"{stage.where('plugin')} = {name!r}: {_unknown(name, 'plugin', plugins)}")
    return WaitingEngine(engine)


def _unknown(name: str, what: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, 1)
    served = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
    return f"no {what} of this name is served; {served}"


def _check_card(stage: PipelineStage, engine: WaitingEngine) -> None:
    """Reject a task that the model cannot do."""
    card = engine.card
    if stage.kind == "embed":
        wanted = [stage.outputs] if isinstance(stage.outputs, str) else list(stage.outputs)
        vectors = [output for output in card.outputs if output not in (Output.LABELS, Output.TOKEN_LABELS)]
        if missing := [output for output in wanted if output not in vectors]:
            has = ", ".join(vectors) or "none that embed gives"
            raise ConfigError(
                f"{stage.where('outputs')} = {missing}: the outputs of the model `{card.name}` are: {has}"
            )
        most = card.max_active_dims
        if most is not None and stage.max_active_dims is not None and stage.max_active_dims > most:
            where = f"{stage.where('max_active_dims')} = {stage.max_active_dims}"
            raise ConfigError(f"{where}: the folder of the model `{card.name}` keeps {most} weights")
    if stage.kind == "classify" and Output.LABELS not in card.outputs:
        raise ConfigError(f"{stage.where('task')} = 'classify': the model `{card.name}` gives no labels")
    if stage.has_labels and entailment(card) is None:
        key = "source" if stage.candidate_labels is None else "candidate_labels"
        raise ConfigError(
            f"{stage.where(key)}: the model `{card.name}` cannot choose among candidate labels; that needs a "
            "classifier of natural language inference, with a label that begins with `entail`"
        )
    if stage.kind == "score" and card.scoring is None:
        raise ConfigError(f"{stage.where('task')} = 'score': the model `{card.name}` cannot score")


def _query_embedder(
    stage: PipelineStage, vectors: Reference, earlier: Sequence[BuiltStage], step: MaxSimStep
) -> EmbedStep | None:
    """Return what embeds the query of a `maxsim`: its own model, or that of the stage whose vectors it compares."""
    source = next((each.step for each in earlier if each.name == vectors.source), None)
    if not isinstance(source, EmbedStep):
        return step.embeds
    if Output.MULTI_VECTOR not in source.stage.outputs:
        where = source.stage.where("outputs")
        raise ConfigError(f'{where}: stage {stage.name} compares multi-vectors; write outputs = ["multi_vector"]')
    source.is_document = True
    return step.embeds or source


def _of_queries(stage: PipelineStage) -> PipelineStage:
    return PipelineStage(stage.name, engine=stage.engine, outputs=[Output.MULTI_VECTOR])
