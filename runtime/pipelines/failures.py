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
    detached,
)

PIPELINE: Final = "the window of the pipeline"
"""Stage of a request, none of whose items is in a stage."""

OUTPUT: Final = "output"
"""Stage of an item whose output is made."""

_OF_REQUEST: Final = (DeadlineExceeded, DeviceLost, EngineStopped, Overloaded)
"""Errors that other items of the request would have, too."""


def is_of_item(error: StagedPoolError) -> bool:
    """Return True for an error of one item: the others may be well."""
    return not isinstance(error, _OF_REQUEST)


def failure_of(error: StagedPoolError, item: Moving, stage: str) -> StagedPoolError:
    """Return an error whose message names the item and the stage. It has the item's index."""
    if not is_of_item(error):
        return error
    where = f"Item {item.index}, stage {stage}: "
    if isinstance(error, InvalidInput):
        error = error.with_prefix(where)
        error.param = "data"
    else:
        error = detached(error)
        error.args = (f"{where}{error}", *error.args[1:])
    if isinstance(error, InvalidInput | ModelFailed | MediaUnavailable):
        error.index = item.index
    return error
