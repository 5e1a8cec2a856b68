"""The methods of sentence-transformers on a pool: `encode`, `predict` and `rank`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from numpy.typing import NDArray

from staged_pool.pool.calls import call_of
from staged_pool.pool.owner import EngineOwner
from staged_pool.runtime.arguments import Inputs
from staged_pool.runtime.card import Role
from staged_pool.runtime.encoding.inputs import Pairs
from staged_pool.runtime.encoding.options import PredictKeywords, RankKeywords, ToArray, ToTensor, ToTensors
from staged_pool.runtime.encoding.predictions import Prediction, RankedDocument, prediction, ranked, ranking
from staged_pool.runtime.encoding.vectors import encoding
from staged_pool.runtime.engine.encode_api import method_for
from staged_pool.runtime.engine.engine import Engine

if TYPE_CHECKING:
    from staged_pool.runtime.encoding.tensors import Tensor


class EncodePool(EngineOwner):
    """Base of `Pool` with the arguments and results of sentence-transformers 6; see `EncodeApi` for the differences."""

    @overload
    def encode(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToArray]) -> NDArray[Any]: ...
    @overload
    def encode(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensor]) -> Tensor: ...
    @overload
    def encode(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensors]) -> list[Tensor]: ...
    def encode(self, inputs: Inputs, *in_order: Any, **keywords: Any) -> Any:
        """Return the vectors of inputs, as `SentenceTransformer.encode`; see `Engine.encode`."""
        return self._encode(inputs, in_order, keywords, None)

    @overload
    def encode_query(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToArray]) -> NDArray[Any]: ...
    @overload
    def encode_query(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensor]) -> Tensor: ...
    @overload
    def encode_query(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensors]) -> list[Tensor]: ...
    def encode_query(self, inputs: Inputs, *in_order: Any, **keywords: Any) -> Any:
        """Return the vectors of queries, with their prompt; see `Engine.encode_query`."""
        return self._encode(inputs, in_order, keywords, "query")

    @overload
    def encode_document(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToArray]) -> NDArray[Any]: ...
    @overload
    def encode_document(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensor]) -> Tensor: ...
    @overload
    def encode_document(self, inputs: Inputs, *in_order: Any, **keywords: Unpack[ToTensors]) -> list[Tensor]: ...
    def encode_document(self, inputs: Inputs, *in_order: Any, **keywords: Any) -> Any:
        """Return the vectors of documents, with their prompt; see `Engine.encode_document`."""
        return self._encode(inputs, in_order, keywords, "document")

    def predict(self, inputs: Pairs, *in_order: Any, **keywords: Unpack[PredictKeywords]) -> Any:
        """Return the scores of pairs of texts, as `CrossEncoder.predict`; see `Engine.predict`."""
        return self._predict(prediction(self.card, inputs, in_order, keywords))

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **keywords: Unpack[RankKeywords],
    ) -> list[RankedDocument]:
        """Order documents by their score for a query, as `CrossEncoder.rank`; see `Engine.rank`."""
        plan = ranking(self.card, query, documents, keywords)
        return ranked(self._predict(plan), plan.pairs, top_k, return_documents=return_documents)

    def _encode(self, inputs: object, in_order: Sequence[Any], keywords: Mapping[str, Any], role: Role | None) -> Any:
        plan = encoding(self.card, inputs, in_order, keywords, role)
        call = call_of(Engine.embed, plan.inputs, plan.embed, progress=plan.shows_progress, may_be_empty=True)
        return plan.finish(self._results(call))

    def _predict(self, plan: Prediction) -> Any:
        call = call_of(method_for(plan), plan.pairs, plan.arguments, progress=plan.shows_progress, may_be_empty=True)
        return plan.finish(self._results(call))
