"""Programs with a pool, in processes of their own: ends, interrupts and forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

from staged_pool.pool.engine_thread import Backend
from tests.servers.preloaded import ROOT, PreloadedProcess
from tests.servers.process import wait_until

STRICT = """
import warnings
warnings.simplefilter("error")
"""
WITH_LETTERS = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
import staged_pool
from staged_pool.pool import owner
from tests.servers.engines import engine_on
from tests.support.model import LetterModel

held, opened = threading.Event(), threading.Event()

def hold(texts):
    if "held" in texts:
        held.set()
        opened.wait()

model = LetterModel(on_forward=hold)
owner.open_engine = lambda config, plugins: engine_on(model, config)
pool = staged_pool.Pool("model", backend=BACKEND)
"""


class Program:
    """A program that begins with the server imported, and treats warnings as errors.

    Args:
        text: Its code; a pool is made before it.
        backend: The event loop of its pool.
        folder: Takes its output.
    """

    def __init__(self, text: str, backend: Backend, folder: Path) -> None:
        code = STRICT + WITH_LETTERS.replace("BACKEND", repr(backend)) + text
        self._out, self._errors = folder / "out", folder / "errors"
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            self.process = PreloadedProcess(
                [sys.executable, "-c", code], "server", folder=ROOT, environment=os.environ, stdout=out, stderr=errors
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def printed(self) -> str:
        return self._out.read_text()

    def end(self) -> str:
        """Wait for its end, which must be a clean one; return its output."""
        assert (self.process.wait(60), self._errors.read_text()) == (0, "")
        return self.printed


def printed(text: str, backend: Backend, folder: Path) -> str:
    with Program(text, backend, folder) as program:
        return program.end()


ENDS = {
    "at its last line": "print(pool.embed('a').embeddings.shape)",
    "by sys.exit": "print(pool.embed('a').embeddings.shape); sys.exit()",
    "in the middle of a stream": """
stream = pool.embed_stream(f"text {number}" for number in range(10**9))
print(next(stream)[1][None].shape)
""",
    "with a daemon thread at work": """
thread = threading.Thread(target=lambda: list(pool.embed_stream(iter(lambda: "a", 0))), daemon=True)
threading.excepthook = lambda raised: None  # its call fails as the pool ends
print(pool.embed("a").embeddings.shape)
thread.start()
""",
    "after a thread that outlives the main one": """
def late():
    threading.main_thread().join()
    print(pool.embed("a").embeddings.shape)
pool.open()
threading.Thread(target=late).start()
""",
    "without any use": "print((1, 4))",
    "by its second of two pools": """
print(pool.embed("a").embeddings.shape)
pool = staged_pool.Pool("model").open()
""",
}


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_a_program_that_closes_nothing_ends_cleanly(program: str, backend: Backend, tmp_path: Path) -> None:
    assert printed(program, backend, tmp_path) == "(1, 4)\n"


INTERRUPTED = """
import signal
def use():
    CALL
pool.open()
try:
    threading.Thread(target=lambda: (held.wait(), print("held", flush=True)), daemon=True).start()
    use()
except KeyboardInterrupt:
    while pool.statistics().admission.requests:
        pass
    opened.set()
    print(pool.embed("usable").embeddings.shape)
"""
CALLS = {
    "embed": "pool.embed(['held'] * 1000)",
    "stream": "list(pool.embed_stream(iter(lambda: 'held', 0)))",
    "stream as completed": "list(pool.embed_stream(iter(lambda: 'held', 0), ordered=False))",
    "encode": "pool.encode('held')",
    "call": "pool.call(lambda engine: engine.embed('held'))",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupt_cancels_the_call_and_leaves_the_pool_usable(call: str, backend: Backend, tmp_path: Path) -> None:
    with Program(INTERRUPTED.replace("CALL", call), backend, tmp_path) as program:
        wait_until(lambda: program.printed == "held\n")
        program.process.send_signal(signal.SIGINT)
        assert program.end() == "held\n(1, 4)\n"


FORK = """
import warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)  # of os.fork beside threads
BEFORE
if not (child := os.fork()):
    try:
        print("child", pool.embed("a").embeddings.shape)
    except RuntimeError as error:
        print("child", error)
        print("child", staged_pool.Pool("model", backend=pool._backend).embed("a").embeddings.shape)
    sys.exit()
_, status = os.waitpid(child, 0)
print("parent", status, pool.embed("a").embeddings.shape)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_is_told_that_the_pool_is_its_parents_and_opens_its_own(backend: Backend, tmp_path: Path) -> None:
    refused, own, parent = printed(FORK.replace("BEFORE", "pool.open()"), backend, tmp_path).splitlines()
    assert refused.startswith("child This pool was opened in process ")
    assert "make another Pool in this process" in refused
    assert (own, parent) == ("child (1, 4)", "parent 0 (1, 4)")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_pool_that_is_not_open_yet_may_be_forked(backend: Backend, tmp_path: Path) -> None:
    assert printed(FORK.replace("BEFORE", ""), backend, tmp_path) == "child (1, 4)\nparent 0 (1, 4)\n"


def test_real_models_write_nothing_and_end_cleanly() -> None:
    code = """
import staged_pool
for backend in ("asyncio", "trio"):
    print(staged_pool.Pool(backend=backend).encode(["a", "b"]).shape)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(2, 384)\n" * 2, "")
