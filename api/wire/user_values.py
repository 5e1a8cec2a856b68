"""JSON of values that users have made: outputs of plugins and of pipelines."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from staged_pool.api.wire.chunked_json import Pieces, dump_any
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.exhausted import is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import kind_of, user_code

log = get_logger("staged_pool.api")


def write_value(make: Callable[[], object], failure: Callable[[str], StagedPoolError]) -> Pieces:
    """Write a value of a user in steps, within the boundary to user code. Call it in a thread.

    Args:
        make: Makes the content. It may run methods of the value.
        failure: Makes the error from the fault, in words that go behind "the output".

    Raises:
        StagedPoolError: That of `failure`: the value is no JSON, or a method of it has failed.
    """
    try:
        with user_code():
            return dump_any(make())
    except orjson.JSONEncodeError as error:
        fault = f"is no JSON: {error}"
    except RecursionError:
        fault = "is no JSON: it contains itself, or is nested too deeply"
    except Exception as error:
        if isinstance(error, StagedPoolError) or is_out_of_memory(error):
            raise
        log.error("output.failed", exc_info=error)
        fault = f"cannot be written: {kind_of(error)}"
    raise failure(fault)
