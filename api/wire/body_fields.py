"""Fields of a body that its route does not have: those that would change results are rejected, and others noted.

Other servers have these fields, and their clients send them. Ignored, such a field would give other vectors than those
that were asked for, and nobody would see it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Final, NamedTuple, TypeVar

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.field_errors import field_error
from staged_pool.stages.errors import InvalidInput, TooLarge

T = TypeVar("T", bound=msgspec.Struct)

HEADER: Final = b"x-ignored-fields"
"""Header of an answer with the fields of the request that were ignored."""

_NAMED: Final = 10
"""Most fields that the header names."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names that the header repeats; others are counted."""


class Meaning(NamedTuple):
    """Fields of one meaning in the interfaces of different servers."""

    fields: tuple[str, ...]
    otherwise: str
    """The remedy where a route has none of these fields."""
    harmless: tuple[object, ...] = ()
    """Values that ask for the usual result, beside null and empty ones."""
    no_is_harmless: bool = True
    """False: the value false asks for something, too."""


MEANINGS: Final = (
    Meaning(
        (
            "dimensions",
            "output_dimension",
            "truncate_dim",
            "matryoshka_dim",
            "outputDimensionality",
            "output_dimensionality",
        ),
        "this route gives whole vectors",
    ),
    Meaning(
        ("output_dtype", "embed_dtype", "embedding_types", "embedding_type", "precision"),
        "this route gives numbers of float32",
        ("float", "float32", ["float"]),
    ),
    Meaning(
        ("prompt_name", "input_type", "task_type", "taskType", "text_type"),
        "this route puts no prompt before its inputs",
    ),
    Meaning(("is_query",), "this route tells no queries from documents", no_is_harmless=False),
    Meaning(("prompt", "instruction", "instruct", "query_instruction"), "this route puts no prompt before its inputs"),
    Meaning(
        ("truncate_prompt_tokens", "max_tokens", "max_length", "max_seq_length", "max_tokens_per_doc"),
        "this route does not cut inputs to a number of tokens",
    ),
    Meaning(
        ("normalized", "normalize", "use_activation", "normalize_embeddings", "embd_normalize"),
        "the model determines the length of its vectors",
        (True, 2),
        no_is_harmless=False,
    ),
    Meaning(("late_chunking",), "/v1/embeddings has `late_chunking`"),
    Meaning(("late_chunking_params",), "/v1/embeddings has `late_chunking_params`"),
    Meaning(
        ("chunk_size", "chunk_overlap", "enable_auto_chunking"), "texts are not cut here: send each chunk as an input"
    ),
    Meaning(("lora_path", "lora", "lora_name"), "an adapter is served under a name of its own: send it as `model`"),
    Meaning(
        ("pooling", "pooling_type", "pooling_method", "pool_factor", "protected_tokens"),
        "the model's folder determines how token vectors are joined",
        (1,),
    ),
    Meaning(("max_active_dims",), "/pooling and /embed_sparse limit the weights of sparse vectors"),
    Meaning(
        ("return_dense", "return_sparse", "return_colbert_vecs", "return_multivector"),
        "/pooling gives these outputs, by its field `task`",
    ),
    Meaning(
        ("images", "image_data", "videos", "video_data"), "this route reads texts: /v1/embeddings reads images, too"
    ),
    Meaning(("label_token_ids", "apply_softmax", "item_first"), "the model's folder determines how it scores"),
)
"""Fields that change results, by their meaning. A route that has one of them is the remedy for the others."""

_MEANING_OF: Final = {name: meaning for meaning in MEANINGS for name in meaning.fields}

_ANY: Final = msgspec.json.Decoder(object)
_NOTED: Final[ContextVar[dict[str, None] | None]] = ContextVar("noted_fields", default=None)


@contextmanager
def noting() -> Iterator[Collection[str]]:
    """Yield the names of the fields that are ignored in the block, in their order."""
    noted: dict[str, None] = {}
    token = _NOTED.set(noted)
    try:
        yield noted.keys()
    finally:
        _NOTED.reset(token)


def read_body(decoder: msgspec.json.Decoder[T], body: bytes | bytearray, *, most_depth: int | None = None) -> T:
    """Decode a whole body, whose fields are those of its type.

    Args:
        decoder: Decoder of the type.
        body: The JSON.
        most_depth: See `json_decode.decode`.

    Raises:
        InvalidInput: As for `json_decode.decode`; or a field would change the results, and the route does not have it.
    """
    try:
        value: T = json_decode.decode(_strict(decoder.type), body, most_depth=most_depth)
        return value
    except TooLarge:
        raise
    except InvalidInput:  # rare: a field that the type lacks, or an error, which the next line raises
        value = json_decode.decode(decoder, body, most_depth=most_depth)
    known = decoder.type.__struct_encode_fields__
    noted = _NOTED.get()
    for name, raw in json_decode.fields_of(body).items():
        if name in known:
            continue
        if (meaning := _MEANING_OF.get(name)) is not None and not _is_harmless(raw, meaning):
            raise field_error(name, f"is no field of this route; {_remedy(meaning, known)}")
        if noted is not None:
            noted[name] = None
    return value


def headers_of(names: Collection[str]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header for ignored fields, if there are any: at most ten names, and the number of others."""
    if not names:
        return ()
    named = [name for name in names if _NAME.fullmatch(name)][:_NAMED]
    others = len(names) - len(named)
    return ((HEADER, ", ".join([*named, *([f"+{others}"] if others else [])]).encode()),)


@cache
def _strict(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Make a decoder that rejects further fields: it tells in one pass that a body has none, as most have not."""
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, [], bases=(kind,), forbid_unknown_fields=True))


def _is_harmless(raw: msgspec.Raw, meaning: Meaning) -> bool:
    value = json_decode.decode(_ANY, raw, counted=False)
    if value is False and not meaning.no_is_harmless:
        return False
    return not value or any(type(value) is type(known) and value == known for known in meaning.harmless)


def _remedy(meaning: Meaning, known: Collection[str]) -> str:
    ours = next((name for name in meaning.fields if name in known), None)
    return meaning.otherwise if ours is None else f"send `{ours}`"
