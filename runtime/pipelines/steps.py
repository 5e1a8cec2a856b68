"""The work of each kind of stage on one item."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime import arguments
from staged_pool.runtime.engine.waiting_engine import WaitingEngine
from staged_pool.runtime.pipelines.declaration import PipelineStage
from staged_pool.runtime.pipelines.items import Embedding, Labelled
from staged_pool.runtime.pipelines.parts import Expansion
from staged_pool.runtime.plugins.hooks import is_async
from staged_pool.runtime.requests import Chat, Image
from staged_pool.runtime.tasks import zero_shot
from staged_pool.runtime.tasks.embed import normalized
from staged_pool.runtime.tasks.score import max_sim
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.offload import Offload
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.user_code import user_code

T = TypeVar("T")

VANISHED: Final = object()
"""Value of an item that a function lets vanish."""


class StepContext(Protocol):
    """The request of an item, for the work on it."""

    @property
    def priority(self) -> Priority: ...

    @property
    def tenant(self) -> Hashable: ...

    def left_s(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            DeadlineExceeded: It has passed.
        """
        ...

    def count_tokens(self, tokens: int) -> None:
        """Add tokens to those that the request has used."""

    async def once(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """Return what `make` gives, which runs once for all items of the request."""
        ...


class Step(ABC):
    """The work of one stage."""

    @abstractmethod
    async def run(self, inputs: Sequence[object], context: StepContext) -> object:
        """Return the value of an item; of a stage that expands, its parts.

        It runs inside the boundary to user code: functions, and whatever an input does that a caller has made.

        Raises:
            StagedPoolError: The work failed.
        """


class EngineStep(Step):
    """A task of an engine."""

    def __init__(self, stage: PipelineStage, engine: WaitingEngine) -> None:
        self.stage = stage
        self.engine = engine


class EmbedStep(EngineStep):
    """The task `embed`."""

    is_document = False
    """True if the items are documents, for which a later stage has a query."""

    async def run(self, inputs: Sequence[object], context: StepContext) -> Embedding:
        """See `Step.run`."""
        name = self.stage.prompt_name or ("document" if self.is_document else None)
        return await self.embed(inputs[0], name, context)

    async def embed(self, content: Any, prompt_name: str | None, context: StepContext) -> Embedding:
        """Embed one input with the outputs of the stage."""
        result = await self.engine.embed(
            [content],
            outputs=self.stage.outputs,
            dimensions=self.stage.dimensions,
            max_active_dims=self.stage.max_active_dims,
            prompt_name=prompt_name,
            max_tokens=self.stage.max_tokens,
            timeout_s=context.left_s(),
            priority=context.priority,
            tenant=context.tenant,
        )
        context.count_tokens(result.usage.prompt_tokens)
        return Embedding(
            dense=None if result.dense is None else result.dense[0],
            sparse=None if result.sparse is None else result.sparse[0],
            multi_vector=None if result.multi_vector is None else result.multi_vector[0],
            token_weights=None if result.token_weights is None else result.token_weights[0],
        )


class ScoreStep(EngineStep):
    """The task `score`: the inputs are a query and a document."""

    async def run(self, inputs: Sequence[Any], context: StepContext) -> float:
        """See `Step.run`."""
        query, document = inputs
        result = await self.engine.score(
            query,
            [document],
            max_tokens=self.stage.max_tokens,
            timeout_s=context.left_s(),
            priority=context.priority,
            tenant=context.tenant,
        )
        context.count_tokens(result.usage.prompt_tokens)
        return float(result.scores[0])


class MaxSimStep(Step):
    """The task `maxsim`: the inputs are a query, and the multi-vector of a document.

    Args:
        embeds: Embeds queries. None: they are vectors already.
        offload: Runs the products.
    """

    def __init__(self, embeds: EmbedStep | None, offload: Offload) -> None:
        self.embeds = embeds
        """See the class. Also set when the stage before is known."""
        self._offload = offload

    async def run(self, inputs: Sequence[object], context: StepContext) -> float:
        """See `Step.run`."""
        query, document = inputs
        if isinstance(query, str | Image | Chat):
            query = await context.once(self, lambda: self._embedded(query, context))
        both = (_multi_vector(query, "query"), _multi_vector(document, "document"))
        return await self._offload(_max_sim, both)

    async def _embedded(self, query: object, context: StepContext) -> Embedding:
        if self.embeds is None:
            raise InvalidInput("The query must be vectors: the pipeline has no model for it.", param="query")
        return await self.embeds.embed(query, "query", context)


def _max_sim(pair: tuple[NDArray[np.float32], NDArray[np.float32]]) -> float:
    query, document = pair
    return max_sim(normalized(query), normalized(document))


def _multi_vector(value: object, what: str) -> NDArray[np.float32]:
    vectors = value.multi_vector if isinstance(value, Embedding) else value
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2:
        raise InvalidInput(f"maxsim: the {what} has no multi_vector, but is of type {type(value).__name__}.")
    return vectors


class ClassifyStep(EngineStep):
    """The task `classify`: the inputs are a content, and candidate labels if a source has them."""

    labels_are_of_request = False
    """True if a field of the request has the labels: they are checked once, and wrong ones fail the request."""

    async def run(self, inputs: Sequence[Any], context: StepContext) -> Labelled:
        """See `Step.run`."""
        content, *given = inputs
        labels = self.stage.candidate_labels
        if given and self.labels_are_of_request:
            labels = await context.once(self, lambda: self._of_request(given[0]))
        elif given:
            labels = self._checked(given[0])
        result = await self.engine.classify(
            [content],
            candidate_labels=labels,
            hypothesis_template=self.stage.hypothesis_template,
            multi_label=self.stage.multi_label,
            max_tokens=self.stage.max_tokens,
            timeout_s=context.left_s(),
            priority=context.priority,
            tenant=context.tenant,
        )
        context.count_tokens(result.usage.prompt_tokens)
        best = int(result.best[0])
        scores = dict(zip(result.labels, map(float, result.scores[0]), strict=True))
        return Labelled(label=result.labels[best], score=float(result.scores[0, best]), scores=scores)

    async def _of_request(self, given: object) -> Sequence[str]:
        try:
            return self._checked(given)
        except InvalidInput as error:
            raise error.with_prefix(f"Stage {self.stage.name}: ") from None

    def _checked(self, given: object) -> Sequence[str]:
        labels = arguments.candidate_labels(given)
        if labels is None:  # the engine would choose among the labels of its model
            message = "The labels are null; expected texts, or one text with commas between the labels."
            raise InvalidInput(message, param="candidate_labels")
        zero_shot.check(labels, self.stage.hypothesis_template)
        return labels


class PluginStep(EngineStep):
    """The hooks of a plugin.

    Args:
        stage: The stage.
        engine: Engine of the plugin.
        expansion: Takes the parts of its values. None: it does not expand.
    """

    def __init__(self, stage: PipelineStage, engine: WaitingEngine, expansion: Expansion | None) -> None:
        super().__init__(stage, engine)
        self._expansion = expansion

    async def run(self, inputs: Sequence[object], context: StepContext) -> object:
        """See `Step.run`."""
        value = await self.engine.submit_data(
            lambda: inputs[0],
            lambda output: output,
            timeout_s=context.left_s(),
            priority=context.priority,
            tenant=context.tenant,
        )
        return value if self._expansion is None else await self._expansion.of(value)


class FunctionStep(Step):
    """A function: plain ones run in threads, and async ones are awaited.

    Args:
        function: The function.
        offload: Runs plain functions.
        expansion: Takes the parts of its values. None: it does not expand.
    """

    def __init__(self, function: Callable[..., Any], offload: Offload, expansion: Expansion | None) -> None:
        self._function = function
        self._is_async = is_async(function)
        self._offload = offload
        self._expansion = expansion

    async def run(self, inputs: Sequence[object], context: StepContext) -> object:
        """See `Step.run`. Every error of the function passes."""
        expansion = self._expansion
        if self._is_async:
            value = await self._function(*inputs)
            if expansion is not None and value is not None:
                return await expansion.of(value)
        else:
            value = await self._offload(self._call, inputs)
            if expansion is not None and value is not None:
                return await expansion.rest(value)
        return VANISHED if value is None else value

    def _call(self, inputs: Sequence[object]) -> Any:
        """Run a plain function, and what its value yields, in a thread."""
        with user_code():
            value = self._function(*inputs)
            return value if self._expansion is None or value is None else self._expansion.in_thread(value)
