"""OpenAI's `/v1/embeddings` and vLLM's `/tokenize`, field by field as their clients send and expect them."""

from __future__ import annotations

import binascii
import re
import time
from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from staged_pool.api.wire import jsons
from staged_pool.runtime.model import ModelCard, Tokens
from staged_pool.runtime.requests import EmbedRequest, TextInput
from staged_pool.runtime.results import EmbedResult, Usage
from staged_pool.stages.errors import InvalidInput

EncodingFormat: TypeAlias = Literal["float", "base64"]
Source: TypeAlias = str | tuple[int, ...]
ModelName: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
"""The refusal of an unknown one repeats it, and must not be as long as a body may be."""


class EmbeddingsBody(msgspec.Struct):
    """The body of a request; fields that are not named here are ignored."""

    input: msgspec.Raw
    """`str | list[str] | list[int] | list[list[int]]`."""
    model: ModelName | None = None
    encoding_format: EncodingFormat = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool = True
    use_activation: bool | None = None
    normalize: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class TokenizeBody(msgspec.Struct):
    """The body of a request; fields that are not named here are ignored."""

    prompt: str
    model: ModelName | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


_BODY: Final = msgspec.json.Decoder(EmbeddingsBody)
_TOKENIZE: Final = msgspec.json.Decoder(TokenizeBody)
_TEXT: Final = msgspec.json.Decoder(str)
_TEXTS: Final = msgspec.json.Decoder(list[str])
_IDS: Final = msgspec.json.Decoder(list[int])
_ID_LISTS: Final = msgspec.json.Decoder(list[list[int]])
_SHAPE: Final = re.compile(rb"[ \t\r\n]*(\[?)[ \t\r\n]*(.)", re.DOTALL)
"""The opening bracket of a list, and the character after it: enough to know the form of `input`."""


class EmbeddingsCall:
    """One HTTP request for embeddings: `decode` runs in the parse stage, `encode` after it in postprocess.

    It carries what the answer needs of the request and the engine has no use for. The body is let go once decoded.

    Args:
        body: As received.
        request_id: Becomes part of the answer's `id`.
    """

    def __init__(self, body: bytes | bytearray, request_id: str) -> None:
        self._body = body
        self._request_id = request_id
        self._encoding: EncodingFormat = "float"

    def decode(self) -> EmbedRequest:
        """See `decode_embeddings`."""
        body, self._body = self._body, b""
        request, self._encoding = decode_embeddings(body)
        return request

    def encode(self, result: EmbedResult) -> bytes:
        """See `encode_embeddings`."""
        return encode_embeddings(result, self._encoding, request_id=self._request_id, created=int(time.time()))


def decode_embeddings(body: bytes | bytearray) -> tuple[EmbedRequest, EncodingFormat]:
    """Read a request for embeddings.

    What depends on the model (its vocabulary, width and longest input) is for the model to check.

    Raises:
        InvalidInput: Says which field is wrong and what would be right.
    """
    fields = jsons.decode(_BODY, body)
    if fields.normalize is not msgspec.UNSET:
        message = "Parameter `normalize` was removed; use `use_activation` instead."
        raise InvalidInput(message, param="normalize")
    if fields.truncate_prompt_tokens == 0:
        message = "truncate_prompt_tokens: 0 leaves nothing to embed; expected -1 or at least 1"
        raise InvalidInput(message, param="truncate_prompt_tokens")
    inputs = tuple(
        TextInput(
            source,
            max_tokens=fields.truncate_prompt_tokens,
            truncate_side=fields.truncation_side or "right",
            add_special_tokens=fields.add_special_tokens,
        )
        for source in _sources(fields.input)
    )
    request = EmbedRequest(
        inputs=inputs,
        model=fields.model,
        dimensions=fields.dimensions,
        normalize=fields.use_activation is not False,
    )
    return request, fields.encoding_format


def _sources(raw: msgspec.Raw) -> Sequence[Source]:
    """The inputs one by one; all of them in one form, or it is an error."""
    shape = _SHAPE.match(memoryview(raw))
    opening, first = shape.groups() if shape else (b"", b"")
    if not opening:
        return (jsons.decode(_TEXT, raw, root="input"),)
    if first == b"]":
        raise InvalidInput("You must pass at least one prompt", param="input")
    if first in (b'"', b"{"):  # an object is refused there, as what should have been a text
        return jsons.decode(_TEXTS, raw, root="input")
    if first == b"[":
        lists = jsons.decode(_ID_LISTS, raw, root="input")
        return [_checked(ids, index) for index, ids in enumerate(lists)]
    return (_checked(jsons.decode(_IDS, raw, root="input"), 0),)


def _checked(ids: list[int], index: int) -> tuple[int, ...]:
    if not ids:
        raise InvalidInput(f"input[{index}]: a list of token ids must not be empty", param="input", index=index)
    if (lowest := min(ids)) < 0:
        raise InvalidInput(f"Token id {lowest} is out of vocabulary", param="input", index=index)
    return tuple(ids)


def encode_embeddings(result: EmbedResult, encoding: EncodingFormat, *, request_id: str, created: int) -> bytes:
    """Write the answer.

    Args:
        result: Vectors in the order of the inputs.
        encoding: `float`: JSON numbers, each the shortest that reads back as the same float32. `base64`: the
            float32 values of one vector in little-endian order.
        request_id: Becomes part of `id`.
        created: Seconds since 1970.
    """
    vectors = np.ascontiguousarray(result.embeddings, dtype="<f4")
    rows = vectors if encoding == "float" else map(_base64, vectors)
    data = [{"index": i, "object": "embedding", "embedding": row} for i, row in enumerate(rows)]
    answer = {
        "id": f"embd-{request_id}",
        "object": "list",
        "created": created,
        "model": result.model,
        "data": data,
        "usage": _usage(result.usage),
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(row: NDArray[np.float32]) -> str:
    return binascii.b2a_base64(row.data, newline=False).decode("ascii")


def _usage(usage: Usage) -> dict[str, int | None]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def decode_tokenize(body: bytes | bytearray) -> TokenizeBody:
    """Read a request for the tokens of one text.

    Raises:
        InvalidInput: Says which field is wrong and what would be right.
    """
    return jsons.decode(_TOKENIZE, body)


def encode_tokens(tokens: Tokens, *, max_tokens: int, with_strings: bool) -> bytes:
    """Write the answer. `max_tokens` is the longest input that the model takes."""
    answer = {
        "count": len(tokens.ids),
        "max_model_len": max_tokens,
        "tokens": tokens.ids,
        "token_strs": tokens.strings if with_strings else None,
    }
    return orjson.dumps(answer)


def encode_models(card: ModelCard, *, created: int) -> bytes:
    """Write the list of models: the one that is served. `created` is in seconds since 1970."""
    model = {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": "staged-pool",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_tokens,
    }
    return orjson.dumps({"object": "list", "data": [model]})
