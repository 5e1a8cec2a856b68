"""Work on the lines of batches by engines of this process, as routes do it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from functools import partial

from staged_pool.api import status
from staged_pool.api.app.body_reader import BodyReader
from staged_pool.api.app.dialects import error_format_of
from staged_pool.api.app.engine_choice import no_model, no_route
from staged_pool.api.app.engine_finder import EngineFinder
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.tasks import Task, tasks
from staged_pool.api.bulk.batch_lines import NOT_JSON, BatchAnswer, BatchAnswers, BatchLine
from staged_pool.api.bulk.patience import until_admitted
from staged_pool.api.status import Problem
from staged_pool.api.wire.chunked_json import size_of
from staged_pool.api.wire.exchange import JSON, Exchange, Written
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.errors import ENGINE_WORDS, DeviceLost, EngineStopped, Overloaded
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import ThreadOffload
from staged_pool.stages.scheduling.entries import Priority

log = get_logger("staged_pool.bulk")


class BatchWork:
    """Answers lines of batches with bulk priority.

    Args:
        registry: The engines.
        answers: Makes the lines of the output.
        auto_truncate: See `ServerConfig`.
        tenant: Owner of the requests.
    """

    def __init__(
        self, registry: EngineRegistry, answers: BatchAnswers, *, auto_truncate: bool, tenant: Hashable = None
    ) -> None:
        self._registry = registry
        self._answers = answers
        self._bodies = BodyReader(registry, ThreadOffload(1))
        self._finder = EngineFinder(registry, self._bodies)
        self._tasks = tasks(auto_truncate=auto_truncate)
        self._tenant = tenant
        self._party = ("batch", tenant)  # not the tenant's own: its interactive requests would find no room

    async def do(self, lines: Sequence[BatchLine]) -> Sequence[BatchAnswer]:
        """Answer lines one after the other; see `Work.do`.

        Raises:
            EngineStopped: The engine takes no requests.
            DeviceLost: The device of the engine does not answer.
        """
        answers: list[BatchAnswer] = []
        try:
            for line in lines:
                answers.append(await self._answer(line))  # noqa: PERF401 - those before an error are given back
        except BaseException:
            for answer in answers:
                answer.give_back()
            raise
        return answers

    async def _answer(self, line: BatchLine) -> BatchAnswer:
        if line.fault is not None:
            return self._answers.refused(line, line.fault)
        error_format = error_format_of(line.url)
        task = self._tasks.get(line.url)
        if task is None:
            return self._answers.answered(line, *error_format(no_route("POST", line.url, list(self._tasks))))
        theirs = None if task.error_format_of is None else await self._bodies.peek(task.error_format_of, line.body)
        if theirs is not None:
            error_format = theirs
        with ExitStack() as stack:
            memory = AnswerMemory(self._registry.answers, self._party, is_written=True, is_patient=True)
            stack.enter_context(memory)
            outcome = await until_admitted(partial(self._submit, task, line, memory), memory)
            if isinstance(outcome, Problem):
                return self._answers.answered(line, *error_format(outcome))
            if outcome.content_type != JSON:
                return self._answers.refused(line, NOT_JSON)
            memory.encoded(size_of(outcome.content))
            answer = self._answers.answered(line, 200, outcome.content, memory=memory)
            stack.pop_all()  # the answer has it now, until it is written
            return answer

    async def _submit(self, task: Task, line: BatchLine, memory: AnswerMemory) -> Written | Problem:
        """Take the request of a line through the stages. A problem is its own; other errors are raised."""
        words, engines = ENGINE_WORDS, self._registry.engines
        try:
            if not any(task.has_path(engine.card) for engine in engines):
                return no_model(task, engines).problem
            await self._bodies.check_bounds(line.body, None)
            task = await self._finder.task_of(task, line.body)
            engine = await self._finder.find(task, line.body)
            if task.immediate is not None and (immediate := task.immediate(line.body)) is not None:
                return Written(immediate)
            request_id = self._answers.request_id(line)
            exchange = Exchange(task.read, line.body, engine.card, request_id, self._registry.limits)
            try:
                return await engine.submit(
                    exchange.decode,
                    exchange.encode,
                    body_bytes=len(line.body),
                    priority=Priority.BULK,
                    tenant=self._tenant,
                    images=task.shown_images(engine.card, line.body, JSON),
                    answer=memory,
                )
            finally:
                words = exchange.words
        except (Overloaded, EngineStopped, DeviceLost):
            raise  # the line is not at fault
        except Exception as error:
            problem = status.problem(error, words)
            if problem.kind is status.UNEXPECTED:
                log.exception("batch.line_crashed", url=line.url, line=line.number + 1)
            return problem
