"""Programs with a pool, in processes of their own: ends, interrupts and forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from staged_pool.pool.engine_thread import Backend

ROOT = Path(__file__).parents[3]

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


def started(program: str, backend: Backend, **variables: str) -> subprocess.Popen[str]:
    code = WITH_LETTERS.replace("BACKEND", repr(backend)) + program
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(program: str, backend: Backend) -> str:
    """Run a program to its end, which must be a clean one."""
    process = started(program, backend)
    try:
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    return out


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
def test_a_program_that_closes_nothing_ends_cleanly(program: str, backend: Backend) -> None:
    assert printed(program, backend) == "(1, 4)\n"


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
def test_an_interrupt_cancels_the_call_and_leaves_the_pool_usable(call: str, backend: Backend) -> None:
    process = started(INTERRUPTED.replace("CALL", call), backend)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, errors) == (0, "(1, 4)\n", "")


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
def test_a_fork_is_told_that_the_pool_is_its_parents_and_opens_its_own(backend: Backend) -> None:
    refused, own, parent = printed(FORK.replace("BEFORE", "pool.open()"), backend).splitlines()
    assert refused.startswith("child This pool was opened in process ")
    assert "make another Pool in this process" in refused
    assert (own, parent) == ("child (1, 4)", "parent 0 (1, 4)")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_pool_that_is_not_open_yet_may_be_forked(backend: Backend) -> None:
    assert printed(FORK.replace("BEFORE", ""), backend) == "child (1, 4)\nparent 0 (1, 4)\n"


def test_a_real_model_writes_nothing_and_ends_cleanly(backend: Backend) -> None:
    code = f"import staged_pool; print(staged_pool.Pool(backend={backend!r}).encode(['a', 'b']).shape)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(2, 384)\n", "")
