"""The methods of sentence-transformers on an engine: `encode`, `predict` and `rank`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, overload

import anyio
from numpy.typing import NDArray

from staged_pool.runtime import arguments
from staged_pool.runtime.arguments import Inputs
from staged_pool.runtime.call_options import ScoreOptions
from staged_pool.runtime.card import ModelCard, Role
from staged_pool.runtime.encoding.absent_names import ABSENT_NAMES
from staged_pool.runtime.encoding.inputs import Pairs
from staged_pool.runtime.encoding.options import PredictKeywords, RankKeywords, ToArray, ToTensor, ToTensors
from staged_pool.runtime.encoding.predictions import Prediction, RankedDocument, prediction, ranked, ranking
from staged_pool.runtime.encoding.vectors import encoding
from staged_pool.runtime.engine.engine_api import EngineApi
from staged_pool.runtime.engine.patience import patiently
from staged_pool.runtime.input_ranges import portions, with_input_range
from staged_pool.runtime.own_names import OwnNames
from staged_pool.runtime.progress import reporting
from staged_pool.runtime.requests import Content
from staged_pool.runtime.results import ClassifyResult, ScoreResult
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.offload import Offload

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")

_WINDOW: Final = 4
"""Requests of one call that are in flight at once: the device always has work, and other callers find room."""


class EncodeApi(OwnNames, EngineApi):
    """Methods with the arguments and results of sentence-transformers 6, which are awaited.

    A model of dense vectors follows SentenceTransformer, one of sparse vectors SparseEncoder, and one of several
    vectors MultiVectorEncoder. `predict` and `rank` follow CrossEncoder. A list of any length is divided between
    requests, which wait for room in the engine.

    - `batch_size` and `chunk_size` are checked, and change nothing: the engine batches by itself.
    - Texts that are too long are cut to the model's limit.
    - `timeout_s`, `priority`, `tenant` and `cache_salt` are those of `EngineApi`.
    - A wrong argument raises `InvalidArgument`, which is a `ValueError`.
    """

    _instead = ABSENT_NAMES
    _offload: Offload

    @property
    @abstractmethod
    def card(self) -> ModelCard:
        """Description of the served model."""

    @overload
    async def encode(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToArray]) -> NDArray[Any]: ...
    @overload
    async def encode(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensor]) -> Tensor: ...
    @overload
    async def encode(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensors]) -> list[Tensor]: ...
    async def encode(self, inputs: Inputs, *in_order: Any, **keywords: Any) -> Any:
        """Return the vectors of inputs, as `SentenceTransformer.encode` of sentence-transformers.

        Args:
            inputs: One input, or a list.
            *in_order: `prompt_name`, `prompt`, `batch_size` and `show_progress_bar`, if given by place.
            **keywords: See `EncodeKeywords`; and `convert_to_numpy`, `convert_to_tensor`.

        Returns:
            [width] for one input, else [inputs, width]: an array. `convert_to_tensor`: a tensor. `convert_to_numpy`
            False: a list of tensors.
        """
        return await self._encode(inputs, in_order, keywords, None)

    @overload
    async def encode_query(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToArray]) -> NDArray[Any]: ...
    @overload
    async def encode_query(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensor]) -> Tensor: ...
    @overload
    async def encode_query(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensors]) -> list[Tensor]: ...
    async def encode_query(self, inputs: Inputs, *in_order: Any, **keywords: Any) -> Any:
        """Return the vectors of queries: with the prompt `query`, unless another one is given. See `encode`."""
        return await self._encode(inputs, in_order, keywords, "query")

    @overload
    async def encode_document(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToArray]) -> NDArray[Any]: ...
    @overload
    async def encode_document(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensor]) -> Tensor: ...
    @overload
    async def encode_document(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensors]) -> list[Tensor]: ...
    async def encode_document(self, inputs: Inputs, *in_order: Any, **keywords: Any) -> Any:
        """Return the vectors of documents: with the prompt `document`, unless another one is given. See `encode`."""
        return await self._encode(inputs, in_order, keywords, "document")

    async def predict(self, inputs: Pairs, *in_order: Any, **keywords: Unpack[PredictKeywords]) -> Any:
        """Return the scores of pairs of texts, as `CrossEncoder.predict` of sentence-transformers.

        Args:
            inputs: A pair of a query and a document, or a list of pairs.
            *in_order: As for `encode`.
            **keywords: See `PredictKeywords`. `activation_fn` takes and returns a tensor of logits.

        Returns:
            A number for one pair, else float32 [pairs]; [pairs, labels] if the model has several labels. The scores of
            several labels are logits.
        """
        return await self._predict(prediction(self.card, inputs, in_order, keywords))

    async def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **keywords: Unpack[RankKeywords],
    ) -> list[RankedDocument]:
        """Order documents by their score for a query, as `CrossEncoder.rank` of sentence-transformers.

        Args:
            query: The query.
            documents: Texts.
            top_k: Number of documents to return. None: all.
            return_documents: Return the texts, too.
            **keywords: See `RankKeywords`.
        """
        plan = ranking(self.card, query, documents, keywords)
        return ranked(await self._predict(plan), plan.pairs, top_k, return_documents=return_documents)

    async def _encode(
        self, inputs: object, in_order: Sequence[Any], keywords: Mapping[str, Any], role: Role | None
    ) -> Any:
        plan = encoding(self.card, inputs, in_order, keywords, role)
        parts = await _in_requests(self.embed, plan.inputs, plan.embed, progress=plan.shows_progress)
        return await self._offload(plan.finish, parts)

    async def _predict(self, plan: Prediction) -> Any:
        method = partial(method_for(plan), self)
        parts = await _in_requests(method, plan.pairs, plan.arguments, progress=plan.shows_progress)
        return await self._offload(plan.finish, parts)


def method_for(plan: Prediction) -> Callable[..., Awaitable[ScoreResult | ClassifyResult]]:
    """Return the method that scores the pairs of a call of `predict`: its arguments are an engine and pairs."""
    return EngineApi.classify if plan.by_label else score_pairs


async def score_pairs(
    engine: EngineApi, pairs: Sequence[tuple[Content, Content]], **options: Unpack[ScoreOptions]
) -> ScoreResult:
    """Score pairs of a query and a document; see `EngineApi.score`."""
    queries, documents = zip(*arguments.pairs(pairs), strict=True)
    return await engine.score(queries, documents, **options)


async def _in_requests(
    method: Callable[..., Awaitable[R]], inputs: Sequence[Any], options: Mapping[str, Any], *, progress: bool
) -> list[R]:
    """Return the results of all requests of a call, in the order of the inputs; none without inputs.

    Args:
        method: Method of the engine.
        inputs: Inputs of the call.
        options: Its other arguments. A `timeout_s` is that of the whole call.
        progress: Show a bar.

    Raises:
        StagedPoolError: A request failed; the error names its inputs.
    """
    timeout_s = options.get("timeout_s", math.inf)
    arguments.time_limit(timeout_s)
    ends_at = anyio.current_time() + timeout_s
    left, found, errors = portions(inputs, may_be_empty=True), dict[int, R](), list[StagedPoolError]()

    async def work(advance: Callable[[int], None], tasks: anyio.CancelScope) -> None:
        for portion in left:
            ask = partial(_ask, method, portion.inputs, options)
            try:
                found[portion.first] = await patiently(ask, ends_at - anyio.current_time())
            except StagedPoolError as error:
                # Not raised: a task group would wrap it, but the caller catches it by its class.
                errors.append(with_input_range(error, portion.range, len(inputs)))
                tasks.cancel()
                return
            advance(portion.range.count)

    with reporting(progress, len(inputs)) as advance:
        async with anyio.create_task_group() as tasks:
            for _ in range(min(_WINDOW, len(inputs))):
                tasks.start_soon(work, advance, tasks.cancel_scope)
    if errors:
        raise errors[0]
    return [found[first] for first in sorted(found)]


def _ask(
    method: Callable[..., Awaitable[R]], inputs: Sequence[Any], options: Mapping[str, Any], timeout_s: float
) -> Awaitable[R]:
    return method(inputs, **{**options, "timeout_s": timeout_s})
