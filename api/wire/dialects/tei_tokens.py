"""Other routes of text-embeddings-inference: `/tokenize`, `/decode`, `/info`; and its errors and headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec
import orjson

from staged_pool.api.status import Problem
from staged_pool.api.wire import json_decode
from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, average, dump, dump_list
from staged_pool.api.wire.exchange import Body
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.texts_or_ids import id_lists
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.requests import Output
from staged_pool.runtime.tokens import Tokens
from staged_pool.runtime.version import VERSION
from staged_pool.stages.errors import NoInputs, Words
from staged_pool.stages.timeline import Timeline

_TYPES: Final = {
    "no_inputs": "Empty",
    "overloaded": "Overloaded",
    "bodies_too_large": "Overloaded",
    "too_many_requests": "Overloaded",
    "invalid_input": "Validation",
    "url_not_allowed": "Validation",
}
_TYPES_BY_STATUS: Final = {401: "Validation", 404: "Validation", 405: "Validation", 408: "Validation", 503: "Unhealthy"}


def tei_error(problem: Problem) -> tuple[int, bytes]:
    """Return the status and the body for a problem; an invalid input has status 422 here.

    Error types are those of text-embeddings-inference's `ErrorType` (router/src/http/types.rs).
    """
    status = 422 if problem.kind.word in ("invalid_input", "url_not_allowed") else problem.status
    by_status = "Validation" if 411 <= status <= 415 or status in (400, 422, 431) else "Backend"
    kind = _TYPES.get(problem.kind.word) or _TYPES_BY_STATUS.get(status, by_status)
    return status, orjson.dumps({"error": problem.message, "error_type": kind})


def timing_headers(timeline: Timeline, total_s: float) -> list[tuple[bytes, bytes]]:
    """Return headers with the times of a request, in whole milliseconds, and its tokens."""
    times = {
        b"x-total-time": total_s,
        b"x-tokenization-time": timeline.preprocess_s,
        b"x-queue-time": timeline.queue_s,
        b"x-inference-time": timeline.device_s,
    }
    headers = [(name, b"%d" % round(seconds * 1e3)) for name, seconds in times.items()]
    return [*headers, (b"x-compute-tokens", b"%d" % timeline.tokens)]


_INPUTS: Final = re.compile(rb'"inputs"\s*:')
"""Every body of this `/tokenize` has this field; those of vLLM's do not."""


def is_tokenize(body: Body) -> bool:
    """Return True if a body of `/tokenize` is of this dialect, and not of vLLM's.

    Raises:
        InvalidInput: The body is not JSON.
    """
    if not _INPUTS.search(body):
        return False
    names = json_decode.given_fields(body).keys()
    return "inputs" in names and not names & {"prompt", "messages"}


class TokenizeBody(msgspec.Struct):
    """Body of `/tokenize`."""

    inputs: str | list[str]
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


class DecodeBody(msgspec.Struct):
    """Body of `/decode`."""

    ids: msgspec.Raw
    """`list[int] | list[list[int]]`."""
    skip_special_tokens: bool | None = None


_TOKENIZE: Final = msgspec.json.Decoder(TokenizeBody)
_DECODE: Final = msgspec.json.Decoder(DecodeBody)


def decode_tokenize(body: Body) -> tuple[list[str], TokenizeBody]:
    """Read a request for the tokens of texts.

    Raises:
        InvalidInput: A field is missing or wrong.
        NoInputs: There is no text.
    """
    fields = read_body(_TOKENIZE, body)
    texts = [fields.inputs] if isinstance(fields.inputs, str) else fields.inputs
    if not texts:
        raise NoInputs("`inputs` cannot be empty", param="inputs")
    return texts, fields


def words_of(fields: TokenizeBody) -> Words:
    """Return the names and paths of the texts for errors."""
    return Words({"input": "inputs"}, InputPaths("inputs", several=not isinstance(fields.inputs, str)))


def prompt_of(name: str | None, card: ModelCard) -> str:
    """Return the text of one of the model's prompts; empty for None.

    Raises:
        InvalidInput: The model has no prompt of this name.
    """
    if name is None:
        return ""
    if name not in card.prompts:
        raise field_error(
            "prompt_name", f"expected one of the model's prompts: {', '.join(card.prompts) or 'it has none'}"
        )
    return card.prompts[name]


def encode_tokens(texts: Sequence[str], found: Sequence[Tokens]) -> Pieces:
    """Write the tokens of each text and their offsets in it; special tokens have none."""
    rows = (_tokens(text, tokens) for text, tokens in zip(texts, found, strict=True))
    return dump_list(rows, item_values=average(4 * sum(len(tokens.ids) for tokens in found), len(found)))


def _tokens(text: str, tokens: Tokens) -> list[dict[str, object]]:
    return [
        {"id": token, "text": string, "special": True, "start": None, "stop": None}
        if span is None
        else {"id": token, "text": text[span[0] : span[1]], "special": False, "start": span[0], "stop": span[1]}
        for token, string, span in zip(tokens.ids, tokens.strings, tokens.spans, strict=True)
    ]


def decode_ids(body: Body) -> tuple[list[tuple[int, ...]], bool, Words]:
    """Read a request for the texts of tokens.

    Returns:
        The token ids of each text; True to skip special tokens; the names and paths for errors.

    Raises:
        InvalidInput: A field is missing or wrong.
    """
    fields = read_body(_DECODE, body)
    places = InputPaths("ids", several=json_decode.shape(fields.ids)[0] == 2)
    return id_lists(fields.ids, "ids"), fields.skip_special_tokens is not False, Words({"tokens": "ids"}, places)


def encode_info(card: ModelCard, config: EngineConfig, *, auto_truncate: bool) -> bytes:
    """Write the description of a model and the limits of its requests."""
    return dump(
        {
            "model_id": card.name,
            "model_sha": config.revision,
            "model_dtype": card.dtype,
            "served_model_name": card.name,
            "model_type": _model_type(card),
            "max_concurrent_requests": config.max_requests,
            "max_input_length": card.max_tokens,
            "max_batch_tokens": config.batch_tokens(card.device, card.memory_tokens),
            "max_batch_requests": config.max_batch_items,
            "max_client_batch_size": config.max_request_items,
            "auto_truncate": auto_truncate,
            "tokenization_workers": config.preprocess_limit,
            "version": VERSION,
            "sha": None,
            "docker_label": None,
        }
    )


def _model_type(card: ModelCard) -> dict[str, object]:
    if Output.LABELS not in card.outputs:
        return {"embedding": {"pooling": card.pooling}}
    names = {str(place): label for place, label in enumerate(card.labels)}
    labels = {"id2label": names, "label2id": {label: int(place) for place, label in names.items()}}
    return {"reranker" if card.scoring == "cross-encoder" else "classifier": labels}
