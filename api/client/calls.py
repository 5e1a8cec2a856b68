"""What each call sends, and what it makes of the answers: pure, and the same for both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

import numpy as np

from staged_pool.client import answers
from staged_pool.client.answers import decode, floats, in_order, integers, matrix
from staged_pool.client.batches import Input, Stretch, cut
from staged_pool.client.errors import BadAnswer
from staged_pool.client.exchange import Answer, Request
from staged_pool.runtime import arguments
from staged_pool.runtime.arguments import Texts
from staged_pool.runtime.model import SparseVector
from staged_pool.runtime.requests import DENSE_ONLY, Aggregation, Output, PairInput
from staged_pool.runtime.results import ClassifyResult, EmbedResult, Entity, RerankResult, ScoreResult, Usage
from staged_pool.runtime.tasks.score import check_top_n, rank
from staged_pool.stages.errors import InvalidInput

P = TypeVar("P")
R = TypeVar("R")

TASKS: Final[Mapping[Output, str]] = {
    Output.DENSE: "embed",
    Output.SPARSE: "sparse",
    Output.MULTI_VECTOR: "token_embed",
}
"""What the route `/pooling` calls each output."""

_BASE64: Final[Mapping[str, object]] = {"encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"}


@dataclass(frozen=True, slots=True)
class EntitiesResult:
    """The entities in each text."""

    entities: tuple[tuple[Entity, ...], ...]
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True)
class TokensResult:
    """One tokenized text."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]
    """What each id stands for, in the tokenizer's own spelling."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the server."""

    name: str
    max_tokens: int | None
    """Longest input, special tokens included."""
    card: Mapping[str, Any] = field(default_factory=dict)
    """What the server understood of it, by the names of `ModelCard`."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the server takes requests."""

    ready: bool
    reason: str = ""
    """Why not."""

    def __bool__(self) -> bool:
        return self.ready


@dataclass(frozen=True, slots=True)
class Part:
    """One request of a call."""

    number: int
    stretch: Stretch
    request: Request


@dataclass(frozen=True, slots=True)
class Call(Generic[P, R]):
    """What is asked of the server, in one request or several."""

    total: int
    """Inputs."""
    parts: Callable[[], Iterator[Part]]
    """Made one by one, as they are sent."""
    read: Callable[[Answer, int], P]
    """What the answer to a request for so many inputs holds."""
    join: Callable[[Sequence[P]], R]
    """The result of the parts, which are in order."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the calls of a client have in common."""

    model: str | None
    batch_items: int

    def fields(self, **fields: object) -> dict[str, object]:
        """Of a body; those that are None are left to the server."""
        return {name: value for name, value in {"model": self.model, **fields}.items() if value is not None}


def embed(
    options: Options,
    inputs: Texts,
    *,
    outputs: Output | str | Iterable[Output | str] = DENSE_ONLY,
    dimensions: int | None,
    normalize: bool,
    prompt_name: str | None,
    prompt: str | None,
    max_tokens: int | None,
) -> Call[EmbedResult, EmbedResult]:
    """Vectors; see `Client.embed`."""
    wanted = arguments.outputs(outputs)
    if not wanted or not wanted <= TASKS.keys():
        raise InvalidInput(f"outputs must be one or several of {', '.join(sorted(TASKS))}.", param="outputs")
    sources, common = _embed_fields(
        options,
        inputs,
        dimensions=dimensions,
        normalize=normalize,
        prompt_name=prompt_name,
        prompt=prompt,
        max_tokens=max_tokens,
    )
    if wanted == DENSE_ONLY:
        path, read = "/v1/embeddings", _read_vectors
        common |= _BASE64
    else:
        path, read = "/pooling", partial(_read_outputs, outputs=wanted)
        common["task"] = [task for output, task in TASKS.items() if output in wanted]
        # In base64 an array has lost its shape, which of one vector a token is not known here.
        common |= {"encoding_format": "float"} if Output.MULTI_VECTOR in wanted else _BASE64
    return _batched(options, path, sources, lambda some: {**common, "input": some}, read=read, join=_join_vectors)


