"""vLLM's `/pooling`: whatever the model gives for an input, by the name of the task; several from one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from staged_pool.api.wire import jsons
from staged_pool.api.wire.chat import wrong
from staged_pool.api.wire.exchange import Body, EncodingFormat, Write, listing, values
from staged_pool.api.wire.inputs import InputFields, text_inputs
from staged_pool.runtime.model import ModelCard, SparseVector, Values
from staged_pool.runtime.requests import ClassifyRequest, EmbedRequest, Output, TokenClassifyRequest
from staged_pool.runtime.results import ClassifyResult, EmbedResult, TokenClassifyResult

Task: TypeAlias = Literal["embed", "token_embed", "sparse", "classify", "token_classify"]

OUTPUTS: Final[Mapping[Task, Output]] = {
    "embed": Output.DENSE,
    "token_embed": Output.MULTI_VECTOR,
    "sparse": Output.SPARSE,
    "classify": Output.LABELS,
    "token_classify": Output.TOKEN_LABELS,
}
_TASKS: Final[Mapping[Output, Task]] = {output: task for task, output in OUTPUTS.items()}
_VECTORS: Final[frozenset[Task]] = frozenset({"embed", "token_embed", "sparse"})


class PoolingBody(InputFields, kw_only=True):
    """The body of a request; fields that are not named are ignored."""

    task: Task | list[Task] | None = None
    """None: the first that the model has. A list: several of the vectors, each under its name."""
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    use_activation: bool | None = None
    encoding_format: EncodingFormat = "float"
    prompt_name: str | None = None
    """As for `/v1/embeddings`, of the vectors."""
    prompt: str | None = None


_BODY: Final = msgspec.json.Decoder(PoolingBody)


def read_pooling(body: Body, card: ModelCard) -> tuple[EmbedRequest | ClassifyRequest | TokenClassifyRequest, Write]:
    """See `Read`."""
    fields = jsons.decode(_BODY, body)
    given = _TASKS[card.outputs[0]] if fields.task is None else fields.task
    tasks = tuple(dict.fromkeys(given)) if isinstance(given, list) else (given,)
    if not tasks:
        raise wrong("task", "at least one task is needed")
    if len(tasks) > 1 and not _VECTORS.issuperset(tasks):
        raise wrong("task", f"only {', '.join(sorted(_VECTORS))} can be asked for together")
    if fields.dimensions is not None and "embed" not in tasks:
        raise wrong("dimensions", "only for the task embed")
    if not _VECTORS.issuperset(tasks) and (fields.prompt_name, fields.prompt) != (None, None):
        raise wrong("prompt_name", f"prompts are for {', '.join(sorted(_VECTORS))}")
    if fields.prompt_name is not None and fields.prompt is not None:
        raise wrong("prompt_name", "give either `prompt` or `prompt_name`")
    request = _request(fields, tasks)
    return request, partial(encode_pooling, tasks=tasks, named=isinstance(given, list), encoding=fields.encoding_format)


def _request(fields: PoolingBody, tasks: tuple[Task, ...]) -> EmbedRequest | ClassifyRequest | TokenClassifyRequest:
    inputs, activate = text_inputs(fields), fields.use_activation is not False
    if tasks == ("classify",):
        return ClassifyRequest(inputs=inputs, model=fields.model, activate=activate)
    if tasks == ("token_classify",):
        return TokenClassifyRequest(inputs=inputs, model=fields.model, aggregation="none", activate=activate)
    return EmbedRequest(
        inputs=inputs,
        model=fields.model,
        outputs=frozenset(OUTPUTS[task] for task in tasks),
        dimensions=fields.dimensions,
        normalize=activate,
        prompt_name=fields.prompt_name,
        prompt=fields.prompt,
    )


def encode_pooling(
    result: EmbedResult | ClassifyResult | TokenClassifyResult,
    /,
    tasks: tuple[Task, ...],
    named: bool,
    encoding: EncodingFormat,
    *,
    request_id: str,
    created: int,
) -> bytes:
    """Write the answer.

    Args:
        result: Of the request that was made for these tasks.
        tasks: At least one.
        named: Give an object with an entry for each task, rather than what the only one gives.
        encoding: See `values`. In base64 an array of several rows is one string.
        request_id: See `Write`.
        created: See `Write`.
    """
    columns = {task: [_encoded(row, encoding) for row in _rows(result, task)] for task in tasks}
    items: Sequence[object] = (
        [dict(zip(tasks, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if named
        else columns[tasks[0]]
    )
    data = [{"index": index, "object": "pooling", "data": item} for index, item in enumerate(items)]
    return listing("pooling", data, model=result.model, usage=result.usage, request_id=request_id, created=created)


def _rows(result: EmbedResult | ClassifyResult | TokenClassifyResult, task: Task) -> Sequence[Values]:
    """What the result has for one task, an entry for each input."""
    if not isinstance(result, EmbedResult):
        return tuple(result.scores)
    if task == "embed":
        return tuple(result.embeddings)
    return (result.sparse if task == "sparse" else result.multi_vector) or ()


def _encoded(row: Values, encoding: EncodingFormat) -> Any:
    if isinstance(row, SparseVector):
        return {"indices": values(row.indices, encoding), "values": values(row.values, encoding)}
    return values(row, encoding)
