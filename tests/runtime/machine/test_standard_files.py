"""Processes without standard files: no other file is taken for one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.servers.preloaded import ROOT

CLOSED = """
import os, sys
answer = os.dup(1)
os.set_inheritable(answer, False)
for number in map(int, sys.argv[1]):
    os.close(number)
"""
"""Keeps the output under another number, and closes the standard files of its argument."""

OPENS = (
    CLOSED
    + """
from staged_pool.api.commands.cli import main
try:
    main(["--version"], prog_name="staged-pool")
except SystemExit:
    pass
seen = [os.readlink(f"/proc/self/fd/{number}") for number in map(int, sys.argv[1])]
assert all(map(os.get_inheritable, range(3)))
os.write(answer, " ".join(seen).encode())
"""
)

HANDS_ON = (
    CLOSED
    + """
import pickle, socket
import anyio
from staged_pool.api.fleet.processes import Child, Launch

CHILD = '''
import os, pickle, stat, sys
numbers = pickle.load(sys.stdin.buffer)
sys.exit(0 if all(stat.S_ISSOCK(os.fstat(number).st_mode) for number in numbers) else 9)
'''

listener = socket.socket()
assert listener.fileno() == 0

async def start():
    settings = lambda name, files: pickle.dumps((files.listener, files.control, files.handover))
    launch = Launch([sys.executable, "-c", CHILD], listener.fileno(), settings)
    started = await launch("front-1")
    os.write(answer, f"exit code {await Child('front-1', started, {}).run()}".encode())

backend = sys.argv[2]
options = {"use_uvloop": True} if backend == "uvloop" else {}
anyio.run(start, backend=backend.replace("uvloop", "asyncio"), backend_options=options)
"""
)

WORKS = (
    CLOSED
    + """
from staged_pool.runtime.workers.pipe import pack
from staged_pool.runtime.workers.process import WorkerProcess
from tests.runtime.workers.test_pool import Odd

worker = WorkerProcess("mine")
worker.begin(pack(Odd()))
worker.wait_until_ready()
os.write(answer, b"ready")
worker.end()
"""
)


def said(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("closed", ["0", "1", "2", "01", "12", "012"])
def test_the_command_line_opens_the_standard_files_that_are_closed(closed: str) -> None:
    assert said(OPENS, closed).splitlines()[-1] == " ".join([os.devnull] * len(closed))


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
def test_a_child_gets_a_listener_that_has_the_number_of_the_standard_input(backend: str) -> None:
    assert said(HANDS_ON, "0", backend) == "exit code 0"


def test_a_worker_gets_its_pipe_though_it_has_numbers_of_standard_files() -> None:
    assert said(WORKS, "012") == "ready"
