"""Fixtures of all tests. Async tests run on asyncio, uvloop and trio, and fail if anything blocks the event loop."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import settings

from tests.support.logs import captured_logs

os.environ["HF_HUB_OFFLINE"] = "1"
# Decision files of the tests are not the user's, and each question is measured once for all of them.
os.environ.setdefault("HF_HOME", str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"))
os.environ["XDG_CACHE_HOME"] = _cache = tempfile.mkdtemp(prefix="staged-pool-tests-")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
if "TINY_MODELS_OF_TESTS" not in os.environ:  # the first process of a test run; see `tests.models.tiny.build`
    os.environ["TINY_MODELS_OF_TESTS"] = _tiny_models = tempfile.mkdtemp(prefix="staged-pool-tiny-")
    atexit.register(shutil.rmtree, _tiny_models, ignore_errors=True)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: two cores, and more threads than that
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]

# No deadline: a busy machine is no failure. Examples are the same in every run: with new ones, CI fails by chance for a
# fault that is older than the change. `make properties` searches with new ones, and with more.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("searching", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "1000")))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


LONGEST = ("tests/hostile", "tests/typing", "tests/fuzz/test_fuzz.py", "tests/api/fleet", "tests/sim")
"""Files that take longest. They begin first, so that no process is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """Keep what the imports made out of later garbage collections: with torch among it, each takes most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> Iterator[BlockBuster]:
    """Raise `BlockingError` where the event loop's thread makes a blocking call."""
    with blockbuster_ctx() as blockbuster:
        yield blockbuster


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[structlog.typing.EventDict]]:
    """Log events as data. Rendering a traceback reads source files, which would block the event loop."""
    with captured_logs() as events:
        yield events
