"""A process with the server imported, which copies itself for each command.

A server that loads a model spends seconds on imports. The copies of this process begin after them. In everything else
a copy is the process that `python -c` or `python -m` starts: it has its own arguments, variables, folder and
descriptors, and it ends as an interpreter does. `tests.servers.preloaded` asks for copies.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import socket
import sys
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias, cast

Preloaded: TypeAlias = Literal["server", "models"]
"""Imports of a copy: the server alone, or torch and transformers too, which also slow its end."""

MESSAGE_BYTES: Final = 2**17
"""Longest message: a command with its variables."""
FILES: Final = 16
"""Most descriptors of one command."""


def preload(kind: Preloaded) -> None:
    """Import what servers import. No thread runs afterwards, because a process with threads may not be copied."""
    import trio  # noqa: F401
    import uvloop  # noqa: F401

    import staged_pool.api.commands.cli
    import staged_pool.api.http.server

    if kind == "models":
        import staged_pool.runtime.models.load  # noqa: F401  # torch and transformers
    gc.collect()
    gc.freeze()  # collections of the copies leave this alone, and with it the memory that they share


def serve(asked: socket.socket) -> dict[str, Any] | None:
    """Copy this process for each message, and tell the ends of the copies.

    Returns:
        In a copy: its message. In this process: None, when nobody asks any more.
    """
    poll = select.poll()  # has no descriptor, which a copy would have to close
    poll.register(asked, select.POLLIN)
    copies: dict[int, int] = {}  # descriptor of a process: its number
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in copies:
                poll.unregister(descriptor)
                os.close(descriptor)
                number, status = os.waitpid(copies.pop(descriptor), 0)
                asked.send(json.dumps({"ended": number, "code": os.waitstatus_to_exitcode(status)}).encode())
                continue
            raw, received, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, FILES)
            if not raw:
                return None
            message: dict[str, Any] = json.loads(raw)
            number = os.fork()
            if number == 0:
                asked.close()
                _take(received, message["descriptors"])
                return message
            for each in received:
                os.close(each)
            copy = os.pidfd_open(number)
            copies[copy] = number
            poll.register(copy, select.POLLIN)
            asked.send(json.dumps({"started": number}).encode())


def _take(received: list[int], wanted: list[int]) -> None:
    """Give each received descriptor its number in the command, and close all others."""
    high = [os.dup2(descriptor, 200 + place) for place, descriptor in enumerate(received)]
    os.closerange(3, 200)
    for descriptor, number in zip(high, wanted, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)


def become(message: dict[str, Any]) -> None:
    """Run a command as the interpreter runs it from its command line."""
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["folder"])
    sys.path[0] = "" if message["form"] == "-c" else message["folder"]
    form, program, arguments = message["form"], message["program"], message["arguments"]
    sys.argv = ["-c" if form == "-c" else program, *arguments]
    if form == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    preload(cast(Preloaded, sys.argv[1]))
    with socket.socket(fileno=int(sys.argv[2])) as mine:
        mine.send(b"{}")
        command = serve(mine)
    if command is not None:
        become(command)
