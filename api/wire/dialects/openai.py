"""`/v1/embeddings` and `/v1/models`, for clients of OpenAI, vLLM, Jina, Infinity, Voyage, NIM and Mixedbread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from staged_pool.api.wire import jina
from staged_pool.api.wire.binary_vectors import write_raw
from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, average, dump
from staged_pool.api.wire.dialects.late_chunking import LateChunkingParams, check_answer, chunk_entries
from staged_pool.api.wire.encodings import EmbedDType, Encoding, Endianness, Form, check_bits
from staged_pool.api.wire.exchange import Body, Write, Written, listing, with_request_id
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import vllm_words
from staged_pool.api.wire.fields import Dimensions, Limit
from staged_pool.api.wire.input_types import prompt_for
from staged_pool.api.wire.inputs import InputFields, Modality, inputs_of
from staged_pool.api.wire.jina import EmbeddingType
from staged_pool.api.wire.ndjson import LineWriter
from staged_pool.api.wire.truncation import Truncate, TruncationSide
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import DENSE_ONLY, MODEL_MAX, EmbedRequest
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.tasks.token_chunks import CHUNKED
from staged_pool.stages.errors import InvalidInput


class EncodingFields(InputFields, kw_only=True):
    """Fields with the encoding of vectors."""

    encoding_format: Form | None = None
    embed_dtype: EmbedDType | None = None
    endianness: Endianness | None = None

    def encoding(self) -> Encoding:
        return Encoding(self.encoding_format or "float", self.embed_dtype or "float32", self.endianness or "native")


ElementType: TypeAlias = Literal["float16", "int8", "uint8", "binary", "ubinary"]
"""Mixedbread's values of `encoding_format` that name a data type."""


class EmbeddingsBody(InputFields, kw_only=True):
    """Body of `/v1/embeddings`; fields that are not named here are ignored."""

    encoding_format: Form | ElementType | list[EmbeddingType] | None = None
    """Form of the vectors. Mixedbread's clients also send data types; a list writes each vector in all of them."""
    embed_dtype: EmbedDType | None = None
    endianness: Endianness | None = None
    dimensions: Limit | None = None
    """Width of the vectors. 0, which Infinity's clients send with `modality`, is the full width."""
    use_activation: bool | None = None
    input_type: str | None = None
    """Use of the texts: one of the model's prompts, or query, document or passage.

    Ignored by a model without prompts.
    """
    prompt_name: str | None = None
    """Name of the model's prompt that is put before each text."""
    prompt: str | None = None
    """Text that is put before each text, as an alternative to `prompt_name`."""
    normalize: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    task: str | None = None
    """Jina's name of `prompt_name`."""
    embedding_type: EmbeddingType | list[EmbeddingType] | None = None
    """Jina's name of `encoding_format` and `embed_dtype`; a list writes each vector in all types."""
    normalized: bool | None = None
    """Jina's name of `use_activation`."""
    late_chunking: bool | None = None
    """Jina's option to read all texts in one forward, as the chunks of one document."""

    late_chunking_params: LateChunkingParams | None = None
    """vLLM's option for a vector of each chunk of each text."""

    modality: Modality | None = None
    """Infinity's field: meaning of a text in `input`."""

    output_dimension: Dimensions | None = None
    """Voyage's name of `dimensions`."""
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = None
    """Voyage's name of `embed_dtype`."""
    truncation: bool | None = None
    """Voyage's field: true truncates a text that is too long, false rejects it."""
    truncate: bool | Truncate | None = None
    """NIM's field (the end that is cut), and Jina's (true or false)."""


_BODY: Final = msgspec.json.Decoder(EmbeddingsBody)


def read_embeddings(
    body: Body, card: ModelCard, *, cut: bool = False, modality: Modality = "text"
) -> tuple[EmbedRequest, Write]:
    """See `Read`.

    Args:
        body: See `Read`.
        card: See `Read`.
        cut: Truncate long inputs if the request does not say, as Infinity and text-embeddings-inference do.
        modality: Meaning of a text in `input` if the request does not say.
    """
    request, encodings, fields = _read(body, card, cut=cut, modality=modality)
    echoed = _echoed(fields, request)
    if request.chunk_tokens is not None:
        return request, with_request_id(partial(_encode_chunks, request.chunk_tokens, **echoed), fields.request_id)
    write = partial(encode_embeddings, encodings=encodings, **echoed)
    return request, with_request_id(write, fields.request_id)


