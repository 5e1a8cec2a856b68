"""Ollama's `/api/embed` and `/api/embeddings`, and its routes that describe models.

Ollama's model names have a tag after a colon. A served name without a tag gets the tag `latest`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, dump, dump_around
from staged_pool.api.wire.exchange import Body, Write
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.fields import Limit, ModelName
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, EmbedRequest, Output, TextInput
from staged_pool.runtime.results import EmbedResult
from staged_pool.stages.errors import UnknownModel, Words, shortened

API_VERSION: Final = "0.12.0"
"""Ollama release of this API; clients check it before they use a newer route."""

_LATEST: Final = ":latest"
_BITS: Final[Mapping[str, tuple[str, int]]] = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


class OllamaOptions(msgspec.Struct):
    """Settings of the model; those that are not named here are ignored."""

    num_ctx: Limit | None = None
    """Maximum tokens of a text, special tokens included."""


class OllamaEmbedBody(msgspec.Struct):
    """Body of `/api/embed`; fields that are not named here are ignored."""

    model: ModelName | None = None
    """Name with or without the tag. None: the first model with embeddings."""
    input: str | list[str] | None = None
    """Without a text the answer has no vectors; clients send such a request to load the model."""
    truncate: bool | None = None
    """False rejects a text that is too long; otherwise it is truncated."""
    dimensions: Limit | None = None
    options: OllamaOptions | None = None


class OllamaEmbeddingsBody(msgspec.Struct):
    """Body of `/api/embeddings`; fields that are not named here are ignored."""

    model: ModelName | None = None
    """Name with or without the tag. None: the first model with embeddings."""
    prompt: str | None = None
    options: OllamaOptions | None = None


class ShowBody(msgspec.Struct):
    """Body of `/api/show`."""

    model: ModelName | None = None
    name: ModelName | None = None
    """Older clients' name of `model`."""


class _Named(msgspec.Struct):
    model: ModelName | None = None


_EMBED: Final = msgspec.json.Decoder(OllamaEmbedBody)
_EMBEDDINGS: Final = msgspec.json.Decoder(OllamaEmbeddingsBody)
_SHOW: Final = msgspec.json.Decoder(ShowBody)
_NAMED: Final = msgspec.json.Decoder(_Named)


def tagged(name: str) -> str:
    """Return the name of a model with its tag."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def served_name(given: str, served: Iterable[str]) -> str:
    """Find the served name for a client's name, with or without the tag `latest`.

    Without a match the name is returned as given.
    """
    return next((name for name in served if name == given), None) or next(
        (name for name in served if tagged(name) == tagged(given)), given
    )


def model_of(body: Body, served: Iterable[str]) -> str | None:
    """Return the served name of the model that a request names; None if it names none.

    Raises:
        InvalidInput: See `json_decode.decode`.
    """
    return _served(json_decode.decode(_NAMED, body).model, served)


def _served(given: str | None, served: Iterable[str]) -> str | None:
    return served_name(given, served) if given else None


def read_embed(body: Body, card: ModelCard) -> tuple[EmbedRequest, Write]:
    """See `Read`."""
    started = time.perf_counter_ns()
    fields = read_body(_EMBED, body)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input or []
    dimensions = fields.dimensions if fields.dimensions and fields.dimensions < card.width else None
    request = EmbedRequest(
        inputs=tuple(_text(text, fields.options, card, truncate=fields.truncate is not False) for text in texts),
        name="input",
        words=_words("input", several=not isinstance(fields.input, str)),
        model=_served(fields.model, (card.name,)),
        dimensions=dimensions,
    )
    return request, partial(encode_embed, model=fields.model or tagged(card.name), started=started)


def read_embeddings(body: Body, card: ModelCard) -> tuple[EmbedRequest, Write]:
    """See `Read`. The model's folder says whether the vector is normalized."""
    fields = read_body(_EMBEDDINGS, body)
    request = EmbedRequest(
        inputs=(_text(fields.prompt or "", fields.options, card, truncate=True),),
        name="prompt",
        words=_words("prompt", several=False),
        model=_served(fields.model, (card.name,)),
        normalize=card.normalize,
    )
    return request, encode_embedding


def _words(field: str, *, several: bool) -> Words:
    limit = "truncate" if field == "input" else "options.num_ctx"
    return Words({"input": field, "max_tokens": limit}, InputPaths(field, several=several))


