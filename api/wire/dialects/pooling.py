"""vLLM's `/pooling`: outputs of the model by the name of the task, several from one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.binary_vectors import write_raw
from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, average
from staged_pool.api.wire.dialects.openai import EncodingFields
from staged_pool.api.wire.encodings import INTEGERS, Encoding
from staged_pool.api.wire.exchange import Body, Write, Written, listing, with_request_id
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import vllm_words
from staged_pool.api.wire.fields import ANY_JSON, Dimensions
from staged_pool.api.wire.inputs import inputs_of, text_inputs
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.payloads import SparseVector, Values
from staged_pool.runtime.requests import ClassifyRequest, EmbedRequest, Output, Outputs, TokenClassifyRequest
from staged_pool.runtime.results import ClassifyResult, EmbedResult, TokenClassifyResult
from staged_pool.stages.errors import InvalidInput, shortened

PoolingTask: TypeAlias = Literal["embed", "token_embed", "sparse", "classify", "token_classify"]

POOLING_TASKS: Final[Mapping[Output, PoolingTask]] = {
    Output.DENSE: "embed",
    Output.MULTI_VECTOR: "token_embed",
    Output.SPARSE: "sparse",
    Output.LABELS: "classify",
    Output.TOKEN_LABELS: "token_classify",
    Output.TOKEN_WEIGHTS: "token_classify",
}
"""vLLM's names of outputs. No model has both outputs that are called `token_classify`."""
NAMES: Final[frozenset[str]] = frozenset(POOLING_TASKS.values())
_SCORE: Final = "score"
_WITH_OFFSETS: Final = frozenset({Output.MULTI_VECTOR, Output.TOKEN_LABELS})
_OF_EMBED: Final = frozenset({Output.DENSE, Output.MULTI_VECTOR, Output.SPARSE, Output.TOKEN_WEIGHTS})
"""Outputs that one request may have together, from one forward."""


class PoolingBody(EncodingFields, kw_only=True):
    """Body of `/pooling`; fields that are not named here are ignored."""

    task: str | list[str] | None = None
    """`embed`, `token_embed`, `sparse`, `classify` or `token_classify`; `plugin` for `data`.

    `score` of a cross-encoder is `classify`. None: the first task that the model has. A list: several embedding tasks,
    with an entry for each under its name.
    """
    dimensions: Dimensions | None = None
    use_activation: bool | None = None
    data: Annotated[Any, msgspec.Meta(extra_json_schema=ANY_JSON)] = None
    """Data for a plugin, instead of inputs: any JSON value that the plugin takes."""
    plugin: str | None = None
    """Name of the plugin, if several are served."""
    prompt_name: str | None = None
    """Prompt of embedding tasks, as for `/v1/embeddings`."""
    prompt: str | None = None
    max_active_dims: Dimensions | None = None
    """For `sparse`: number of the largest weights to keep of each vector."""
    return_offsets: bool | None = None
    """For `token_embed`, and labels of tokens: add `offsets`, the first character and the end of each token.

    They are null for an input that is no text.
    """


class _TaskOnly(msgspec.Struct):
    task: Any = None


_BODY: Final = msgspec.json.Decoder(PoolingBody)
_TASK: Final = msgspec.json.Decoder(_TaskOnly)


class Narrowed(NamedTuple):
    """Conditions of a body on the model, in addition to those of the route."""

    able: Callable[[ModelCard], bool]
    """Return True if the model can do all tasks of the body."""
    meant: Callable[[ModelCard], bool]
    """Return True if the model was made for these tasks; it is preferred to one that is only able."""


def narrowed(body: Body) -> Narrowed:
    """Return the conditions of a body on the model.

    Raises:
        InvalidInput: A task is unknown.
    """
    task = json_decode.decode(_TASK, body).task
    wanted = {each for each in (task if isinstance(task, list) else [task]) if isinstance(each, str)}
    if unknown := sorted(wanted - NAMES - {_SCORE}):
        raise _unsupported(unknown[0], [*dict.fromkeys(POOLING_TASKS.values()), _SCORE])
    labels = wanted == {POOLING_TASKS[Output.LABELS]}
    return Narrowed(
        able=lambda card: not card.is_plugin and wanted <= _able(card).keys(),
        meant=lambda card: not labels or card.scoring is None,
    )