def _echoed(fields: EmbeddingsBody, request: EmbedRequest) -> Mapping[str, Any]:
    """Return the request fields to echo for Mixedbread's clients; none for other clients."""
    given = fields.encoding_format
    if fields.normalized is None and not _names_types(fields):
        return {}
    return {"normalized": request.normalize, "encoding_format": given or "float", "dimensions": request.dimensions}


def read_embedding_lines(body: Body, card: ModelCard, *, cut: bool = False) -> tuple[EmbedRequest, LineWriter]:
    """See `ReadLines` and `read_embeddings`."""
    request, encodings, fields = _read(body, card, cut=cut)
    if any(encoding.is_bytes for encoding in encodings.values()):
        raise field_error("encoding_format", "lines are JSON; expected `float` or `base64`")

    def write(places: Sequence[int], result: EmbedResult) -> Iterator[Mapping[str, object]]:
        size = request.chunk_tokens
        entries = _entries(result, encodings) if size is None else chunk_entries(result, size)
        for place, entry in zip(places, entries, strict=True):
            yield {**entry, "index": place}

    return request, LineWriter("embd", fields.request_id, write)


def _read(
    body: Body, card: ModelCard, *, cut: bool, modality: Modality = "text"
) -> tuple[EmbedRequest, Mapping[str, Encoding], EmbeddingsBody]:
    fields = read_body(_BODY, body)
    if fields.normalize is not msgspec.UNSET:
        message = "Parameter `normalize` was removed; use `use_activation` instead."
        raise InvalidInput(message, param="normalize")
    dimensions = _dimensions(fields)
    type_field, encodings = _encodings(fields)
    for encoding in encodings.values():
        check_bits(encoding.dtype, card.width if dimensions is None else dimensions, type_field)
    chunking = fields.late_chunking_params
    if chunking is not None:
        check_answer(encodings, fields.padding)
    words = _words(fields)
    _set_truncation(fields, cut and not card.splits_long_inputs and chunking is None)
    inputs, places = inputs_of(fields, fields.modality or modality)
    request = EmbedRequest(
        inputs=inputs,
        words=vllm_words(places, words),
        model=fields.model,
        cache_salt=fields.cache_salt,
        dimensions=dimensions,
        normalize=fields.use_activation is not False and fields.normalized is not False,
        prompt_name=_prompt_name(fields, card),
        prompt=fields.prompt,
        late_chunking=bool(fields.late_chunking),
        outputs=DENSE_ONLY if chunking is None else CHUNKED,
        chunk_tokens=None if chunking is None else chunking.chunk_size,
    )
    return request, encodings, fields


def _words(fields: EmbeddingsBody) -> Mapping[str, str]:
    """Return the request's names of fields for which several dialects have a name."""
    prompts = [name for name in ("prompt_name", "input_type", "task") if getattr(fields, name) is not None]
    cuts = [name for name in ("truncation", "truncate") if getattr(fields, name) is not None]
    return {
        **({"prompt_name": prompts[0]} if prompts else {}),
        **({"max_tokens": cuts[0]} if cuts and not fields.truncate_prompt_tokens else {}),
        **({"dimensions": "output_dimension"} if fields.output_dimension else {}),
        "chunk_tokens": "late_chunking_params",
    }


def _dimensions(fields: EmbeddingsBody) -> int | None:
    if fields.dimensions == 0 and fields.modality is None:
        raise field_error("dimensions", "Expected `int` >= 1")
    given = fields.dimensions or None
    if given and fields.output_dimension not in (None, given):
        raise field_error("output_dimension", "give either `dimensions` or `output_dimension`")
    return given or fields.output_dimension


def _set_truncation(fields: EmbeddingsBody, default: bool) -> None:
    """Convert the truncation fields of Voyage, NIM or Jina to vLLM's fields."""
    truncate = fields.truncate if fields.truncation is None else fields.truncation
    if isinstance(truncate, str):
        if truncate != Truncate.NONE and fields.truncation_side is None:
            fields.truncation_side = TruncationSide.LEFT if truncate == Truncate.START else TruncationSide.RIGHT
        truncate = truncate != Truncate.NONE
    if fields.truncate_prompt_tokens is None and (default if truncate is None else truncate):
        fields.truncate_prompt_tokens = MODEL_MAX


