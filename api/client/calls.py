"""The methods of both clients: what each takes, and which requests it becomes. Pure.

Their first parameter is the client's; the others, and what is said of them, are those of the methods of `Client` and
`AsyncClient`, which are made of these functions. `timeout_s` is for the whole call, None the client's own; `model` is
asked rather than the client's own; for `progress` see `Progress`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from staged_pool.client import answers, reading
from staged_pool.client.answers import decode
from staged_pool.client.contents import Form, Given, document, options
from staged_pool.client.exchange import Answer, Request
from staged_pool.client.plans import Call, Options, Streamed, batched, parts_of, single, source, with_inputs
from staged_pool.client.progress import Progress
from staged_pool.client.results import EntitiesResult, Readiness, ServedModel, TokensResult
from staged_pool.runtime import arguments
from staged_pool.runtime.arguments import Inputs
from staged_pool.runtime.requests import DENSE_ONLY, Aggregation, Content, Output
from staged_pool.runtime.results import ClassifyResult, EmbedResult, RerankResult, ScoreResult
from staged_pool.runtime.tasks.score import check_top_n, rank
from staged_pool.stages.errors import InvalidInput

TASKS: Final[Mapping[Output, str]] = {
    Output.DENSE: "embed",
    Output.SPARSE: "sparse",
    Output.MULTI_VECTOR: "token_embed",
    Output.TOKEN_WEIGHTS: "token_classify",
}
"""What the route `/pooling` calls each output."""

_ANY: Final = Form("queries and documents, which go together in any form")
_BASE64: Final[Mapping[str, object]] = {"encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"}


def embed(
    own: Options,
    inputs: Inputs,
    *,
    outputs: Output | str | Iterable[Output | str] = DENSE_ONLY,
    dimensions: int | None = None,
    normalize: bool = True,
    prompt_name: str | None = None,
    prompt: str | None = None,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
) -> Call[EmbedResult, EmbedResult]:
    """Vectors of each input; see `Engine.embed` for the arguments and the result.

    Args:
        inputs: Inputs, or the token ids of texts.
        outputs: Any of `dense`, `sparse`, `multi_vector` and `token_weights`.
        dimensions: Keep the first so many values of each dense vector, normalised again.
        normalize: False returns vectors as pooled.
        prompt_name: Put this one of the model's prompts before each text.
        prompt: Put this before each text.
        max_tokens: Cut longer inputs to so many tokens, `MODEL_MAX` to what the model takes; None refuses them.
        cache_salt: The server shares results with calls of the same salt only.
        model: Ask this one rather than the client's own.
        timeout_s: For the whole call; None is the client's own.
        progress: See `Progress`.
    """
    wanted = arguments.outputs(outputs)
    if not wanted or not wanted <= TASKS.keys():
        raise InvalidInput(f"outputs must be one or several of {', '.join(sorted(TASKS))}.", param="outputs")
    sources, common = _vectors(own, inputs, dimensions, normalize, prompt_name, prompt, max_tokens, cache_salt, model)
    if wanted == DENSE_ONLY:
        path, read = "/v1/embeddings", reading.read_vectors
        common |= _BASE64
    else:
        path, read = "/pooling", partial(reading.read_outputs, outputs=wanted)
        common["task"] = [task for output, task in TASKS.items() if output in wanted]
        # In base64 an array has lost its shape, which of one vector a token is not known here.
        common |= {"encoding_format": "float"} if Output.MULTI_VECTOR in wanted else _BASE64
    join = reading.join_vectors
    return batched(own, path, sources, common, read=read, join=join, timeout_s=timeout_s, progress=progress)


def embed_stream(
    own: Options,
    inputs: Inputs,
    *,
    dimensions: int | None = None,
    normalize: bool = True,
    prompt_name: str | None = None,
    prompt: str | None = None,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
) -> Streamed:
    """Dense vectors as the server makes them: for lists whose result is too large to hold, or needed early.

    The batches go out one after the other. A request is repeated only before its first vector came. Leaving the block
    early ends the request on the server. For the arguments see `embed`.
    """
    sources, common = _vectors(own, inputs, dimensions, normalize, prompt_name, prompt, max_tokens, cache_salt, model)
    fields = partial(with_inputs, {**common, **_BASE64})
    parts = parts_of(own, "/v1/embeddings", sources, fields, streamed=True)
    return Streamed(total=len(sources), parts=parts, timeout_s=timeout_s)


def _vectors(  # noqa: PLR0917  # the arguments of both, in their order
    own: Options,
    inputs: Inputs,
    dimensions: int | None,
    normalize: bool,
    prompt_name: str | None,
    prompt: str | None,
    max_tokens: int | None,
    cache_salt: str | None,
    model: str | None,
) -> tuple[list[Given], dict[str, object]]:
    """The inputs, and the fields that go with each batch of them."""
    arguments.whole_number("dimensions", dimensions)
    arguments.text("prompt_name", prompt_name)
    arguments.text("prompt", prompt)
    sources = [source(given) for given in arguments.inputs(inputs, max_tokens)]
    return sources, own.fields(
        model,
        dimensions=dimensions,
        use_activation=normalize,
        prompt_name=prompt_name,
        prompt=prompt,
        truncate_prompt_tokens=max_tokens,
        cache_salt=arguments.cache_salt(cache_salt),
    )


def classify(
    own: Options,
    inputs: Inputs | Sequence[tuple[str, str]],
    *,
    activate: bool = True,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
) -> Call[ClassifyResult, ClassifyResult]:
    """How well each of the model's labels fits each input or pair of texts; see `Engine.classify`."""
    sources = [source(given) for given in arguments.inputs_or_pairs(inputs, max_tokens)]
    common = own.fields(
        model, use_activation=activate, truncate_prompt_tokens=max_tokens, cache_salt=arguments.cache_salt(cache_salt)
    )
    read, join = reading.read_labels, reading.join_labels
    return batched(own, "/classify", sources, common, read=read, join=join, timeout_s=timeout_s, progress=progress)


