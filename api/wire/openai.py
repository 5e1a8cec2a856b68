"""`/v1/embeddings` and `/v1/models` as the clients of OpenAI, vLLM, Jina and Infinity send and expect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from staged_pool.api.wire import jina, jsons
from staged_pool.api.wire.encodings import DType, Encoding, Endianness, Form, check_bits
from staged_pool.api.wire.exchange import Body, Write, Written, listing, named
from staged_pool.api.wire.fields import Dimensions
from staged_pool.api.wire.inputs import InputFields, Modality, inputs_of
from staged_pool.api.wire.jina import EmbeddingType
from staged_pool.api.wire.lines import LineWriter
from staged_pool.api.wire.pieces import Pieces, dump
from staged_pool.api.wire.raw import write_raw
from staged_pool.api.wire.refusals import wrong
from staged_pool.api.wire.words import vllm_words
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.requests import EmbedRequest
from staged_pool.runtime.results import EmbedResult
from staged_pool.stages.errors import InvalidInput


class EncodingFields(InputFields, kw_only=True):
    """How vectors are to be written."""

    encoding_format: Form | None = None
    embed_dtype: DType | None = None
    endianness: Endianness | None = None

    def encoding(self) -> Encoding:
        return Encoding(self.encoding_format or "float", self.embed_dtype or "float32", self.endianness or "native")


class EmbeddingsBody(EncodingFields, kw_only=True):
    """The body of a request; fields that are not named are ignored."""

    dimensions: Dimensions | None = None
    use_activation: bool | None = None
    input_type: str | None = None
    """The same as `prompt_name`."""
    prompt_name: str | None = None
    """Of the model's prompts: the one that goes before each text."""
    prompt: str | None = None
    """Goes before each text instead."""
    normalize: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    task: str | None = None
    """Jina's for `prompt_name`."""
    embedding_type: EmbeddingType | list[EmbeddingType] | None = None
    """Jina's for `encoding_format` and `embed_dtype`; several give each vector in all of them."""
    normalized: bool | None = None
    """Jina's for `use_activation`."""
    late_chunking: bool | None = None
    """Jina's for one forward over all inputs as parts of one text. Refused."""

    modality: Modality | None = None
    """Infinity's: what a text of `input` is."""


_BODY: Final = msgspec.json.Decoder(EmbeddingsBody)


def read_embeddings(body: Body, card: ModelCard) -> tuple[EmbedRequest, Write]:
    """See `Read`."""
    request, encodings, fields = _read(body, card)
    return request, named(partial(encode_embeddings, encodings=encodings), fields.request_id)


def read_embedding_lines(body: Body, card: ModelCard) -> tuple[EmbedRequest, LineWriter]:
    """See `ReadLines`."""
    request, encodings, fields = _read(body, card)
    if any(encoding.is_bytes for encoding in encodings.values()):
        raise wrong("encoding_format", "lines are JSON; expected `float` or `base64`")

    def write(places: Sequence[int], result: EmbedResult) -> Iterator[Mapping[str, object]]:
        for place, entry in zip(places, _entries(result, encodings), strict=True):
            yield {**entry, "index": place}

    return request, LineWriter("embd", fields.request_id, write)


def _read(body: Body, card: ModelCard) -> tuple[EmbedRequest, Mapping[str, Encoding], EmbeddingsBody]:
    fields = jsons.decode(_BODY, body)
    if fields.normalize is not msgspec.UNSET:
        message = "Parameter `normalize` was removed; use `use_activation` instead."
        raise InvalidInput(message, param="normalize")
    if fields.late_chunking:
        raise wrong("late_chunking", "inputs are read one by one here; send the whole text as one input, or false")
    encodings = _encodings(fields)
    for field, encoding in encodings.items():
        width = card.width if fields.dimensions is None else fields.dimensions
        check_bits(encoding.dtype, width, "embedding_type" if field else "embed_dtype")
    inputs, places = inputs_of(fields, fields.modality or "text")
    request = EmbedRequest(
        inputs=inputs,
        words=vllm_words(places, {"prompt_name": _prompt_field(fields)}),
        model=fields.model,
        cache_salt=fields.cache_salt,
        dimensions=fields.dimensions,
        normalize=fields.use_activation is not False and fields.normalized is not False,
        prompt_name=_prompt_name(fields, card),
        prompt=fields.prompt,
    )
    return request, encodings, fields


def _prompt_field(fields: EmbeddingsBody) -> str:
    """The field that names a prompt in this request."""
    given = [name for name in ("prompt_name", "input_type", "task") if getattr(fields, name) is not None]
    return given[0] if given else "prompt_name"


def _prompt_name(fields: EmbeddingsBody, card: ModelCard) -> str | None:
    given = [name for name in (fields.input_type, fields.prompt_name, fields.task) if name is not None]
    names = {*given, *([] if fields.prompt is None else [None])}
    if len(names) > 1:
        raise wrong("prompt_name", "give one of `prompt`, `prompt_name`, `input_type` and `task`")
    if fields.task is not None:
        return jina.prompt_name(fields.task, card)
    return next(iter(given), None)


def _encodings(fields: EmbeddingsBody) -> Mapping[str, Encoding]:
    """How each vector is written; under the empty name where it is asked for in one way only."""
    types = fields.embedding_type
    if types is None:
        return {"": fields.encoding()}
    if isinstance(types, str):
        types = [types]
    if not types:
        raise wrong("embedding_type", "at least one type is needed")
    names = dict.fromkeys(types)
    if len(names) == 1:
        return {"": jina.encoding_of(types[0])}
    return {name: jina.encoding_of(name) for name in names}


def encode_embeddings(
    result: EmbedResult, /, encodings: Mapping[str, Encoding], *, request_id: str, created: int
) -> Pieces | Written:
    """Write the answer; see `Write`.

    Args:
        result: What was asked for.
        encodings: How each vector is written; several give an object with an entry for each.
        request_id: See `Write`.
        created: See `Write`.
    """
    about: dict[str, Any] = {"model": result.model, "usage": result.usage, "request_id": request_id, "created": created}
    first = next(iter(encodings.values()))
    if first.is_bytes:
        return write_raw(result.embeddings, first, kind="embd", **about)
    return listing("embd", _entries(result, encodings), item_values=result.embeddings.shape[1], **about)


def _entries(result: EmbedResult, encodings: Mapping[str, Encoding]) -> Iterator[Mapping[str, object]]:
    single = next(iter(encodings.values())) if len(encodings) == 1 else None
    for index, row in enumerate(result.embeddings):
        if single is not None:
            yield {"index": index, "object": "embedding", "embedding": single.value(row), **single.scale(row)}
        else:
            each = {name: encoding.value(row) for name, encoding in encodings.items()}
            scale = next((found for encoding in encodings.values() if (found := encoding.scale(row))), {})
            yield {"index": index, "object": "embedding", "embedding": each, **scale}


def encode_models(cards: Sequence[ModelCard], *, created: int) -> bytes:
    """Write the list of the models that are served. `created` is in seconds since 1970."""
    data = [
        {
            "id": card.name,
            "object": "model",
            "created": created,
            "owned_by": "staged-pool",
            "root": card.name,
            "parent": None,
            "max_model_len": card.max_tokens,
            "permission": [],
            "staged_pool": msgspec.to_builtins(card),
        }
        for card in cards
    ]
    return dump({"object": "list", "data": data})