def read_pooling(body: Body, card: ModelCard) -> tuple[EmbedRequest | ClassifyRequest | TokenClassifyRequest, Write]:
    """See `Read`."""
    fields = read_body(_BODY, body)
    if card.is_plugin:
        raise field_error("data", f"this field is required: `{card.name}` is a plugin, and takes data of its own")
    asked = _asked(fields.task, card)
    tasks = tuple(asked)
    if len(tasks) > 1 and not _OF_EMBED.issuperset(asked.values()):
        raise field_error("task", f"of the model's tasks, only {_embedding(card)} can be combined in one request")
    if fields.dimensions is not None and "embed" not in tasks:
        raise field_error("dimensions", "only for the task embed")
    if fields.max_active_dims is not None and "sparse" not in tasks:
        raise field_error("max_active_dims", "only for the task sparse")
    if not _OF_EMBED.issuperset(asked.values()) and (fields.prompt_name, fields.prompt) != (None, None):
        raise field_error("prompt_name", "prompts are only for embedding tasks")
    if fields.prompt_name is not None and fields.prompt is not None:
        raise field_error("prompt_name", "give either `prompt` or `prompt_name`")
    encoding, by_name = fields.encoding(), isinstance(fields.task, list)
    if encoding.dtype in INTEGERS and "sparse" in tasks:
        raise field_error(
            "embed_dtype", f"the weights of sparse vectors are written as floats, not as {encoding.dtype}"
        )
    if encoding.is_bytes and (by_name or "sparse" in tasks):
        raise field_error(
            "encoding_format", "bytes have one array for each input: expected one task as a text, and not sparse"
        )
    if fields.return_offsets:
        if not _WITH_OFFSETS.intersection(asked.values()):
            raise field_error("return_offsets", "only for token_embed, and for token_classify by labels")
        if encoding.is_bytes:
            raise field_error("return_offsets", "bytes have one array for each input, and no room for offsets")
    request = _request(fields, frozenset(asked.values()))
    write = partial(
        encode_pooling, tasks=tasks, by_name=by_name, encoding=encoding, with_offsets=bool(fields.return_offsets)
    )
    return request, with_request_id(write, fields.request_id)


def _asked(given: str | list[str] | None, card: ModelCard) -> dict[PoolingTask, Output]:
    """Return the tasks of a request in its order, and the output of each.

    Raises:
        InvalidInput: The model cannot do one of them; the message lists those that it can.
    """
    able = _able(card)
    names = [POOLING_TASKS[card.outputs[0]]] if given is None else [given] if isinstance(given, str) else given
    if not names:
        raise field_error("task", "at least one task is needed")
    for name in names:
        if name not in able:
            raise _unsupported(name, [POOLING_TASKS[output] for output in card.outputs])
    return {POOLING_TASKS[able[name]]: able[name] for name in names}


def _unsupported(name: str, known: Sequence[str]) -> InvalidInput:
    listed = ", ".join(f"'{each}'" for each in known)
    return InvalidInput(f"Unsupported task: '{shortened(name)}' Supported tasks: ({listed})", param="task")


def _able(card: ModelCard) -> dict[str, Output]:
    """Return the model's outputs by the names of its tasks."""
    able: dict[str, Output] = {POOLING_TASKS[output]: output for output in reversed(card.outputs)}
    return able | {_SCORE: Output.LABELS} if card.scoring == "cross-encoder" else able


def _embedding(card: ModelCard) -> str:
    return ", ".join(sorted(POOLING_TASKS[output] for output in card.outputs if output in _OF_EMBED)) or "none"


