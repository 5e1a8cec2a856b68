"""The Python face of an engine: one method a task, on top of `submit`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from staged_pool.runtime import arguments
from staged_pool.runtime.arguments import Inputs, Texts
from staged_pool.runtime.requests import (
    DENSE_ONLY,
    Aggregation,
    ClassifyRequest,
    Content,
    EmbedRequest,
    Output,
    ScoreRequest,
    TokenClassifyRequest,
    content_bytes,
)
from staged_pool.runtime.results import ClassifyResult, EmbedResult, RerankResult, ScoreResult, TokenClassifyResult
from staged_pool.runtime.tasks.score import check_top_n, rank
from staged_pool.stages.rows import RowStream
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.timeline import Timeline
from staged_pool.stages.work import Request

R = TypeVar("R")


class EngineApi(ABC):
    """What an engine can be asked for.

    Every method raises `InvalidInput` for what is wrong with its arguments (with the index of the input, where it is
    one), `Unsupported` where the model cannot do the task, and whatever `submit` raises. `timeout_s` bounds the time to
    the result, in seconds, and raises `DeadlineExceeded`; a deadline of the host's own scope cancels, as it does
    everywhere, and raises nothing of the engine's. `max_tokens` cuts longer inputs to so many tokens,
    `MODEL_MAX` to what the model takes; None refuses an input that is too long. `priority` is `interactive` or `bulk`:
    bulk work gets what interactive work leaves of the device, and an eighth of it at least. `tenant` says for whom a
    host asks, by any hashable value: tenants share the device fairly, however many requests each has. Results and
    prepared images are shared only among requests of one tenant (those that are kept: of all tenants, with
    `share_between_tenants`) and of one `cache_salt`, a text of 1 to 1024 characters; None is shared with None.
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
        priority: Priority = Priority.INTERACTIVE,
        tenant: Hashable = None,
        stream: RowStream | None = None,
    ) -> R:
        """Take one request through the four stages and return its answer."""

    async def embed(
        self,
        inputs: Inputs,
        *,
        outputs: Output | str | Iterable[Output | str] = DENSE_ONLY,
        dimensions: int | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        cache_salt: str | None = None,
    ) -> EmbedResult:
        """Vectors of each input.

        Args:
            inputs: Texts, the token ids of texts, images, or conversations, which may show some.
            outputs: Any of `dense`, `sparse`, `multi_vector` and `token_weights` that the model has; all come from one
                forward.
            dimensions: Keep the first so many values of each dense vector, normalised again; only for models that
                were trained for it.
            normalize: False returns vectors as pooled.
            prompt_name: Put this one of the model's prompts before each text, such as `query`.
            prompt: Put this before each text.
            max_tokens: See the class.
            timeout_s: See the class.
            priority: See the class.
            tenant: See the class.
            cache_salt: See the class.

        Returns:
            `embeddings`: float32 [inputs, width]; `sparse`, `multi_vector`, `token_weights`; `usage.prompt_tokens`.
        """
        arguments.whole_number("dimensions", dimensions)
        arguments.text("prompt_name", prompt_name)
        arguments.text("prompt", prompt)
        given = arguments.inputs(inputs, max_tokens)
        request = EmbedRequest(
            cache_salt=arguments.cache_salt(cache_salt),
            inputs=given,
            outputs=arguments.outputs(outputs),
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            prompt=prompt,
        )
        result: EmbedResult = await self._ask(request, arguments.size(given), timeout_s, priority, tenant)
        return result

    async def classify(
        self,
        inputs: Inputs | Sequence[tuple[str, str]],
        *,
        activate: bool = True,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        cache_salt: str | None = None,
    ) -> ClassifyResult:
        """How well each of the model's labels fits each input.

        Args:
            inputs: Texts, the token ids of texts, images, conversations, or pairs of texts.
            activate: False returns logits.
            max_tokens: See the class.
            timeout_s: See the class.
            priority: See the class.
            tenant: See the class.
            cache_salt: See the class.

        Returns:
            `scores`: float32 [inputs, labels]; `labels`.
        """
        given = arguments.inputs_or_pairs(inputs, max_tokens)
        request = ClassifyRequest(inputs=given, activate=activate, cache_salt=arguments.cache_salt(cache_salt))
        result: ClassifyResult = await self._ask(request, arguments.size(given), timeout_s, priority, tenant)
        return result

    async def classify_tokens(
        self,
        inputs: Texts,
        *,
        aggregation: Aggregation = "simple",
        activate: bool = True,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        cache_salt: str | None = None,
    ) -> TokenClassifyResult:
        """The label of each token, and the entities that tokens spell.

        Args:
            inputs: Texts, or the token ids of texts.
            aggregation: See `TokenClassifyRequest`.
            activate: False returns logits for `scores`.
            max_tokens: See the class.
            timeout_s: See the class.
            priority: See the class.
            tenant: See the class.
            cache_salt: See the class.
        """
        texts = arguments.text_inputs(inputs, max_tokens)
        request = TokenClassifyRequest(
            inputs=texts, aggregation=aggregation, activate=activate, cache_salt=arguments.cache_salt(cache_salt)
        )
        result: TokenClassifyResult = await self._ask(request, arguments.size(texts), timeout_s, priority, tenant)
        return result

    async def score(
        self,
        queries: Content | Sequence[Content],
        documents: Content | Sequence[Content],
        *,
        activate: bool = True,
        instruction: str | None = None,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        cache_salt: str | None = None,
    ) -> ScoreResult:
        """How well each document answers its query.

        Args:
            queries: One for all documents, or one for each: texts, images, or conversations that show some.
            documents: One or several.
            activate: False returns a cross-encoder's logits.
            instruction: What the model is to look for; for models whose template has a place for it.
            max_tokens: Of what the model reads at once: a pair, or one text. See the class.
            timeout_s: See the class.
            priority: See the class.
            tenant: See the class.
            cache_salt: See the class.

        Returns:
            `scores`: float32 [documents], higher is better: of a cross-encoder, the cosine of two embeddings, or the
            late interaction of multi-vectors.
        """
        arguments.whole_number("max_tokens", max_tokens)
        arguments.text("instruction", instruction)
        request = ScoreRequest(
            cache_salt=arguments.cache_salt(cache_salt),
            queries=arguments.contents("queries", queries),
            documents=arguments.contents("documents", documents),
            activate=activate,
            instruction=instruction,
            max_tokens=max_tokens,
        )
        body_bytes = sum(map(content_bytes, request.queries)) + sum(map(content_bytes, request.documents))
        result: ScoreResult = await self._ask(request, body_bytes, timeout_s, priority, tenant)
        return result

    async def rerank(
        self,
        query: Content,
        documents: Sequence[Content],
        *,
        top_n: int | None = None,
        activate: bool = True,
        instruction: str | None = None,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        cache_salt: str | None = None,
    ) -> RerankResult:
        """Documents in the order of how well they answer a query, the best first.

        Args:
            query: A text, an image, or a conversation that shows some.
            documents: One or several.
            top_n: Return so many. None and 0: all of them.
            activate: See `score`.
            instruction: See `score`.
            max_tokens: See `score`.
            timeout_s: See the class.
            priority: See the class.
            tenant: See the class.
            cache_salt: See the class.
        """
        arguments.whole_number("top_n", top_n)
        check_top_n(top_n)
        result = await self.score(
            query,
            documents,
            activate=activate,
            instruction=instruction,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        return rank(result, top_n)

    async def _ask(
        self, request: Request, body_bytes: int, timeout_s: float, priority: Priority | str, tenant: Hashable
    ) -> Any:
        return await self.submit(
            lambda: request,
            lambda result: result,
            body_bytes=body_bytes,
            timeout_s=timeout_s,
            priority=arguments.priority(priority),
            tenant=tenant,
        )