def classify_tokens(
    own: Options,
    inputs: str | Sequence[str],
    *,
    aggregation: Aggregation = "simple",
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
) -> Call[EntitiesResult, EntitiesResult]:
    """The entities in each text; see `Engine.classify_tokens`. Scores of single tokens stay on the server."""
    texts = [source(given) for given in arguments.text_inputs(inputs, max_tokens)]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInput(f"Input {index} is not a text, which is what entities are found in", index=index)
    common = own.fields(
        model,
        aggregation_strategy=aggregation,
        truncate_prompt_tokens=max_tokens,
        cache_salt=arguments.cache_salt(cache_salt),
    )
    read, join = reading.read_entities, reading.join_entities
    return batched(own, "/classify_tokens", texts, common, read=read, join=join, timeout_s=timeout_s, progress=progress)


def score(
    own: Options,
    queries: Content | Sequence[Content],
    documents: Content | Sequence[Content],
    *,
    activate: bool = True,
    instruction: str | None = None,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
    logits: bool = False,
) -> Call[ScoreResult, ScoreResult]:
    """How well each document answers its query; see `Engine.score`.

    Without `max_tokens` long documents are cut to what the model takes, as the server does it for scores. `logits` asks
    for those too; a server that does not know them leaves them out.
    """
    arguments.whole_number("max_tokens", max_tokens)
    arguments.text("instruction", instruction)
    asked, given = arguments.contents("queries", queries), arguments.contents("documents", documents)
    if len(asked) not in (1, len(given)):
        found = f"found {len(asked)} and {len(given)}"
        raise InvalidInput(f"queries and documents must be 1:1, 1:N or N:N; {found}", param="queries")
    common = {
        **own.fields(
            model,
            use_activation=activate,
            instruction=instruction,
            truncate_prompt_tokens=max_tokens,
            cache_salt=arguments.cache_salt(cache_salt),
        ),
        **options((*asked, *given)),
        **({"return_logits": True} if logits else {}),
    }
    pairs: list[Given] = list(zip(asked, given, strict=True)) if len(asked) > 1 else list(given)

    def fields(some: Sequence[Any]) -> dict[str, object]:
        sides = ([document(pair[0]) for pair in some], [pair[1] for pair in some]) if len(asked) > 1 else (query, some)
        return {**common, "queries": sides[0], "documents": [document(one) for one in sides[1]]}

    query = document(asked[0]) if len(asked) == 1 else None
    return Call(
        total=len(given),
        parts=partial(parts_of, own, "/score", pairs, fields, form_of=lambda given: _ANY),
        read=reading.read_scores,
        join=reading.join_scores,
        timeout_s=timeout_s,
        progress=progress,
    )