def _prompt_name(fields: EmbeddingsBody, card: ModelCard) -> str | None:
    values = {name: getattr(fields, name) for name in ("prompt_name", "input_type", "task", "prompt")}
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1 and ("prompt" in given or len({values[name] for name in given}) > 1):
        raise field_error(given[0], f"give one of {' and '.join(f'`{name}`' for name in given)}")
    if fields.task is not None:
        return jina.prompt_name(fields.task, card)
    return prompt_for(fields.input_type, card) if fields.prompt_name is None else fields.prompt_name


def _names_types(fields: EmbeddingsBody) -> bool:
    given = fields.encoding_format
    return isinstance(given, list) or given in get_args(ElementType)


def _encodings(fields: EmbeddingsBody) -> tuple[str, Mapping[str, Encoding]]:
    """Return the field that names the data types, and the encodings by type.

    A single encoding has the empty name.
    """
    field: str = "embedding_type"
    types: Any = fields.embedding_type
    if types is None and _names_types(fields):
        field, types = "encoding_format", fields.encoding_format
    if types is None:
        return _plain_encoding(fields)
    if isinstance(types, str):
        types = [types]
    if not types:
        raise field_error(field, "at least one type is needed")
    names = dict.fromkeys(types)
    if len(names) == 1:
        return field, {"": jina.encoding_of(types[0])}
    return field, {name: jina.encoding_of(name) for name in names}


def _plain_encoding(fields: EmbeddingsBody) -> tuple[str, Mapping[str, Encoding]]:
    """Return the single encoding of vLLM's or Voyage's fields; see `_encodings`."""
    form: Any = fields.encoding_format or "float"
    if fields.output_dtype is None:
        return "embed_dtype", {"": Encoding(form, fields.embed_dtype or "float32", fields.endianness or "native")}
    dtype: EmbedDType = "float32" if fields.output_dtype == "float" else fields.output_dtype
    return "output_dtype", {"": Encoding(form, dtype, fields.endianness or "little")}


def encode_embeddings(
    result: EmbedResult, /, encodings: Mapping[str, Encoding], *, request_id: str, created: int, **echoed: Any
) -> Pieces | Written:
    """Write the answer; see `Write`.

    Args:
        result: The vectors.
        encodings: Encodings of each vector; several write an object with an entry for each.
        request_id: See `Write`.
        created: See `Write`.
        echoed: Additional fields of the answer.
    """
    about: dict[str, Any] = {"model": result.model, "usage": result.usage, "request_id": request_id, "created": created}
    first = next(iter(encodings.values()))
    if first.is_bytes:
        return write_raw(result.embeddings, first, kind="embd", **about)
    kind = "embedding_dict" if isinstance(echoed.get("encoding_format"), list) and len(encodings) > 1 else "embedding"
    entries = _entries(result, encodings, kind)
    return listing("embd", entries, item_values=result.embeddings.shape[1], **about, **echoed)


def _encode_chunks(
    chunk_size: int, result: EmbedResult, /, *, request_id: str, created: int, **echoed: Any
) -> Pieces | Written:
    """Write an answer with the vectors of chunks; see `Write`."""
    about: dict[str, Any] = {"model": result.model, "usage": result.usage, "request_id": request_id, "created": created}
    vectors = result.multi_vector or ()
    values = average(sum(each.size for each in vectors), len(vectors))
    return listing("embd", chunk_entries(result, chunk_size), item_values=values, **about, **echoed)


def _entries(
    result: EmbedResult, encodings: Mapping[str, Encoding], kind: str = "embedding"
) -> Iterator[Mapping[str, object]]:
    single = next(iter(encodings.values())) if len(encodings) == 1 else None
    for index, row in enumerate(result.embeddings):
        if single is not None:
            yield {"index": index, "object": "embedding", "embedding": single.value(row), **single.scale(row)}
        else:
            each = {name: encoding.value(row) for name, encoding in encodings.items()}
            scale = next((found for encoding in encodings.values() if (found := encoding.scale(row))), {})
            yield {"index": index, "object": kind, "embedding": each, **scale}


def encode_models(cards: Sequence[ModelCard], *, created: int) -> bytes:
    """Write the list of the served models. `created` is in seconds since 1970."""
    return dump({"object": "list", "data": [model_object(card, created=created) for card in cards]})


def model_object(card: ModelCard, *, created: int) -> dict[str, object]:
    """Describe one served model. `created` is in seconds since 1970."""
    return {
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
