"""Cohere's `/v2/embed` and `/v1/embed`; the answers differ if the request names no types."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, dump, dump_list, joined
from staged_pool.api.wire.encodings import check_bits
from staged_pool.api.wire.exchange import Body, Write, with_request_id
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.fields import Dimensions, Limit, RequestFields
from staged_pool.api.wire.images import read_image, with_options
from staged_pool.api.wire.input_types import prompt_for
from staged_pool.api.wire.jina import EmbeddingType, encoding_of
from staged_pool.api.wire.parts import ContentPart, document, read_parts
from staged_pool.api.wire.truncation import Truncate
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, Chat, EmbedRequest, Image, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.stages.errors import InvalidInput, NoInputs, Words

Version: TypeAlias = Literal["1", "2"]


class Input(msgspec.Struct):
    """Texts and images that become one vector."""

    content: str | list[ContentPart]


class EmbedBody(RequestFields, kw_only=True):
    """Body of `/v2/embed` and `/v1/embed`; fields that are not named here are ignored."""

    input_type: str | None = None
    """One of the model's prompts, or one of Cohere's own names."""
    texts: list[str] | None = None
    images: list[str] | None = None
    """Data URLs."""
    inputs: list[Input] | None = None
    output_dimension: Dimensions | None = None
    embedding_types: Annotated[list[EmbeddingType], msgspec.Meta(min_length=1)] | None = None
    truncate: Truncate | None = None
    """End at which a text that is too long is cut; default: END."""
    max_tokens: Limit | None = None


_BODY: Final = msgspec.json.Decoder(EmbedBody)


def read_embed(body: Body, card: ModelCard, *, version: Version) -> tuple[EmbedRequest, Write]:
    """See `Read`."""
    fields = read_body(_BODY, body)
    types = tuple(dict.fromkeys(fields.embedding_types or ("float",)))
    for name in types:
        check_bits(encoding_of(name).dtype, fields.output_dimension or card.width, "embedding_types")
    field, inputs = _inputs(fields)
    request = EmbedRequest(
        inputs=inputs,
        name=field,
        words=_words(fields, field),
        model=fields.model,
        cache_salt=fields.cache_salt,
        dimensions=fields.output_dimension,
        prompt_name=prompt_for(fields.input_type, card, strict=True),
    )
    write = partial(
        encode_embed,
        types=None if version == "1" and fields.embedding_types is None else types,
        texts=fields.texts,
        images=any(map(_has_image, inputs)),
        version=version,
    )
    return request, with_request_id(write, fields.request_id)


def _words(fields: EmbedBody, field: str) -> Words:
    endings = [".content"] * len(fields.inputs or ()) if field == "inputs" else []
    names = {
        "dimensions": "output_dimension",
        "max_tokens": "truncate" if fields.max_tokens is None else "max_tokens",
        "prompt_name": "input_type",
    }
    return Words({**names, "input": field}, InputPaths(field, endings=endings))


def _inputs(fields: EmbedBody) -> tuple[str, tuple[TextInput | Image, ...]]:
    """Return the field that holds the inputs, and the inputs."""
    given = [name for name in ("texts", "images", "inputs") if getattr(fields, name)]
    if len(given) != 1:
        message = "Exactly one of texts, images, or inputs must be provided, and it must be non-empty"
        raise (InvalidInput if given else NoInputs)(message, param="texts")
    if fields.images:
        images = (read_image(url, f"images[{index}]", index, bare=False) for index, url in enumerate(fields.images))
        return "images", tuple(with_options(image, fields.media_options()) for image in images)
    if fields.inputs:
        return "inputs", tuple(_input(each, index, fields) for index, each in enumerate(fields.inputs))
    return "texts", tuple(_text(text, fields) for text in fields.texts or ())


def _input(given: Input, index: int, fields: EmbedBody) -> TextInput | Image:
    where = f"inputs[{index}].content"
    if isinstance(given.content, str):
        return _text(given.content, fields)
    if not given.content:
        raise field_error(where, "at least one part is needed", index)
    content = with_options(document(read_parts(given.content, where, index)), fields.media_options())
    return content if isinstance(content, Image) else _text(content, fields)


def _has_image(given: TextInput | Image) -> bool:
    return isinstance(given, Image) or (isinstance(given.source, Chat) and bool(given.source.images))


def _text(text: str | Chat, fields: EmbedBody) -> TextInput:
    limit = fields.max_tokens or None
    added = isinstance(text, str)  # the template of a conversation writes its own special tokens
    if fields.truncate == Truncate.NONE:
        return TextInput(text, max_tokens=limit, must_fit=True, add_special_tokens=added)
    side: Final = "left" if fields.truncate == Truncate.START else "right"
    return TextInput(text, max_tokens=limit or MODEL_MAX, truncate_side=side, add_special_tokens=added)


def encode_embed(
    result: EmbedResult,
    /,
    types: tuple[EmbeddingType, ...] | None,
    texts: list[str] | None,
    images: bool,
    version: Version,
    *,
    request_id: str,
    created: int,
) -> Pieces:
    """Write the answer; see `Write`.

    Args:
        result: The vectors.
        types: Types in which each vector is written, under their names. None: one list of floats without a name.
        texts: The texts to echo.
        images: Count the tokens as `image_tokens`.
        version: Version of Cohere's API.
        request_id: See `Write`.
        created: See `Write`.
    """
    kind = "embeddings_floats" if types is None else "embeddings_by_type"
    units = {"image_tokens" if images else "input_tokens": result.usage.prompt_tokens}
    after = {
        **({} if texts is None else {"texts": texts}),
        "meta": {"api_version": {"version": version}, "billed_units": units},
        "response_type": kind,
    }
    opening = dump({"id": f"embd-{request_id}"})[:-1] + b',"embeddings":'
    embeddings = _column(result, "float") if types is None else joined(_by_type(result, types))
    return joined((opening, embeddings, b"," + dump(after)[1:]))


def _by_type(result: EmbedResult, types: tuple[EmbeddingType, ...]) -> Iterator[Pieces]:
    for place, name in enumerate(types):
        yield (b"," if place else b"{") + dump(name) + b":"
        yield _column(result, name)
    yield b"}"


def _column(result: EmbedResult, name: EmbeddingType) -> Pieces:
    encoding = encoding_of(name)
    rows = (encoding.value(row) for row in result.embeddings)
    return dump_list(rows, item_values=result.embeddings.shape[1])
