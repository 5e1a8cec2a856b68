"""Routes of pipelines: `POST /pipelines/NAME`, and the list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from staged_pool.api.app.body_reader import BodyReader
from staged_pool.api.app.call import Answer, Call, Handler
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.openapi.pipelines import PIPELINES, path_of
from staged_pool.api.wire import pipelines as wire
from staged_pool.api.wire.chunked_json import dump
from staged_pool.runtime.engine.engine_stages import POSTPROCESS_WORKERS
from staged_pool.runtime.pipelines.pipeline import Pipeline
from staged_pool.stages.offload import ThreadOffload


class PipelineRoutes:
    """Handlers of the pipelines of one server.

    Args:
        registry: Has the pipelines, once their models are loaded.
        bodies: Reads bodies.
        names: Names of the pipelines.
    """

    def __init__(self, registry: EngineRegistry, bodies: BodyReader, names: Sequence[str]) -> None:
        self._registry = registry
        self._bodies = bodies
        self._names = names
        self._writers = ThreadOffload(POSTPROCESS_WORKERS)

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        if not self._names:
            return {}
        return {
            PIPELINES: {"GET": self._list},
            **{path_of(name): {"POST": partial(self._answer, name)} for name in self._names},
        }

    async def _list(self, call: Call) -> Answer:
        pipelines = [self._registry.enter_pipeline(name) for name in self._names]
        entries = [
            {
                "name": pipeline.name,
                "items": pipeline.items,
                "fields": pipeline.fields,
                "stages": [stage.name for stage in pipeline.stages],
            }
            for pipeline in pipelines
        ]
        return Answer(dump({"pipelines": entries}))

    async def _answer(self, name: str, call: Call) -> Answer:
        pipeline = self._registry.enter_pipeline(name)
        body = await self._bodies.json(call)
        timeout_s, priority = call.timeout_s(), call.priority()
        data = await self._bodies.read(wire.read_request, body)
        if call.wants_lines:
            return await self._stream(pipeline, call, data)
        with call.answer.another(self._registry.outcomes) as outcomes:  # the bytes count from the end of the block on
            result = await pipeline.submit(
                data, timeout_s=timeout_s, priority=priority, tenant=call.tenant, trace=call.trace, answer=outcomes
            )
            write = partial(wire.encode_result, pipeline=name, request_id=call.request_id)
            return Answer(await self._writers(write, result), headers=[(b"server-timing", wire.timing(result.stage_s))])

    async def _stream(self, pipeline: Pipeline, call: Call, data: Mapping[str, object]) -> Answer:
        """Send outcomes line by line, and return the last line, with the usage."""
        if call.lines is None:
            raise RuntimeError("only a request with a handler can be streamed")
        write = partial(wire.encode_lines, pipeline=pipeline.name)
        how = pipeline.stream(
            data,
            timeout_s=call.timeout_s(),
            priority=call.priority(),
            tenant=call.tenant,
            trace=call.trace,
            answer=call.answer.another(self._registry.outcomes),
        )
        async with how as outcomes:
            async for outcome in outcomes:
                line = await self._writers(write, (outcome,))
                call.answer.encoded(len(line))
                await call.lines.give(line)
        tokens = outcomes.usage.prompt_tokens
        return Answer(wire.encode_last(tokens, pipeline=pipeline.name, request_id=call.request_id))
