"""The pool: an engine for blocking programs, notebooks and threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Protocol, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from staged_pool.pool.calls import Call, ResultStream, call_of
from staged_pool.pool.encode import EncodePool
from staged_pool.runtime import arguments, joining
from staged_pool.runtime.arguments import Inputs, Texts
from staged_pool.runtime.call_options import (
    ClassifyOptions,
    EmbedOptions,
    ScoreOptions,
    TokenClassifyOptions,
    VectorOptions,
)
from staged_pool.runtime.engine.encode_api import score_pairs
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.patience import patiently
from staged_pool.runtime.progress import Progress
from staged_pool.runtime.requests import Chat, Content
from staged_pool.runtime.results import (
    ClassifyResult,
    EmbedResult,
    RerankResult,
    ScoreResult,
    TokenClassifyResult,
    Usage,
)
from staged_pool.runtime.tasks.score import check_top_n, rank
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.scheduling.entries import Priority

T = TypeVar("T")
R = TypeVar("R")


class _Used(Protocol):
    """A result with its usage."""

    @property
    def usage(self) -> Usage: ...


U = TypeVar("U", bound=_Used)


class Pool(EncodePool):
    """Engine in a thread of its own, with the methods of `Engine`, which block.

    The model is loaded at the first use, by `open` or by a `with` block. Any thread may use a pool, several at once,
    also one in which an event loop runs, such as a notebook's. A pool that nobody closes ends when it is collected, or
    with the program. An interrupt (Ctrl-C) cancels the call, and leaves the pool usable.

    Long lists are divided into several requests, some of which are in flight at once. A call is never rejected because
    of other calls: it waits for its turn, at most `timeout_s` seconds. `progress` shows a bar, or calls a function; see
    `Progress`.

    Args:
        model: Model folder, or hub id; or all settings of the engine.
        backend: Event loop of the thread.
        plugins: Plugins, as for `open_engine`; `process` uses them.
        **settings: Settings of the engine by name, such as `device="cpu"`; see `EngineConfig`. `target_delay_s` is a
            day unless it is given.

    Raises:
        ConfigError: A setting is unknown or out of its range. On opening: the model cannot be loaded.
    """

    def embed(
        self, inputs: Inputs | Iterable[Content], *, progress: Progress = False, **options: Unpack[EmbedOptions]
    ) -> EmbedResult:
        """Embed each input; see `Engine.embed`. With `late_chunking` all texts are one request."""
        if options.get("late_chunking"):
            texts = cast("Sequence[str]", tuple(arguments.each(inputs)))
            return self.call(lambda engine: engine.embed(texts, **options))
        call = call_of(Engine.embed, arguments.each(inputs), options, progress=progress)
        return joining.join_vectors(self._results(call))

    def embed_stream(
        self,
        inputs: Iterable[Content | Sequence[int]],
        *,
        ordered: bool = True,
        progress: Progress = False,
        **options: Unpack[VectorOptions],
    ) -> ResultStream[NDArray[np.float32]]:
        """Embed any number of inputs, and give the index and vector of each.

        Inputs are taken from the iterable as there is room for them, so memory stays bounded. Each result is given as
        soon as it is there and its turn has come. If the iterable raises an error, that comes behind the results of the
        inputs before it.

        Args:
            inputs: Inputs, such as those of a generator.
            ordered: Keep the order of the inputs. False: as the requests are done, of 256 inputs at most.
            progress: See the class.
            **options: See `Engine.embed`. `timeout_s` limits the whole stream.
        """
        call = call_of(
            Engine.embed, arguments.each(inputs), options, progress=progress, ordered=ordered, is_stream=True
        )
        return ResultStream(self._rows(call, lambda result: result.embeddings))

    def classify(
        self,
        inputs: Inputs | Iterable[Content | tuple[str, str]],
        *,
        progress: Progress = False,
        **options: Unpack[ClassifyOptions],
    ) -> ClassifyResult:
        """Score each label for each input; see `Engine.classify`."""
        call = call_of(Engine.classify, arguments.each(inputs), options, progress=progress, items_each=_labels(options))
        return joining.join_labels(self._results(call))

    def classify_stream(
        self,
        inputs: Iterable[Content | tuple[str, str]],
        *,
        ordered: bool = True,
        progress: Progress = False,
        **options: Unpack[ClassifyOptions],
    ) -> ResultStream[NDArray[np.float32]]:
        """Classify any number of inputs, and give the scores [labels] of each; see `embed_stream`."""
        call = call_of(
            Engine.classify,
            arguments.each(inputs),
            options,
            progress=progress,
            ordered=ordered,
            is_stream=True,
            items_each=_labels(options),
        )
        return ResultStream(self._rows(call, lambda result: result.scores))

    def classify_tokens(
        self,
        inputs: Texts | Chat | Iterable[str | Chat],
        *,
        progress: Progress = False,
        **options: Unpack[TokenClassifyOptions],
    ) -> TokenClassifyResult:
        """Label each token, and join tokens to entities; see `Engine.classify_tokens`."""
        call = call_of(Engine.classify_tokens, arguments.each(inputs), options, progress=progress)
        return joining.join_token_labels(self._results(call))

    def score(
        self,
        queries: Content | Sequence[Content],
        documents: Content | Iterable[Content],
        *,
        progress: Progress = False,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """Score each document for its query; see `Engine.score`."""
        asked, answers = arguments.contents("queries", queries), arguments.contents("documents", documents)
        if len(asked) == len(answers) > 1:
            pairs = call_of(score_pairs, tuple(zip(asked, answers, strict=True)), options, progress=progress)
            return joining.join_scores(self._results(pairs))
        if len(asked) == 1:
            return joining.join_scores(
                self._results(call_of(partial(_score, asked), answers, options, progress=progress))
            )
        return self.call(lambda engine: engine.score(asked, answers, **options))  # rejects them, and says why

    def score_stream(
        self,
        pairs: Iterable[tuple[Content, Content]],
        *,
        ordered: bool = True,
        progress: Progress = False,
        **options: Unpack[ScoreOptions],
    ) -> ResultStream[float]:
        """Score any number of pairs of a query and a document, and give each score; see `embed_stream`."""
        call = call_of(score_pairs, arguments.each(pairs), options, progress=progress, ordered=ordered, is_stream=True)
        return ResultStream(self._rows(call, lambda result: result.scores.tolist()))

    def rerank(
        self,
        query: Content,
        documents: Iterable[Content],
        *,
        top_n: int | None = None,
        progress: Progress = False,
        **options: Unpack[ScoreOptions],
    ) -> RerankResult:
        """Order documents by their score for a query, the best first; see `Engine.rerank`."""
        arguments.whole_number("top_n", top_n)
        check_top_n(top_n)
        return rank(self.score(query, documents, progress=progress, **options), top_n)

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool = True) -> Tokens:
        """Tokenize a text or a conversation; see `Engine.tokenize`."""
        return self.call(lambda engine: engine.tokenize(source, add_special_tokens=add_special_tokens))

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; see `Engine.detokenize`."""
        return self.call(lambda engine: engine.detokenize(ids, skip_special_tokens=skip_special_tokens))

    def process(
        self,
        data: object,
        *,
        plugin: str | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
    ) -> Any:
        """Take data through the hooks of a plugin, and return its output; see `Engine.process`."""
        arguments.time_limit(timeout_s)

        async def process(engine: Engine) -> Any:
            ask = partial(engine.process, data, plugin=plugin, priority=priority, tenant=tenant)
            return await patiently(lambda left_s: ask(timeout_s=left_s), timeout_s)

        return self.call(process)

    def _rows(self, call: Call[Any, U], rows: Callable[[U], Iterable[T]]) -> Generator[tuple[int, T], None, Usage]:
        tokens = 0
        with closing(call.results(self._submitting(call))) as results:
            for place, result in results:
                tokens += result.usage.prompt_tokens
                yield from zip(itertools.count(place.first), rows(result))
        return Usage(tokens)


async def _score(
    queries: Sequence[Content], engine: Engine, documents: Sequence[Content], **options: Unpack[ScoreOptions]
) -> ScoreResult:
    return await engine.score(queries, documents, **options)


def _labels(options: ClassifyOptions) -> int:
    """Count the labels that each text is read with: an input of the call makes that number of items."""
    return len(arguments.candidate_labels(options.get("candidate_labels")) or ("",))
