"""Isolation: payloads run together so that a bad one fails alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio.lowlevel

from staged_pool.stages.errors import Abandoned, DeviceLost, ModelFailed, StagedPoolError
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import kind_of

P = TypeVar("P")
R = TypeVar("R")

log = get_logger("staged_pool.stages")


async def run_isolated(
    run: Callable[[Sequence[P]], Awaitable[Sequence[R | StagedPoolError]]],
    payloads: Sequence[P],
    *,
    stage: str,
) -> list[R | StagedPoolError]:
    """Run all payloads at once; if that raises, run each half, until only bad payloads have failed.

    One bad payload among n costs about 2 log2(n) further runs. Results have the order of the payloads. If cancelled, no
    further run starts.

    Args:
        run: May raise anything. Must return one result for each payload.
        payloads: At least one.
        stage: Name of the stage, for the log.

    Raises:
        DeviceLost: From `run`. Other errors of `run` become results.
    """
    try:
        results = await run(payloads)
        if len(results) != len(payloads):
            raise RuntimeError(f"{len(results)} results for {len(payloads)} payloads")
        return list(results)
    except DeviceLost:
        raise
    except Abandoned as error:  # a thread hangs while the engine stops: the halves would hang, too
        return [error] * len(payloads)
    except Exception as error:  # noqa: BLE001  # the boundary to model code, which may raise anything
        if len(payloads) == 1:
            return [failure(error, stage)]
        log.warning("batch.bisected", stage=stage, payloads=len(payloads), error=type(error).__name__)
    half = len(payloads) // 2
    halves: list[R | StagedPoolError] = []
    for part in (payloads[:half], payloads[half:]):
        if halves and isinstance(halves[-1], Abandoned):  # the other half would hang, too
            return [*halves, *[halves[-1]] * len(part)]
        await anyio.lowlevel.checkpoint_if_cancelled()  # runs may be shielded: a stop must wait for one, not for all
        halves += await run_isolated(run, part, stage=stage)
    return halves


def failure(error: Exception, stage: str) -> StagedPoolError:
    """Return the error for the caller of a payload that failed alone.

    Our own errors stay as they are. A failed allocation becomes `OutOfMemory`. Anything else is logged, and becomes
    `ModelFailed` without its details.
    """
    if isinstance(error, StagedPoolError):
        return error
    if is_out_of_memory(error):
        return exhausted(error, stage)
    log.error("item.failed", stage=stage, exc_info=error)
    return ModelFailed(f"the model failed on this input in the {stage} stage ({kind_of(error)})")
