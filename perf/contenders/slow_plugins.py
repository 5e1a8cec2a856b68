"""Plugins that wait or compute for a fixed time, as in other people's hooks; each has a forward of its own."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any, Final

import anyio

from staged_pool import PluginContext, Processor

LOAD_S: Final = 0.2
"""Seconds of a load: a download from another continent."""

BURN_S: Final = 0.05
"""Seconds of CPU time of a burning hook."""


class AwaitedLoad(Processor):
    """Its load waits on the event loop."""

    async def load(self, prompt: Any, context: PluginContext) -> Any:
        await anyio.sleep(LOAD_S)
        return prompt

    def preprocess(self, loaded: Any, context: PluginContext) -> Sequence[Any]:
        return [loaded]

    def forward(self, batch: Sequence[Any]) -> Sequence[Any]:
        return batch


class PlainLoad(AwaitedLoad):
    """Its load waits in a thread."""

    def load(self, prompt: Any, context: PluginContext) -> Any:
        time.sleep(LOAD_S)
        return prompt


class Burning(Processor):
    """Its preprocess computes in pure Python, which holds the interpreter's lock."""

    def preprocess(self, loaded: Any, context: PluginContext) -> Sequence[Any]:
        end, turns = time.thread_time() + BURN_S, 0
        while time.thread_time() < end:
            turns += 1
        return [turns]

    def forward(self, batch: Sequence[Any]) -> Sequence[Any]:
        return batch


class BurningApart(Burning):
    """The same in a process of its own."""

    isolation = "process"


class Compressing(Burning):
    """Its preprocess computes in C without the interpreter's lock."""

    def preprocess(self, loaded: Any, context: PluginContext) -> Sequence[Any]:
        end, data = time.thread_time() + BURN_S, bytes(range(256)) * 2048
        while time.thread_time() < end:
            zlib.compress(data, 6)
        return [0]


PLUGINS: Final = (AwaitedLoad, PlainLoad, Burning, BurningApart, Compressing)