def embed_stream(
    options: Options,
    inputs: Texts,
    *,
    dimensions: int | None,
    normalize: bool,
    prompt_name: str | None,
    prompt: str | None,
    max_tokens: int | None,
) -> tuple[int, Iterator[Part]]:
    """How many inputs, and requests whose answers are read in lines; see `Client.embed_stream`."""
    sources, common = _embed_fields(
        options,
        inputs,
        dimensions=dimensions,
        normalize=normalize,
        prompt_name=prompt_name,
        prompt=prompt,
        max_tokens=max_tokens,
    )
    common |= _BASE64
    parts = _parts(options, "/v1/embeddings", sources, lambda some: {**common, "input": some}, streamed=True)
    return len(sources), parts


def classify(
    options: Options, inputs: Texts | Sequence[tuple[str, str]], *, activate: bool, max_tokens: int | None
) -> Call[ClassifyResult, ClassifyResult]:
    """Labels; see `Client.classify`."""
    sources: list[Input] = [
        (given.first, given.second) if isinstance(given, PairInput) else _text_or_ids(given.source)
        for given in arguments.text_or_pair_inputs(inputs, max_tokens)
    ]
    common = options.fields(use_activation=activate, truncate_prompt_tokens=max_tokens)
    return _batched(
        options, "/classify", sources, lambda some: {**common, "input": some}, read=_read_labels, join=_join_labels
    )


def classify_tokens(
    options: Options, inputs: str | Sequence[str], *, aggregation: Aggregation, max_tokens: int | None
) -> Call[EntitiesResult, EntitiesResult]:
    """Entities; see `Client.classify_tokens`."""
    arguments.whole_number("max_tokens", max_tokens)
    texts = arguments.texts("inputs", inputs)
    common = options.fields(aggregation_strategy=aggregation, truncate_prompt_tokens=max_tokens)
    return _batched(
        options,
        "/classify_tokens",
        texts,
        lambda some: {**common, "input": some},
        read=_read_entities,
        join=_join_entities,
    )


def score(
    options: Options,
    queries: str | Sequence[str],
    documents: str | Sequence[str],
    *,
    activate: bool,
    instruction: str | None,
    max_tokens: int | None,
) -> Call[ScoreResult, ScoreResult]:
    """Scores; see `Client.score`."""
    arguments.whole_number("max_tokens", max_tokens)
    arguments.text("instruction", instruction)
    asked, documents = arguments.texts("queries", queries), arguments.texts("documents", documents)
    if len(asked) not in (1, len(documents)):
        found = f"found {len(asked)} and {len(documents)}"
        raise InvalidInput(f"queries and documents must be 1:1, 1:N or N:N texts; {found}", param="queries")
    common = options.fields(use_activation=activate, instruction=instruction, truncate_prompt_tokens=max_tokens)
    if len(asked) == 1:
        common["queries"] = asked[0]
        return _batched(
            options,
            "/score",
            documents,
            lambda some: {**common, "documents": some},
            read=_read_scores,
            join=_join_scores,
        )
    return _batched(
        options,
        "/score",
        list(zip(asked, documents, strict=True)),
        lambda some: {**common, "queries": [pair[0] for pair in some], "documents": [pair[1] for pair in some]},
        read=_read_scores,
        join=_join_scores,
    )


def rerank(
    options: Options,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None,
    activate: bool,
    instruction: str | None,
    max_tokens: int | None,
) -> Call[ScoreResult, RerankResult]:
    """A ranking, of scores: a list that is sent in batches cannot be ranked by the server; see `Client.rerank`."""
    arguments.whole_number("top_n", top_n)
    check_top_n(top_n)
    if not isinstance(query, str):
        raise InvalidInput(f"query must be a text, not of type {type(query).__name__}.", param="query")
    scored = score(options, query, documents, activate=activate, instruction=instruction, max_tokens=max_tokens)
    return Call(scored.total, scored.parts, scored.read, lambda parts: rank(scored.join(parts), top_n))


