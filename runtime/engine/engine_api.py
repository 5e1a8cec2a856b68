"""The Python API of an engine: one method for each task, on top of `submit`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from staged_pool.runtime import arguments
from staged_pool.runtime.arguments import Inputs, Texts
from staged_pool.runtime.requests import (
    DENSE_ONLY,
    HYPOTHESIS,
    Aggregation,
    Chat,
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
    """One method for each task of an engine.

    These parameters are the same in every method:

    - `max_tokens`: Maximum tokens of an input; longer ones are cut. `MODEL_MAX`: the model's limit. None: reject inputs
      that are too long.
    - `timeout_s`: Time limit for the result, in seconds. A deadline of the host's own scope cancels the call as usual,
      and raises no error of the engine.
    - `priority`: `interactive` or `bulk`. Bulk work gets the rest of the device, and at least an eighth of it.
    - `tenant`: Owner of the request, any hashable value. Tenants share the device fairly, however many requests each
      has.
    - `cache_salt`: A text of 1 to 1024 characters. Only requests of one tenant and one salt share rows and prepared
      images. None is a salt, too. With `share_between_tenants`, cached ones are shared between tenants.

    Every method raises these errors:

    - `InvalidInput`: An argument is wrong. If it is an input, the error has its index.
    - `Unsupported`: The model cannot do the task.
    - `DeadlineExceeded`: `timeout_s` passed, or cannot be met.
    - The other errors of `submit`.
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
        """Take one request through the four stages and return its answer; see `Engine.submit`."""

    async def embed(
        self,
        inputs: Inputs,
        *,
        outputs: Output | str | Iterable[Output | str] = DENSE_ONLY,
        dimensions: int | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        late_chunking: bool = False,
        chunk_tokens: int | None = None,
        offsets: bool = False,
        max_active_dims: int | None = None,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        cache_salt: str | None = None,
    ) -> EmbedResult:
        """Embed each input.

        Args:
            inputs: Texts, the token ids of texts, images, or conversations, which may hold images.
            outputs: Any of `dense`, `sparse`, `multi_vector` and `token_weights` that the model has. One forward gives
                all of them.
            dimensions: Number of leading values to keep of each dense vector, which is then normalised again. Only for
                models that were trained for it.
            normalize: False returns vectors as pooled.
            prompt_name: Name of the model's prompt to put before each text, such as `query`.
            prompt: Text to put before each text.
            late_chunking: Read the texts as the chunks of one document, joined as they are, in one forward. Each chunk
                gets the pooled vectors of its own tokens. For models with mean pooling.
            chunk_tokens: Give `multi_vector` a vector of each run of this number of tokens, special ones included. It
                is the mean of the token vectors of one forward, before the model's projection. `chunks` and `offsets`
                have the tokens and the characters of each. For texts that are not cut.
            offsets: Return the characters of each token of `multi_vector` in its text.
            max_active_dims: Number of the largest weights to keep of each vector of `sparse`.
            max_tokens: See the class. With `late_chunking`, that of the document.
            timeout_s: See the class.
            priority: See the class.
            tenant: See the class.
            cache_salt: See the class.

        Returns:
            `embeddings`: float32 [inputs, width]; `sparse`, `multi_vector`, `token_weights`; `offsets`; `chunks`;
            `usage.prompt_tokens`.
        """
        arguments.whole_number("dimensions", dimensions)
        arguments.whole_number("max_active_dims", max_active_dims)
        arguments.whole_number("chunk_tokens", chunk_tokens)
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
            late_chunking=late_chunking,
            chunk_tokens=chunk_tokens,
            offsets=offsets,
            max_active_dims=max_active_dims,
        )
        result: EmbedResult = await self._run(request, arguments.size(given), timeout_s, priority, tenant)
        return result

    async def classify(
        self,
        inputs: Inputs | Sequence[tuple[str, str]],
        *,
        activate: bool = True,
        candidate_labels: str | Sequence[str] | None = None,
        hypothesis_template: str = HYPOTHESIS,
        multi_label: bool = False,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        cache_salt: str | None = None,
    ) -> ClassifyResult:
        """Score each label for each input: the model's labels, or those of the caller.

        Args:
            inputs: Texts, the token ids of texts, images, conversations, or pairs of texts. With `candidate_labels`,
                texts.
            activate: False returns logits.
            candidate_labels: Labels to choose among, or one text with commas between them, for models of natural
                language inference (zero-shot classification). Each text with each label is one item of the request.
            hypothesis_template: Statement that each label completes; `{}` stands for the label.
            multi_label: Score each label by itself. False: the scores of a text add up to 1.
            max_tokens: See the class.
            timeout_s: See the class.
            priority: See the class.
            tenant: See the class.
            cache_salt: See the class.

        Returns:
            `scores`: float32 [inputs, labels]; `labels`, or those of `candidate_labels`, in their order.
        """
        given = arguments.inputs_or_pairs(inputs, max_tokens)
        arguments.text("hypothesis_template", hypothesis_template)
        request = ClassifyRequest(
            inputs=given,
            activate=activate,
            candidate_labels=arguments.candidate_labels(candidate_labels),
            hypothesis_template=hypothesis_template,
            multi_label=multi_label,
            cache_salt=arguments.cache_salt(cache_salt),
        )
        result: ClassifyResult = await self._run(request, arguments.size(given), timeout_s, priority, tenant)
        return result

    async def classify_tokens(
        self,
        inputs: Texts | Chat | Sequence[Chat],
        *,
        aggregation: Aggregation = "simple",
        activate: bool = True,
        max_tokens: int | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
        cache_salt: str | None = None,
    ) -> TokenClassifyResult:
        """Label each token, and join tokens to entities. A process reward model labels each step instead.

        Args:
            inputs: Texts, the token ids of texts, or conversations. Only texts have entities.
            aggregation: See `TokenClassifyRequest`. Steps are never joined.
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
        result: TokenClassifyResult = await self._run(request, arguments.size(texts), timeout_s, priority, tenant)
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
        """Score each document for its query.

        Args:
            queries: One for all documents, or one for each: texts, images, or conversations, which may hold images.
            documents: One or several, of the same kinds.
            activate: False returns a cross-encoder's logits.
            instruction: Description of a good match, for models whose template has a place for it.
            max_tokens: Limit for a pair if the model reads pairs, else for each text. See the class.
            timeout_s: See the class.
            priority: See the class.
            tenant: See the class.
            cache_salt: See the class.

        Returns:
            `scores`: float32 [documents], higher is better. They come from a cross-encoder, the similarity of two
            embeddings, or the late interaction of multi-vectors.
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
        result: ScoreResult = await self._run(request, body_bytes, timeout_s, priority, tenant)
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
        """Order documents by their score for a query, the best first.

        Args:
            query: A text, an image, or a conversation, which may hold images.
            documents: One or several, of the same kinds.
            top_n: Number of documents to return. None and 0: all of them.
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

    async def _run(
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
