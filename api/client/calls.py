"""What each call sends, and what it makes of the answers: pure, and the same for both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

from staged_pool.client import answers, reading
from staged_pool.client.answers import decode
from staged_pool.client.batches import Stretch, cut
from staged_pool.client.contents import Form, Given, document, form, options, written
from staged_pool.client.exchange import Answer, Request
from staged_pool.client.results import EntitiesResult, Readiness, ServedModel, TokensResult
from staged_pool.runtime import arguments
from staged_pool.runtime.arguments import Inputs
from staged_pool.runtime.requests import DENSE_ONLY, Aggregation, Content, Image, Output, PairInput, TextInput
from staged_pool.runtime.results import ClassifyResult, EmbedResult, RerankResult, ScoreResult
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

_ANY: Final = Form("queries and documents, which go together in any form")
_BASE64: Final[Mapping[str, object]] = {"encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"}


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
    own: Options,
    inputs: Inputs,
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
        own,
        inputs,
        dimensions=dimensions,
        normalize=normalize,
        prompt_name=prompt_name,
        prompt=prompt,
        max_tokens=max_tokens,
    )
    if wanted == DENSE_ONLY:
        path, read = "/v1/embeddings", reading.read_vectors
        common |= _BASE64
    else:
        path, read = "/pooling", partial(reading.read_outputs, outputs=wanted)
        common["task"] = [task for output, task in TASKS.items() if output in wanted]
        # In base64 an array has lost its shape, which of one vector a token is not known here.
        common |= {"encoding_format": "float"} if Output.MULTI_VECTOR in wanted else _BASE64
    return _batched(own, path, sources, partial(_with_inputs, common), read=read, join=reading.join_vectors)


def embed_stream(
    own: Options,
    inputs: Inputs,
    *,
    dimensions: int | None,
    normalize: bool,
    prompt_name: str | None,
    prompt: str | None,
    max_tokens: int | None,
) -> tuple[int, Iterator[Part]]:
    """How many inputs, and requests whose answers are read in lines; see `Client.embed_stream`."""
    sources, common = _embed_fields(
        own,
        inputs,
        dimensions=dimensions,
        normalize=normalize,
        prompt_name=prompt_name,
        prompt=prompt,
        max_tokens=max_tokens,
    )
    common |= _BASE64
    parts = _parts(own, "/v1/embeddings", sources, partial(_with_inputs, common), streamed=True)
    return len(sources), parts


def classify(
    own: Options, inputs: Inputs | Sequence[tuple[str, str]], *, activate: bool, max_tokens: int | None
) -> Call[ClassifyResult, ClassifyResult]:
    """Labels; see `Client.classify`."""
    sources = [_source(given) for given in arguments.inputs_or_pairs(inputs, max_tokens)]
    common = own.fields(use_activation=activate, truncate_prompt_tokens=max_tokens)
    return _batched(
        own, "/classify", sources, partial(_with_inputs, common), read=reading.read_labels, join=reading.join_labels
    )


def classify_tokens(
    own: Options, inputs: str | Sequence[str], *, aggregation: Aggregation, max_tokens: int | None
) -> Call[EntitiesResult, EntitiesResult]:
    """Entities; see `Client.classify_tokens`."""
    texts = [_source(given) for given in arguments.text_inputs(inputs, max_tokens)]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInput(f"Input {index} is not a text, which is what entities are found in", index=index)
    common = own.fields(aggregation_strategy=aggregation, truncate_prompt_tokens=max_tokens)
    return _batched(
        own,
        "/classify_tokens",
        texts,
        partial(_with_inputs, common),
        read=reading.read_entities,
        join=reading.join_entities,
    )


def score(
    own: Options,
    queries: Content | Sequence[Content],
    documents: Content | Sequence[Content],
    *,
    activate: bool,
    instruction: str | None,
    max_tokens: int | None,
) -> Call[ScoreResult, ScoreResult]:
    """Scores; see `Client.score`."""
    arguments.whole_number("max_tokens", max_tokens)
    arguments.text("instruction", instruction)
    asked, given = arguments.contents("queries", queries), arguments.contents("documents", documents)
    if len(asked) not in (1, len(given)):
        found = f"found {len(asked)} and {len(given)}"
        raise InvalidInput(f"queries and documents must be 1:1, 1:N or N:N; {found}", param="queries")
    common = {
        **own.fields(use_activation=activate, instruction=instruction, truncate_prompt_tokens=max_tokens),
        **options((*asked, *given)),
    }
    pairs: list[Given] = list(zip(asked, given, strict=True)) if len(asked) > 1 else list(given)

    def fields(some: Sequence[Any]) -> dict[str, object]:
        sides = ([document(pair[0]) for pair in some], [pair[1] for pair in some]) if len(asked) > 1 else (query, some)
        return {**common, "queries": sides[0], "documents": [document(one) for one in sides[1]]}

    query = document(asked[0]) if len(asked) == 1 else None
    parts = partial(_parts, own, "/score", pairs, fields, form_of=lambda given: _ANY)
    return Call(len(given), parts, reading.read_scores, reading.join_scores)


def rerank(
    own: Options,
    query: Content,
    documents: Content | Sequence[Content],
    *,
    top_n: int | None,
    activate: bool,
    instruction: str | None,
    max_tokens: int | None,
) -> Call[ScoreResult, RerankResult]:
    """A ranking, of scores: a list that is sent in batches cannot be ranked by the server; see `Client.rerank`."""
    arguments.whole_number("top_n", top_n)
    check_top_n(top_n)
    if len(asked := arguments.contents("query", query)) != 1:
        raise InvalidInput(f"query must be one, not {len(asked)}.", param="query")
    scored = score(own, query, documents, activate=activate, instruction=instruction, max_tokens=max_tokens)
    return Call(scored.total, scored.parts, scored.read, lambda parts: rank(scored.join(parts), top_n))


def tokenize(own: Options, text: str, *, add_special_tokens: bool) -> Call[TokensResult, TokensResult]:
    """Token ids; see `Client.tokenize`."""
    if not isinstance(text, str):
        raise InvalidInput(f"text must be a text, not of type {type(text).__name__}.", param="text")
    fields = own.fields(prompt=text, add_special_tokens=add_special_tokens, return_token_strs=True)

    def read(answer: Answer, count: int) -> TokensResult:
        body = decode(answers.TOKENS, answer.body)
        return TokensResult(tuple(body.tokens), tuple(body.token_strs or ()))

    return _single(Request(path="/tokenize", fields=fields), read)


def detokenize(own: Options, ids: Sequence[int]) -> Call[str, str]:
    """The text of token ids; see `Client.detokenize`."""
    request = Request(path="/detokenize", fields=own.fields(tokens=list(ids)))
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
    own: Options,
    inputs: Inputs,
    *,
    dimensions: int | None,
    normalize: bool,
    prompt_name: str | None,
    prompt: str | None,
    max_tokens: int | None,
) -> tuple[list[Given], dict[str, object]]:
    """The inputs, and the fields that go with each batch of them."""
    arguments.whole_number("dimensions", dimensions)
    arguments.text("prompt_name", prompt_name)
    arguments.text("prompt", prompt)
    sources = [_source(given) for given in arguments.inputs(inputs, max_tokens)]
    return sources, own.fields(
        dimensions=dimensions,
        use_activation=normalize,
        prompt_name=prompt_name,
        prompt=prompt,
        truncate_prompt_tokens=max_tokens,
    )


def _source(given: TextInput | PairInput | Image) -> Given:
    if isinstance(given, PairInput):
        return given.first, given.second
    return given if isinstance(given, Image) else given.source


def _parts(
    own: Options,
    path: str,
    inputs: Sequence[Given],
    fields: Callable[[Sequence[Any]], dict[str, object]],
    *,
    form_of: Callable[[Given], Form] = form,
    streamed: bool = False,
) -> Iterator[Part]:
    for number, stretch in enumerate(cut(inputs, max_items=own.batch_items, form_of=form_of)):
        some = inputs[stretch.first : stretch.last]
        yield Part(number, stretch, Request(path=path, fields=fields(some), streamed=streamed))


def _with_inputs(common: Mapping[str, object], some: Sequence[Given]) -> dict[str, object]:
    shared = form(some[0]).fields if some else {}
    return {**common, **shared, "input": [written(given) for given in some]}


def _batched(
    own: Options,
    path: str,
    inputs: Sequence[Given],
    fields: Callable[[Sequence[Any]], dict[str, object]],
    *,
    read: Callable[[Answer, int], P],
    join: Callable[[Sequence[P]], R],
) -> Call[P, R]:
    return Call(len(inputs), lambda: _parts(own, path, inputs, fields), read, join)


def _single(request: Request, read: Callable[[Answer, int], P]) -> Call[P, P]:
    return Call(1, lambda: iter((Part(0, Stretch(0, 1), request),)), read, lambda parts: parts[0])
