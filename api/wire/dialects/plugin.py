"""Data of plugins in `/pooling`, as for vLLM's plugins: any JSON in, any JSON out."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.chunked_json import Pieces
from staged_pool.api.wire.exchange import Body
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.fields import ModelName, RequestId
from staged_pool.api.wire.user_values import write_value
from staged_pool.runtime.memory.answers import KEPT_NUMBER_BYTES
from staged_pool.runtime.memory.value_bytes import UNLIMITED, bytes_of
from staged_pool.stages.errors import PluginFailed, TooLarge
from staged_pool.stages.foreign_json import MOST_DEPTH

PLUGIN_TASK: Final = "plugin"
"""The `task` of a body with data for a plugin. The field `data` alone means it, too."""

_HINT: Final = (b'"data"', b'"plugin"')


class _Choice(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()
    task: Any = None
    model: ModelName | None = None
    plugin: str | None = None
    request_id: RequestId | None = None


class PluginChoice(msgspec.Struct, frozen=True):
    """The fields of a body that choose a plugin."""

    model: str | None
    """Name of a model or of a plugin."""
    plugin: str | None
    """Name of a plugin."""
    request_id: str | None
    """Id for the answer, by the client."""


class _Data(msgspec.Struct):
    data: Any


_CHOICE: Final = msgspec.json.Decoder(_Choice)
_DATA: Final = msgspec.json.Decoder(_Data)


def may_have_data(body: Body) -> bool:
    """Return True if a body may have data for a plugin. It is a quick look, for bodies of any size."""
    return any(hint in body for hint in _HINT)


def choice_of(body: Body) -> PluginChoice | None:
    """Return the fields that choose a plugin; None if the body has no data for one.

    Raises:
        InvalidInput: The body is not JSON, or its task is `plugin` and its data is missing.
    """
    fields = json_decode.decode(_CHOICE, body)
    has_data = bytes(fields.data) not in (b"", b"null")
    if fields.task not in (None, PLUGIN_TASK) or not (has_data or fields.task == PLUGIN_TASK):
        return None
    if not has_data:
        raise field_error("data", "this field is required for the task 'plugin': any JSON value that the plugin takes")
    return PluginChoice(fields.model, fields.plugin, fields.request_id)


def read_data(body: Body) -> object:
    """Return the data of a body."""
    return json_decode.decode(_DATA, body, most_depth=MOST_DEPTH).data


def encode_output(output: object, *, plugin: str, request_id: str, most_bytes: int = UNLIMITED) -> Pieces:
    """Write the answer. Call it in a thread.

    Args:
        output: Output of the plugin. Arrays become lists; models of pydantic are dumped.
        plugin: Name of the plugin, for errors.
        request_id: Id of the answer.
        most_bytes: Most bytes of memory that it may take.

    Raises:
        PluginFailed: The output is no JSON, or a method of it has failed.
        TooLarge: It would take more memory than `most_bytes`.
    """

    def answer() -> object:
        dumped = getattr(output, "model_dump", None)
        data = dumped(mode="json") if callable(dumped) else output
        if (count := bytes_of(data, KEPT_NUMBER_BYTES, most_bytes)) > most_bytes:
            raise TooLarge(
                f"The output of the plugin `{plugin}` would take more than {count // 10**6} MB of memory; the limit is "
                f"{most_bytes // 10**6} MB."
            )
        return {"request_id": request_id, "created_at": int(time.time()), "data": data}

    return write_value(answer, partial(_failure, plugin))


def _failure(plugin: str, fault: str) -> PluginFailed:
    return PluginFailed(f"the output of the plugin `{plugin}` {fault}", plugin=plugin, hook="postprocess")
