"""Errors of items: each names its item and its stage, and some concern the whole request."""

from __future__ import annotations

from typing import Final

from staged_pool.runtime.pipelines.moving import Moving
from staged_pool.stages.errors import (
    DeadlineExceeded,
    DeviceLost,
    EngineStopped,
    InvalidInput,
    MediaUnavailable,
    ModelFailed,
    Overloaded,
    StagedPoolError,
    StageFailed,
    detached,
)
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import kind_of, user_code

PIPELINE: Final = "the window of the pipeline"
"""Stage of a request, none of whose items is in a stage."""

OUTPUT: Final = "output"
"""Stage of an item whose output is made."""

SOURCE: Final = "source"
"""Stage of a request whose items are taken from the caller."""

_OF_REQUEST: Final = (DeadlineExceeded, DeviceLost, EngineStopped, Overloaded)
"""Errors that other items of the request would have, too."""

log = get_logger("staged_pool.pipelines")


def failure_by(error: Exception, what: str, stage: str) -> StagedPoolError:
    """Return the error for the caller of user code that has failed, and log it. Our own errors stay as they are.

    Args:
        error: The error, past the boundary to user code.
        what: The code that failed, as the subject of the message.
        stage: Its stage.
    """
    if isinstance(error, StagedPoolError):
        return error
    if is_out_of_memory(error):
        return exhausted(error, stage)
    log.error("pipeline.function_failed", stage=stage, exc_info=error)
    return StageFailed(f"{what} failed: {kind_of(error)}.", stage=stage)


def is_of_item(error: StagedPoolError) -> bool:
    """Return True for an error of one item: the others may be well."""
    return not isinstance(error, _OF_REQUEST)


def failure_of(error: StagedPoolError, item: Moving, stage: str) -> StagedPoolError:
    """Return an error whose message names the item and the stage. It has the item's index."""
    if not is_of_item(error):
        return error
    where = f"Item {item.index}, stage {stage}: "
    try:
        with user_code():  # its class may be of a user, and fail in its methods
            return _placed(error, where, item)
    except Exception as failed:
        log.error("pipeline.function_failed", stage=stage, exc_info=failed)
        return StageFailed(f"{where}{kind_of(error)}.", stage=stage)


def _placed(error: StagedPoolError, where: str, item: Moving) -> StagedPoolError:
    if isinstance(error, InvalidInput):
        error = error.with_prefix(where)
        error.param = "data"
    else:
        error = detached(error)
        error.args = (f"{where}{error}", *error.args[1:])
    if isinstance(error, InvalidInput | ModelFailed | MediaUnavailable):
        error.index = item.index
    return error
