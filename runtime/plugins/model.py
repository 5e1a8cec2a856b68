"""The model of a plugin's engine: the last hook before the forward, and the forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, cast

import numpy as np

from staged_pool.runtime import arguments
from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Model, ModelInput
from staged_pool.runtime.payloads import ModelRow, Row
from staged_pool.runtime.plugins.call import PluginCall
from staged_pool.runtime.plugins.host import PluginHost
from staged_pool.runtime.plugins.items import BatchKeys, PluginItem, plugin_item, tokens_of
from staged_pool.runtime.plugins.processor import ModelInputs
from staged_pool.runtime.plugins.request import PluginInput, PluginRequest
from staged_pool.runtime.requests import (
    Chat,
    ClassifyRequest,
    EmbedRequest,
    Image,
    Output,
    Outputs,
    TokenClassifyRequest,
)
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.runtime.tasks.embed import normalized
from staged_pool.runtime.tasks.plan import plan as plan_task
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import ConfigError, InvalidInput, PluginFailed, StagedPoolError, TooLarge, Unsupported
from staged_pool.stages.exhausted import is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.user_code import kind_of, user_code
from staged_pool.stages.work import Parts, Plan, Prepared, Request

log = get_logger("staged_pool.plugins")


class _Nothing:
    """Payload and row of a request without model inputs: it passes the batch stage like others."""

    numbers = 0


_NOTHING: Final = _Nothing()


class PluginModel:
    """Runs `preprocess` and the forward of a plugin, for an engine of its own. Thread-safe, as its plugin must be.

    Args:
        host: Host of the plugin.
        base: The served model, which runs the forward if the plugin has none. None: there is none.
        config: Settings of the engine.
        load_s: Seconds in which the plugin was made.

    Raises:
        ConfigError: There is neither a forward nor a model, or the model lacks an output.
    """

    def __init__(self, host: PluginHost, base: Model | None, config: EngineConfig, *, load_s: float = 0.0) -> None:
        self.host = host
        self._base = None if host.runs_forward else base
        self._max_inputs = config.max_request_items
        self._keys = BatchKeys()
        self.card = replace(_card(host, base, config), load_s=load_s)

    def plan(self, ticket: Ticket, request: Request) -> Plan[ModelInput]:
        """Plan a request of the plugin.

        Raises:
            Unsupported: It is a request of another task.
        """
        if not isinstance(request, PluginRequest):
            raise Unsupported(f"`{self.host.name}` is a plugin: it takes data, and no request of another task.")
        call = request.session.begin(ticket)
        given = ModelInput(PluginInput(call, request.data), frozenset())
        return Plan([given], _unused, locate=_locate, finish_async=partial(self._finish, call))

    async def _finish(self, call: PluginCall, rows: Sequence[object], tokens: int) -> Any:
        """Run the hook `postprocess` on the rows of a request."""
        (row,) = rows
        parts = row if isinstance(row, Parts) else [row]
        values = [part.value if isinstance(part, PluginItem) else part for part in parts if part is not _NOTHING]
        hook = self.host.places.hooks.get("postprocess")
        if hook is not None and hook.kind == "awaited":
            async with self.host.finishing:
                return await call.run("postprocess", values)
        return await call.run("postprocess", values)

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[tuple[Prepared[Any], ...] | StagedPoolError]:
        """Run the hook `preprocess`, and prepare the model inputs that it returns."""
        return [self._prepare(cast(PluginInput, given.source)) for given in inputs]

    def _prepare(self, source: PluginInput) -> tuple[Prepared[Any], ...] | StagedPoolError:
        call, hook = source.call, self.host.places.hooks["preprocess"]
        value = source.value if source.is_preprocessed else call.run_here(hook, source.value)
        items, named = call.run_part(hook, lambda: self._taken(value))
        outputs = _outputs(self.host, self._base.card) if self._base is not None else ()
        outputs = named or outputs
        if len(items) > self._max_inputs:
            raise TooLarge(
                f"The plugin `{self.host.name}` makes more than {self._max_inputs} model inputs of this request; that "
                "is the limit.",
                param="data",
            )
        if not items:
            return (Prepared(_NOTHING, 1, _NOTHING),)
        if self._base is not None:
            return self._prepare_for_model(self._base, items, frozenset(outputs))
        return call.run_part(hook, lambda: tuple(map(self._prepared, items)))

    def _taken(self, value: object) -> tuple[list[object], list[Output]]:
        """Return the model inputs that the hook has made, and the outputs that it names."""
        outputs: list[Output] = []
        if isinstance(value, ModelInputs):
            outputs, value = [Output(name) for name in value.outputs], value.inputs
        if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
            raise self._failed("preprocess", f"returned {type(value).__name__}, not a sequence of model inputs")
        return list(islice(value, self._max_inputs + 1)), outputs

    def _prepared(self, item: object) -> Prepared[Any]:
        plugin = self.host.plugin
        tokens, key = getattr(plugin, "tokens", None), getattr(plugin, "batch_key", None)
        return Prepared(
            plugin_item(item),
            tokens_of(item, None if tokens is None else tokens(item)),
            None if key is None else self._keys.number_of(key(item)),
        )

    def _prepare_for_model(
        self, base: Model, items: Sequence[object], outputs: Outputs
    ) -> tuple[Prepared[Any], ...] | StagedPoolError:
        """Prepare inputs of the served model, each in its lane."""
        planned = plan_task(self._request(items, outputs), base.card)
        inputs = [replace(given, may_split=False) for given in planned.inputs]
        prepared: list[Prepared[Any] | None] = [None] * len(inputs)
        for lane in base.card.lanes:
            places = [place for place, given in enumerate(inputs) if given.lane == lane]
            for place, outcome in zip(places, base.preprocess([inputs[place] for place in places]), strict=True):
                if isinstance(outcome, InvalidInput):
                    return outcome.with_prefix(f"model input {place} of the plugin: ")
                if not isinstance(outcome, Prepared):
                    return outcome if isinstance(outcome, StagedPoolError) else self._failed("preprocess", "was cut")
                prepared[place] = replace(outcome, batch_key=(lane, outcome.batch_key), identity=None)
        return tuple(each for each in prepared if each is not None)

    def _request(self, items: Sequence[object], outputs: Outputs) -> Request:
        if any(isinstance(item, Image) and isinstance(item.source, str) for item in items):
            raise self._failed("preprocess", "returned an image by its URL; fetch it in `load`, with `setup.fetch`")
        if outputs == {Output.LABELS}:
            return ClassifyRequest(inputs=arguments.inputs_or_pairs(items, None))
        if outputs == {Output.TOKEN_LABELS}:
            return TokenClassifyRequest(inputs=arguments.text_inputs(items, None))
        return EmbedRequest(inputs=arguments.inputs(items, None), outputs=outputs)

    def forward(self, payloads: Sequence[Any], at_once: int = 1, /) -> Sequence[ModelRow | StagedPoolError]:
        """Run one batch, by the plugin's forward or by the served model's."""
        if payloads[0] is _NOTHING:
            return [_NOTHING] * len(payloads)
        if self._base is not None:
            normalize = self._base.card.normalize
            return [
                as_embedded(row, normalize=normalize) if isinstance(row, Row) else row
                for row in self._base.forward(payloads, at_once)
            ]
        try:
            with user_code():
                made = self.host.plugin.forward([payload.value for payload in payloads])  # type: ignore[attr-defined]
                rows = list(islice(made, len(payloads) + 1))
        except Exception as error:
            if isinstance(error, StagedPoolError) or is_out_of_memory(error):
                raise
            log.error("plugin.failed", plugin=self.host.name, hook="forward", items=len(payloads), exc_info=error)
            raise self._failed("forward", f"failed ({kind_of(error)})") from None
        if len(rows) != len(payloads):
            more = " or more" if len(rows) > len(payloads) else ""
            raise self._failed("forward", f"returned {len(rows)}{more} rows for {len(payloads)} model inputs")
        return [self._row(row) for row in rows]

    def _row(self, row: object) -> PluginItem | StagedPoolError:
        """Return a row with its count of numbers: a row that fails to tell it fails alone."""
        try:
            with user_code():
                return plugin_item(row)
        except Exception as error:
            if isinstance(error, StagedPoolError) or is_out_of_memory(error):
                raise
            log.error("plugin.failed", plugin=self.host.name, hook="forward", items=1, exc_info=error)
            return self._failed("forward", f"returned a row that fails ({kind_of(error)})")

    def _failed(self, hook: str, fault: str) -> PluginFailed:
        name = self.host.name
        return PluginFailed(f"the hook `{hook}` of the plugin `{name}` {fault}", plugin=name, hook=hook)

    def pads(self, lane: Lane) -> bool:
        return self._base is not None and any(map(self._base.pads, self._base.card.lanes))

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        raise Unsupported(f"`{self.host.name}` is a plugin: it has no tokenizer.")

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise Unsupported(f"`{self.host.name}` is a plugin: it has no tokenizer.")

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        return ()

    @property
    def image_cache(self) -> ImageCacheStatistics | None:
        return None

    def clear_image_cache(self) -> None:
        """Do nothing: the served model has the cache."""

    def close(self) -> None:
        """Do nothing: the host closes the plugin."""


def as_embedded(row: Row, *, normalize: bool) -> Row:
    """Return a row with its vectors as `Engine.embed` gives them by default.

    Args:
        row: A row of the served model.
        normalize: Normalise the dense vector, as the model was trained to.
    """
    values = dict(row.values)
    if normalize and isinstance(dense := values.get(Output.DENSE), np.ndarray):
        values[Output.DENSE] = normalized(dense[np.newaxis])[0]
    if isinstance(vectors := values.get(Output.MULTI_VECTOR), np.ndarray):
        values[Output.MULTI_VECTOR] = normalized(vectors)
    return Row(values, row.payload)


def _locate(index: int) -> tuple[str, None]:
    return "data", None


def _unused(rows: Sequence[object], tokens: int) -> object:
    raise RuntimeError("the result of a plugin is awaited")


def _outputs(host: PluginHost, card: ModelCard) -> Sequence[Output]:
    """Return the outputs that a plugin takes from the served model.

    Raises:
        ConfigError: The model lacks one.
    """
    named = getattr(host.plugin, "outputs", ())
    if not named:
        return card.outputs[:1]
    if missing := [name for name in named if name not in card.outputs]:
        has = ", ".join(card.outputs)
        raise ConfigError(f"plugin {host.name!r}: the model `{card.name}` gives no {missing[0]!r}; it gives {has}")
    return [Output(name) for name in named]


def _card(host: PluginHost, base: Model | None, config: EngineConfig) -> ModelCard:
    kind = type(host.plugin)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if host.runs_forward:
        device = base.card.device if base is not None else "cpu"
        return ModelCard(
            name=host.name, architecture=name, parameters=0, lanes=("plugin",), outputs=(), scoring=None, width=0,
            max_tokens=config.max_tokens, vocabulary=0, pooling="plugin", normalize=False, dtype="", device=device,
            attention="", torch_threads=base.card.torch_threads if base is not None else 1, forward_workers=1,
            load_s=0.0, is_plugin=True,
        )  # fmt: skip
    if base is None:
        raise ConfigError(f"plugin {host.name!r}: it has no `forward`, so it needs a model: give one with --model")
    _outputs(host, base.card)
    return replace(base.card, name=host.name, lanes=("plugin",), outputs=(), scoring=None, labels=(), is_plugin=True)