def _text(text: str, options: OllamaOptions | None, card: ModelCard, *, truncate: bool) -> TextInput:
    limit = (options and options.num_ctx) or card.max_tokens
    if limit >= card.max_tokens:
        return TextInput(text, max_tokens=MODEL_MAX if truncate else None)
    return TextInput(text, max_tokens=limit, must_fit=not truncate)


def answer_to_nothing(body: Body, *, legacy: bool) -> bytes | None:
    """Return the answer to a request without a text; None if there is a text.

    Clients send such a request to load the model.

    Args:
        body: Body of the request.
        legacy: True: the route is `/api/embeddings`. False: it is `/api/embed`.
    """
    if len(body) > _NOTHING_BYTES:
        return None
    if legacy:
        return None if read_body(_EMBEDDINGS, body).prompt else dump({"embedding": []})
    fields = read_body(_EMBED, body)
    return None if fields.input else dump({"model": fields.model or "", "embeddings": []})


_NOTHING_BYTES: Final = 2048
"""Maximum bytes of a body without a text."""


def encode_embed(result: EmbedResult, /, model: str, started: int, *, request_id: str, created: int) -> Pieces:
    """Write the vectors; see `Write`.

    Args:
        result: The vectors.
        model: The name as the client sent it, because the client compares it.
        started: `time.perf_counter_ns()` when the request was read.
        request_id: See `Write`.
        created: See `Write`.
    """
    vectors = np.ascontiguousarray(result.embeddings)
    after = {
        "total_duration": time.perf_counter_ns() - started,
        "load_duration": 0,  # models are loaded before the server takes requests
        "prompt_eval_count": result.usage.prompt_tokens,
    }
    return dump_around({"model": model}, "embeddings", vectors, after, item_values=vectors.shape[1])


def encode_embedding(result: EmbedResult, /, *, request_id: str, created: int) -> Pieces:
    """Write the vector; see `Write`."""
    [vector] = result.embeddings
    return dump({"embedding": vector})


def encode_tags(cards: Iterable[ModelCard], *, started: float) -> bytes:
    """Write the list of the served models. `started` is in seconds since 1970."""
    return dump({"models": [{**_about(card), "modified_at": _time(started)} for card in cards]})


def encode_running(cards: Iterable[ModelCard]) -> bytes:
    """Write the list of the loaded models: all served ones, for as long as the server runs."""
    models = [
        {
            **_about(card),
            "expires_at": "9999-12-31T23:59:59Z",
            "size_vram": 0 if card.device.startswith("cpu") else _size(card),
            "context_length": card.max_tokens,
        }
        for card in cards
    ]
    return dump({"models": models})


def encode_show(body: Body, cards: Iterable[ModelCard], *, started: float) -> bytes:
    """Write the description of the model that a request names. `started` is in seconds since 1970.

    Raises:
        InvalidInput: The request names no model.
        UnknownModel: The model is not served.
    """
    fields = json_decode.decode(_SHOW, body)
    given = fields.model or fields.name
    if not given:
        raise field_error("model", "this field is required")
    by_name = {card.name: card for card in cards}
    card = by_name.get(served_name(given, by_name))
    if card is None:
        raise UnknownModel(f"The model `{shortened(given)}` does not exist.", param="model")
    family = _family(card)
    return dump(
        {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": _details(card),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": card.parameters,
                f"{family}.context_length": card.max_tokens,
                f"{family}.embedding_length": card.width,
            },
            "capabilities": ["embedding"] if Output.DENSE in card.outputs else [],
            "modified_at": _time(started),
        }
    )


def _about(card: ModelCard) -> dict[str, Any]:
    name = tagged(card.name)
    # There is no digest of the weights: this one changes with the model's description.
    known = f"{card.name} {card.architecture} {card.parameters} {card.dtype}"
    digest = hashlib.sha256(known.encode()).hexdigest()
    return {"name": name, "model": name, "size": _size(card), "digest": digest, "details": _details(card)}


def _details(card: ModelCard) -> dict[str, Any]:
    family, level = _family(card), _BITS.get(card.dtype, ("", 4))[0]
    millions = card.parameters / 1e6
    size = f"{millions / 1e3:.1f}B" if millions >= 1e3 else f"{millions:.2f}M"
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": level,
    }


def _family(card: ModelCard) -> str:
    return card.architecture.removesuffix("Model").lower()


def _size(card: ModelCard) -> int:
    """Return the size of the weights in bytes."""
    return card.parameters * _BITS.get(card.dtype, ("", 4))[1]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