def tokenize(options: Options, text: str, *, add_special_tokens: bool) -> Call[TokensResult, TokensResult]:
    """Token ids; see `Client.tokenize`."""
    if not isinstance(text, str):
        raise InvalidInput(f"text must be a text, not of type {type(text).__name__}.", param="text")
    fields = options.fields(prompt=text, add_special_tokens=add_special_tokens, return_token_strs=True)

    def read(answer: Answer, count: int) -> TokensResult:
        body = decode(answers.TOKENS, answer.body)
        return TokensResult(tuple(body.tokens), tuple(body.token_strs or ()))

    return _single(Request(path="/tokenize", fields=fields), read)


def detokenize(options: Options, ids: Sequence[int]) -> Call[str, str]:
    """The text of token ids; see `Client.detokenize`."""
    request = Request(path="/detokenize", fields=options.fields(tokens=list(ids)))
    return _single(request, lambda answer, count: decode(answers.TEXT, answer.body).prompt)


def models() -> Call[tuple[ServedModel, ...], tuple[ServedModel, ...]]:
    """What is served."""

    def read(answer: Answer, count: int) -> tuple[ServedModel, ...]:
        found = decode(answers.MODELS, answer.body).data
        return tuple(ServedModel(one.id, one.max_model_len, one.staged_pool) for one in found)

    return _single(Request(method="GET", path="/v1/models"), read)


def ready() -> Call[Readiness, Readiness]:
    """Whether requests are taken."""

    def read(answer: Answer, count: int) -> Readiness:
        body = decode(answers.READY, answer.body)
        return Readiness(body.ready, body.reason)

    return _single(Request(method="GET", path="/ready", results=frozenset({200, 503})), read)


def _embed_fields(
    options: Options,
    inputs: Texts,
    *,
    dimensions: int | None,
    normalize: bool,
    prompt_name: str | None,
    prompt: str | None,
    max_tokens: int | None,
) -> tuple[list[Input], dict[str, object]]:
    """The inputs, and the fields that go with each batch of them."""
    arguments.whole_number("dimensions", dimensions)
    arguments.text("prompt_name", prompt_name)
    arguments.text("prompt", prompt)
    sources = [_text_or_ids(given.source) for given in arguments.text_inputs(inputs, max_tokens)]
    return sources, options.fields(
        dimensions=dimensions,
        use_activation=normalize,
        prompt_name=prompt_name,
        prompt=prompt,
        truncate_prompt_tokens=max_tokens,
    )


def _text_or_ids(source: object) -> Input:
    if isinstance(source, str):
        return source
    assert isinstance(source, tuple)  # all that is left of what `arguments` lets through
    return source


def _parts(
    options: Options,
    path: str,
    inputs: Sequence[Input],
    fields: Callable[[Sequence[Any]], dict[str, object]],
    *,
    streamed: bool = False,
) -> Iterator[Part]:
    for number, stretch in enumerate(cut(inputs, max_items=options.batch_items)):
        some = inputs[stretch.first : stretch.last]
        yield Part(number, stretch, Request(path=path, fields=fields(some), streamed=streamed))


def _batched(
    options: Options,
    path: str,
    inputs: Sequence[Input],
    fields: Callable[[Sequence[Any]], dict[str, object]],
    *,
    read: Callable[[Answer, int], P],
    join: Callable[[Sequence[P]], R],
) -> Call[P, R]:
    return Call(len(inputs), lambda: _parts(options, path, inputs, fields), read, join)


def _single(request: Request, read: Callable[[Answer, int], P]) -> Call[P, P]:
    return Call(1, lambda: iter((Part(0, Stretch(0, 1), request),)), read, lambda parts: parts[0])