def rerank(
    own: Options,
    query: Content,
    documents: Content | Sequence[Content],
    *,
    top_n: int | None = None,
    activate: bool = True,
    instruction: str | None = None,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
) -> Call[ScoreResult, RerankResult]:
    """Documents in the order of how well they answer a query, the best first; see `Engine.rerank` and `score`."""
    # Of scores: a list that is sent in batches cannot be ranked by the server.
    arguments.whole_number("top_n", top_n)
    check_top_n(top_n)
    if len(asked := arguments.contents("query", query)) != 1:
        raise InvalidInput(f"query must be one, not {len(asked)}.", param="query")
    scored = score(
        own,
        query,
        documents,
        activate=activate,
        instruction=instruction,
        max_tokens=max_tokens,
        cache_salt=cache_salt,
        model=model,
        timeout_s=timeout_s,
        progress=progress,
        logits=activate,  # or else all that are sure would be equal
    )
    return Call(
        total=scored.total,
        parts=scored.parts,
        read=scored.read,
        join=lambda parts: rank(scored.join(parts), top_n),
        timeout_s=timeout_s,
        progress=progress,
    )


def tokenize(
    own: Options,
    text: str,
    *,
    add_special_tokens: bool = True,
    model: str | None = None,
    timeout_s: float | None = None,
) -> Call[TokensResult, TokensResult]:
    """The token ids of a text, and what each stands for."""
    if not isinstance(text, str):
        raise InvalidInput(f"text must be a text, not of type {type(text).__name__}.", param="text")
    fields = own.fields(model, prompt=text, add_special_tokens=add_special_tokens, return_token_strs=True)

    def read(answer: Answer) -> TokensResult:
        body = decode(answers.TOKENS, answer.body)
        return TokensResult(tuple(body.tokens), tuple(body.token_strs or ()))

    return single(Request(path="/tokenize", fields=fields), read, timeout_s)


def detokenize(
    own: Options, ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None
) -> Call[str, str]:
    """The text that token ids spell."""
    request = Request(path="/detokenize", fields=own.fields(model, tokens=list(ids)))
    return single(request, lambda answer: decode(answers.TEXT, answer.body).prompt, timeout_s)


def models(own: Options, *, timeout_s: float | None = None) -> Call[tuple[ServedModel, ...], tuple[ServedModel, ...]]:
    """What is served; the first is the one that is asked where no model is named."""

    def read(answer: Answer) -> tuple[ServedModel, ...]:
        found = decode(answers.MODELS, answer.body).data
        return tuple(ServedModel(one.id, one.max_model_len, one.staged_pool) for one in found)

    return single(Request(method="GET", path="/v1/models"), read, timeout_s)


def ready(own: Options, *, timeout_s: float | None = None) -> Call[Readiness, Readiness]:
    """Whether the server takes requests, and why not. Raises `ConnectionFailed` where there is none."""

    def read(answer: Answer) -> Readiness:
        body = decode(answers.READY, answer.body)
        return Readiness(body.ready, body.reason)

    return single(Request(method="GET", path="/ready", results=frozenset({200, 503})), read, timeout_s)