def _request(fields: PoolingBody, outputs: Outputs) -> EmbedRequest | ClassifyRequest | TokenClassifyRequest:
    activate = fields.use_activation is not False
    if outputs == {Output.TOKEN_LABELS}:
        texts, places = text_inputs(fields)
        words = vllm_words(places)
        return TokenClassifyRequest(
            inputs=texts,
            words=words,
            model=fields.model,
            cache_salt=fields.cache_salt,
            aggregation="none",
            activate=activate,
        )
    inputs, places = inputs_of(fields)
    words = vllm_words(places)
    if outputs == {Output.LABELS}:
        return ClassifyRequest(
            inputs=inputs, words=words, model=fields.model, cache_salt=fields.cache_salt, activate=activate
        )
    return EmbedRequest(
        inputs=inputs,
        words=words,
        model=fields.model,
        cache_salt=fields.cache_salt,
        outputs=outputs,
        dimensions=fields.dimensions,
        normalize=activate,
        prompt_name=fields.prompt_name,
        prompt=fields.prompt,
        offsets=bool(fields.return_offsets),
        max_active_dims=fields.max_active_dims,
    )


def encode_pooling(
    result: EmbedResult | ClassifyResult | TokenClassifyResult,
    /,
    tasks: tuple[PoolingTask, ...],
    by_name: bool,
    encoding: Encoding,
    with_offsets: bool = False,
    *,
    request_id: str,
    created: int,
) -> Pieces | Written:
    """Write the answer.

    Args:
        result: Result of the request.
        tasks: The tasks of the request; at least one.
        by_name: Write an object with an entry for each task. False: write the output of the only task.
        encoding: Encoding of each array.
        with_offsets: Add the offsets of the tokens of each input.
        request_id: See `Write`.
        created: See `Write`.
    """
    about: dict[str, Any] = {"model": result.model, "usage": result.usage, "request_id": request_id, "created": created}
    rows = {task: _rows(result, task) for task in tasks}
    if encoding.is_bytes:
        arrays = [row for row in rows[tasks[0]] if not isinstance(row, SparseVector)]
        return write_raw(arrays, encoding, kind="pooling", **about)
    columns = zip(*rows.values(), strict=True)
    data = (
        {
            "index": index,
            "object": "pooling",
            **_entry(dict(zip(tasks, row, strict=True)), by_name, encoding),
            **(_offsets(result, index, by_name) if with_offsets else {}),
        }
        for index, row in enumerate(columns)
    )
    values = average(sum(row.size for each in rows.values() for row in each), len(rows[tasks[0]]))
    return listing("pooling", data, item_values=values, **about)


def _entry(row: Mapping[PoolingTask, Values], by_name: bool, encoding: Encoding) -> Mapping[str, object]:
    data = {task: _encoded(values, encoding) for task, values in row.items()}
    scales = {
        task: found["scale"]
        for task, values in row.items()
        if not isinstance(values, SparseVector) and (found := encoding.scale(values))
    }
    if by_name:
        return {"data": data, **({"scale": scales} if scales else {})}
    [task] = row
    return {"data": data[task], **({"scale": scales[task]} if scales else {})}


def _offsets(
    result: EmbedResult | ClassifyResult | TokenClassifyResult, index: int, by_name: bool
) -> Mapping[str, object]:
    """Return the field with the offsets of one input."""
    assert not isinstance(result, ClassifyResult)
    found = None if result.offsets is None else result.offsets[index]
    pairs = None if found is None else found.tolist()
    name = "token_embed" if isinstance(result, EmbedResult) else "token_classify"
    return {"offsets": {name: pairs} if by_name else pairs}


def _rows(result: EmbedResult | ClassifyResult | TokenClassifyResult, task: PoolingTask) -> Sequence[Values]:
    """Return the result's values for one task, an entry for each input."""
    if not isinstance(result, EmbedResult):
        return tuple(result.scores)
    if task == "embed":
        return tuple(result.embeddings)
    found = {"sparse": result.sparse, "token_embed": result.multi_vector, "token_classify": result.token_weights}[task]
    return found or ()


def _encoded(row: Values, encoding: Encoding) -> Any:
    if isinstance(row, SparseVector):
        return {"indices": encoding.value(row.indices), "values": encoding.value(row.values)}
    return encoding.value(row)
