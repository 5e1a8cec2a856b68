"""Logs of the package in a host: none, until it configures the standard library's logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from staged_pool.stages import log

_EMBEDS = """
import sys
import anyio
{before}
import staged_pool
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.runtime.engine.run import run_engine
from staged_pool.stages.log import get_logger
from tests.support.model import LetterModel

async def main():
    config = staged_pool.EngineConfig()
    async with DeviceThreads("test device", watchdog_s=60).running() as device:
        async with run_engine(config, LetterModel(), device=device) as engine:
            await engine.embed("a text")
    get_logger("staged_pool.engine").warning("something.odd", number=1)
    get_logger("staged_pool.engine").error("something.wrong", exc_info=ValueError("it"))

anyio.run(main)
{after}
"""


def _run(before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", _EMBEDS.format(before=before, after=after)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )


def test_the_library_is_silent_until_its_host_configures_logging() -> None:
    run = _run()
    assert run.stdout == ""
    assert run.stderr == ""


def test_a_host_that_configures_logging_hears_what_it_asked_for() -> None:
    run = _run(before="import logging; logging.basicConfig(level=logging.INFO, stream=sys.stderr)")
    assert run.stdout == ""
    assert "INFO:staged_pool.engine:engine.draining requests=0" in run.stderr.splitlines()
    assert "WARNING:staged_pool.engine:something.odd number=1" in run.stderr.splitlines()
    assert run.stderr.splitlines()[-1] == "ValueError: it"


_OWN_STRUCTLOG = """
import structlog
def reject(logger, method, event):
    raise RuntimeError("a host's processor that takes no events of others")
structlog.configure(
    processors=[reject], wrapper_class=structlog.BoundLogger, logger_factory=None, context_class=None,
    cache_logger_on_first_use=True,
)
was = structlog.get_config()
"""


def test_a_hosts_own_structlog_neither_breaks_the_library_nor_is_changed() -> None:
    run = _run(before=_OWN_STRUCTLOG, after="assert structlog.get_config() == was")
    assert run.stdout == ""
    assert run.stderr == ""


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """All records that the standard library's loggers hand to a handler of `staged_pool`."""
    handler, package = _Kept(), logging.getLogger("staged_pool")
    was = log.use(log.on_standard_logging)
    package.addHandler(handler)
    package.setLevel(logging.DEBUG)
    yield handler.records
    package.setLevel(logging.NOTSET)
    package.removeHandler(handler)
    log.use(was)


def test_a_record_names_its_caller_and_has_its_fields(records: list[logging.LogRecord]) -> None:
    own = log.get_logger("staged_pool.test")
    own.debug("it.happened", name="100 %s", args=())
    try:
        raise ValueError("it")
    except ValueError:
        own.exception("it.failed")
    first, second = (record for record in records if record.name == "staged_pool.test")
    assert first.getMessage() == "it.happened name='100 %s' args=()"
    assert first.levelname == "DEBUG"
    assert first.fields == {"name": "100 %s", "args": ()}  # type: ignore[attr-defined]
    assert {first.pathname, second.pathname} == {__file__}
    assert second.exc_info is not None
    assert second.levelname == "ERROR"


def test_levels_of_the_host_hold(records: list[logging.LogRecord]) -> None:
    own, its = log.get_logger("staged_pool.test"), logging.getLogger("staged_pool.test")
    its.setLevel(logging.ERROR)
    try:
        own.warning("it.happened")
        own.error("it.failed")
    finally:
        its.setLevel(logging.NOTSET)
    assert [record.levelname for record in records if record.name == its.name] == ["ERROR"]


def test_no_module_takes_its_logger_from_structlogs_global_settings() -> None:
    root = Path(__file__).parents[2]
    found = [
        str(path.relative_to(root))
        for folder in ("api", "runtime", "stages")
        for path in (root / folder).rglob("*.py")
        if "structlog.get_logger" in (text := path.read_text()) or "structlog.configure" in text
    ]
    assert found == []
    assert structlog.is_configured() is False
