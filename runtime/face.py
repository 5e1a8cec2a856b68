"""The Python face of an engine: one method a task, on top of `submit`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

from staged_pool.runtime.requests import (
    DENSE_ONLY,
    Aggregation,
    Chat,
    ClassifyRequest,
    EmbedRequest,
    Output,
    PairInput,
    ScoreRequest,
    TextInput,
    TokenClassifyRequest,
)
from staged_pool.runtime.results import ClassifyResult, EmbedResult, RerankResult, ScoreResult, TokenClassifyResult
from staged_pool.runtime.tasks.score import rank
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.ticket import Timeline
from staged_pool.stages.work import Request

R = TypeVar("R")

Texts: TypeAlias = str | Sequence[str] | Sequence[Sequence[int]]
"""A text, several, or the token ids of several."""


class EngineTasks(ABC):
    """What an engine can be asked for.

    Every method raises `InvalidInput` for what is wrong with its arguments (with the index of the input, where it is
    one), `Unsupported` where the model cannot do the task, and whatever `submit` raises. `timeout_s` bounds the time to
    the result; a deadline of the host's own scopes holds as well. `max_tokens` cuts longer inputs to so many tokens,
    `MODEL_MAX` to what the model takes; None refuses an input that is too long.
    """

    @abstractmethod
    async def submit(
        self,
        decode: Callable[[], Request],
        encode: Callable[[Any], R],
        *,
        body_bytes: int = 0,
        timeout_s: float = math.inf,
        timeline: Timeline | None = None,
    ) -> R:
        """Take one request through the four stages and return its answer."""

    async def embed(
        self,
        inputs: Texts,
        *,
        outputs: Iterable[Output | str] = DENSE_ONLY,
        dimensions: int | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
    ) -> EmbedResult:
        """Vectors of each input.

        Args:
            inputs: Texts, or the token ids of texts.
            outputs: Any of `dense`, `sparse` and `multi_vector` that the model has; all come from one forward.
            dimensions: Keep the first so many values of each dense vector, normalised again; only for models that
                were trained for it.
            normalize: False returns vectors as pooled.
            prompt_name: Put this one of the model's prompts before each text, such as `query`.
            prompt: Put this before each text.
            max_tokens: See the class.
            timeout_s: See the class.

        Returns:
            `embeddings`: float32 [inputs, width]; `sparse`, `multi_vector`; `usage.prompt_tokens`.
        """
        texts = _texts(inputs, max_tokens)
        request = EmbedRequest(
            inputs=texts,
            outputs=frozenset(_output(name) for name in outputs),
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            prompt=prompt,
        )
        result: EmbedResult = await self._ask(request, _bytes(texts), timeout_s)
        return result

    async def classify(
        self,
        inputs: Texts | Sequence[tuple[str, str]],
        *,
        activate: bool = True,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
    ) -> ClassifyResult:
        """How well each of the model's labels fits each input.

        Args:
            inputs: Texts, the token ids of texts, or pairs of texts.
            activate: False returns logits.
            max_tokens: See the class.
            timeout_s: See the class.

        Returns:
            `scores`: float32 [inputs, labels]; `labels`.
        """
        sources = [inputs] if isinstance(inputs, str) else inputs
        given = tuple(
            PairInput(first=source[0], second=source[1], max_tokens=max_tokens)
            if _is_pair(source)
            else _text(index, source, max_tokens)
            for index, source in enumerate(sources)
        )
        request = ClassifyRequest(inputs=given, activate=activate)
        result: ClassifyResult = await self._ask(request, _bytes(given), timeout_s)
        return result

    async def classify_tokens(
        self,
        inputs: Texts,
        *,
        aggregation: Aggregation = "simple",
        activate: bool = True,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
    ) -> TokenClassifyResult:
        """The label of each token, and the entities that tokens spell.

        Args:
            inputs: Texts, or the token ids of texts.
            aggregation: See `TokenClassifyRequest`.
            activate: False returns logits for `scores`.
            max_tokens: See the class.
            timeout_s: See the class.
        """
        texts = _texts(inputs, max_tokens)
        request = TokenClassifyRequest(inputs=texts, aggregation=aggregation, activate=activate)
        result: TokenClassifyResult = await self._ask(request, _bytes(texts), timeout_s)
        return result

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activate: bool = True,
        instruction: str | None = None,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
    ) -> ScoreResult:
        """How well each document answers its query.

        Args:
            queries: One for all documents, or one for each.
            documents: One or several.
            activate: False returns a cross-encoder's logits.
            instruction: What the model is to look for; for models whose template has a place for it.
            max_tokens: Of what the model reads at once: a pair, or one text. See the class.
            timeout_s: See the class.

        Returns:
            `scores`: float32 [documents], higher is better: of a cross-encoder, the cosine of two embeddings, or the
            late interaction of multi-vectors.
        """
        request = ScoreRequest(
            queries=(queries,) if isinstance(queries, str) else tuple(queries),
            documents=(documents,) if isinstance(documents, str) else tuple(documents),
            activate=activate,
            instruction=instruction,
            max_tokens=max_tokens,
        )
        _check_texts(request)
        body_bytes = sum(map(len, request.queries)) + sum(map(len, request.documents))
        result: ScoreResult = await self._ask(request, body_bytes, timeout_s)
        return result

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        activate: bool = True,
        instruction: str | None = None,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
    ) -> RerankResult:
        """Documents in the order of how well they answer a query, the best first.

        Args:
            query: A text.
            documents: One or several.
            top_n: Return so many. None: all of them.
            activate: See `score`.
            instruction: See `score`.
            max_tokens: See `score`.
            timeout_s: See the class.
        """
        if top_n is not None and top_n < 0:
            raise InvalidInput("top_n must be at least 0.", param="top_n")
        result = await self.score(
            query,
            documents,
            activate=activate,
            instruction=instruction,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
        )
        return rank(result, top_n)

    async def _ask(self, request: Request, body_bytes: int, timeout_s: float) -> Any:
        return await self.submit(lambda: request, lambda result: result, body_bytes=body_bytes, timeout_s=timeout_s)


def _texts(inputs: Texts, max_tokens: int | None) -> tuple[TextInput, ...]:
    sources = (inputs,) if isinstance(inputs, str) else inputs
    return tuple(_text(index, source, max_tokens) for index, source in enumerate(sources))


def _text(index: int, source: object, max_tokens: int | None) -> TextInput:
    if isinstance(source, str):
        return TextInput(source, max_tokens)
    if isinstance(source, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in source):
        return TextInput(tuple(source), max_tokens)
    kind = type(source).__name__
    raise InvalidInput(f"Input {index} is a {kind}, not a text or a list of token ids.", param="input", index=index)


def _is_pair(source: object) -> TypeGuard[tuple[str, str]]:
    return isinstance(source, tuple) and len(source) == 2 and all(isinstance(text, str) for text in source)


def _output(name: Output | str) -> Output:
    try:
        return Output(name)
    except ValueError:
        raise InvalidInput(f"outputs must be of {', '.join(Output)}.", param="outputs") from None


def _check_texts(request: ScoreRequest) -> None:
    for name in ("queries", "documents"):
        for index, text in enumerate(getattr(request, name)):
            if not isinstance(text, str):
                kind = type(text).__name__
                raise InvalidInput(f"{name}[{index}] is a {kind}, not a text.", param=name, index=index)


def _bytes(inputs: Sequence[TextInput | PairInput]) -> int:
    """Near enough, and quick: characters, or token ids."""
    return sum(_length(given) for given in inputs)


def _length(given: TextInput | PairInput) -> int:
    if isinstance(given, PairInput):
        return len(given.first) + len(given.second)
    return given.source.characters if isinstance(given.source, Chat) else len(given.source)
