"""OpenAI's `/v1/embeddings` and `/v1/models`, field by field as its clients and vLLM's send and expect them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

import msgspec

from staged_pool.api.wire import jsons
from staged_pool.api.wire.chat import wrong
from staged_pool.api.wire.exchange import Body, EncodingFormat, Write, dump, listing, values
from staged_pool.api.wire.inputs import InputFields, text_inputs
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.requests import EmbedRequest
from staged_pool.runtime.results import EmbedResult
from staged_pool.stages.errors import InvalidInput


class EmbeddingsBody(InputFields, kw_only=True):
    """The body of a request; fields that are not named here are ignored."""

    encoding_format: EncodingFormat = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    use_activation: bool | None = None
    input_type: str | None = None
    """The same as `prompt_name`."""
    prompt_name: str | None = None
    """Of the model's prompts: the one that goes before each text."""
    prompt: str | None = None
    """Goes before each text instead."""
    normalize: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_BODY: Final = msgspec.json.Decoder(EmbeddingsBody)


def read_embeddings(body: Body, card: ModelCard) -> tuple[EmbedRequest, Write]:
    """See `Read`."""
    request, encoding = decode_embeddings(body)
    return request, partial(encode_embeddings, encoding=encoding)


def decode_embeddings(body: Body) -> tuple[EmbedRequest, EncodingFormat]:
    """Read a request for embeddings.

    What depends on the model (its vocabulary, width, prompts and longest input) is for the model to check.

    Raises:
        InvalidInput: Says which field is wrong and what would be right.
    """
    fields = jsons.decode(_BODY, body)
    if fields.normalize is not msgspec.UNSET:
        message = "Parameter `normalize` was removed; use `use_activation` instead."
        raise InvalidInput(message, param="normalize")
    request = EmbedRequest(
        inputs=text_inputs(fields),
        model=fields.model,
        dimensions=fields.dimensions,
        normalize=fields.use_activation is not False,
        prompt_name=_prompt_name(fields),
        prompt=fields.prompt,
    )
    return request, fields.encoding_format


def _prompt_name(fields: EmbeddingsBody) -> str | None:
    names = {name for name in (fields.input_type, fields.prompt_name) if name is not None}
    if len(names) + (fields.prompt is not None) > 1:
        raise wrong("prompt_name", "give one of `prompt`, `prompt_name` and `input_type`")
    return next(iter(names), None)


def encode_embeddings(result: EmbedResult, /, encoding: EncodingFormat, *, request_id: str, created: int) -> bytes:
    """Write the answer; see `Write`, and `values` for the encodings."""
    data = [
        {"index": index, "object": "embedding", "embedding": values(row, encoding)}
        for index, row in enumerate(result.embeddings)
    ]
    return listing("embd", data, model=result.model, usage=result.usage, request_id=request_id, created=created)


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
            "staged_pool": msgspec.to_builtins(card),
        }
        for card in cards
    ]
    return dump({"object": "list", "data": data})
