"""Program of the crash tests: a batch on the engine of a double, in a process that can be killed.

`python -m tests.api.bulk.killed_job IN OUT` begins the job, or goes on with it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import anyio

from staged_pool.api.app.batch_work import BatchWork
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.bulk.batch_lines import BatchAnswers
from staged_pool.api.bulk.opening import BATCH_WINDOW, job_files, open_batch
from tests.servers.engines import engine_on
from tests.support.model import LetterModel


async def main(source: Path, output: Path) -> None:
    opening = partial(open_batch, source=source, output=output, errors=None, identity={}, existing="resume")
    registry = EngineRegistry()
    async with job_files(opening) as job, engine_on(LetterModel()) as engine:
        registry.open(engine)
        work = BatchWork(registry, BatchAnswers("job"), auto_truncate=True)
        await job.run(work, window=BATCH_WINDOW, report=lambda progress: None)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]))