def _read_vectors(answer: Answer, count: int) -> EmbedResult:
    body = decode(answers.VECTORS, answer.body)
    rows = in_order(body.data, [one.index for one in body.data], count)
    return EmbedResult(
        dense=matrix([one.embedding for one in rows]), usage=Usage(body.usage.prompt_tokens), model=body.model
    )


def _read_outputs(answer: Answer, count: int, outputs: frozenset[Output]) -> EmbedResult:
    body = decode(answers.POOLED, answer.body)
    rows = [one.data for one in in_order(body.data, [one.index for one in body.data], count)]
    dense = [row.embed for row in rows if row.embed is not None]
    sparse = [SparseVector(integers(row.sparse.indices), floats(row.sparse.values)) for row in rows if row.sparse]
    multi = [np.asarray(row.token_embed, np.float32) for row in rows if row.token_embed is not None]
    for output, found in ((Output.DENSE, dense), (Output.SPARSE, sparse), (Output.MULTI_VECTOR, multi)):
        if output in outputs and len(found) != count:
            raise BadAnswer(f"The answer lacks {output.value} of {count - len(found)} inputs")
    return EmbedResult(
        dense=matrix(dense) if Output.DENSE in outputs else None,
        sparse=tuple(sparse) if Output.SPARSE in outputs else None,
        multi_vector=tuple(multi) if Output.MULTI_VECTOR in outputs else None,
        usage=Usage(body.usage.prompt_tokens),
        model=body.model,
    )


def _join_vectors(parts: Sequence[EmbedResult]) -> EmbedResult:
    first = parts[0]
    if len(parts) == 1:
        return first
    return EmbedResult(
        dense=None if first.dense is None else np.concatenate([part.embeddings for part in parts]),
        sparse=None if first.sparse is None else tuple(one for part in parts for one in part.sparse or ()),
        multi_vector=(
            None if first.multi_vector is None else tuple(one for part in parts for one in part.multi_vector or ())
        ),
        usage=_usage(parts),
        model=first.model,
    )


def _read_labels(answer: Answer, count: int) -> ClassifyResult:
    body = decode(answers.LABELS, answer.body)
    rows = in_order(body.data, [one.index for one in body.data], count)
    return ClassifyResult(
        scores=matrix([one.probs for one in rows]),
        labels=tuple(body.labels),
        usage=Usage(body.usage.prompt_tokens),
        model=body.model,
    )


def _join_labels(parts: Sequence[ClassifyResult]) -> ClassifyResult:
    scores = np.concatenate([part.scores for part in parts])
    return ClassifyResult(scores=scores, labels=parts[0].labels, usage=_usage(parts), model=parts[0].model)


def _read_entities(answer: Answer, count: int) -> EntitiesResult:
    body = decode(answers.ENTITIES, answer.body)
    rows = in_order(body.data, [one.index for one in body.data], count)
    entities = tuple(
        tuple(Entity(found.label, found.score, found.start, found.end, found.text) for found in one.entities)
        for one in rows
    )
    return EntitiesResult(entities, Usage(body.usage.prompt_tokens), body.model)


def _join_entities(parts: Sequence[EntitiesResult]) -> EntitiesResult:
    return EntitiesResult(tuple(one for part in parts for one in part.entities), _usage(parts), parts[0].model)


def _read_scores(answer: Answer, count: int) -> ScoreResult:
    body = decode(answers.SCORES, answer.body)
    rows = in_order(body.data, [one.index for one in body.data], count)
    scores = np.array([one.score for one in rows], np.float32)
    return ScoreResult(scores=scores, usage=Usage(body.usage.prompt_tokens), model=body.model)


def _join_scores(parts: Sequence[ScoreResult]) -> ScoreResult:
    scores = np.concatenate([part.scores for part in parts])
    return ScoreResult(scores=scores, usage=_usage(parts), model=parts[0].model)


def _usage(parts: Iterable[EmbedResult | ClassifyResult | EntitiesResult | ScoreResult]) -> Usage:
    return Usage(sum(part.usage.prompt_tokens for part in parts))
