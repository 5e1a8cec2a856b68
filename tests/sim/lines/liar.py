"""A front that lies: among right messages it says wrong ones, which no front of ours would ever say."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import anyio
from msgspec import structs

from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.arrays import PackedIds, PackedImage, PackedPixels, PackedSequence, pack_outputs
from staged_pool.runtime.remote.messages import Message
from staged_pool.runtime.requests import DENSE_ONLY
from staged_pool.runtime.version import VERSION
from staged_pool.stages.channel import ENDED
from staged_pool.stages.scheduling.entries import Priority
from tests.runtime.remote.hostile import corrupted_once, plain_frame
from tests.sim.lines.plan import TICK_S, LiarPlan
from tests.sim.lines.wire import SimStream

REQUESTS = 4
"""It speaks of requests below this number."""
LETTERS = b"lie"


class Liar:
    """One end of a line to the engine process.

    Args:
        plan: What it does.
    """

    def __init__(self, plan: LiarPlan) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)

    async def run(self, stream: SimStream) -> None:
        """Say everything, stay for a while, and end. What comes back is read, and ignored."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen, stream)
            try:
                for frame in self._frames():
                    await stream.send(frame)
                    await anyio.sleep(self._rng.randint(0, 3) * TICK_S)
            except ENDED:
                pass
            else:
                await anyio.sleep(self._plan.stays_s)
            tasks.cancel_scope.cancel()

    async def _listen(self, stream: SimStream) -> None:
        try:
            while True:
                await stream.receive()
        except (anyio.EndOfStream, *ENDED):
            pass

    def _frames(self) -> Iterator[bytes]:
        yield plain_frame(messages.Hello(VERSION))
        for _ in range(self._plan.messages):
            message, raw = self._message()
            wrong = self._rng.random() < self._plan.lies
            yield corrupted_once(self._rng, message, raw) if wrong else plain_frame(message, raw)

    def _message(self) -> tuple[Message, bytes]:
        """Return a right message, or at least one of the right form, and its arrays."""
        rng, request = self._rng, self._rng.randrange(REQUESTS)
        make: Callable[[], Message | tuple[Message, bytes]] = rng.choice([
            lambda: messages.Admit(
                request, 0, 10, rng.choice([None, 0.005]), Priority.BULK, None, None, rng.random() < 0.5
            ),
            lambda: messages.Admit(request, 0, 10, None, Priority.INTERACTIVE, "a", None, waits=False),
            lambda: messages.Count(request, {rng.choice(["text", "image"]): rng.randint(1, 3)}),
            lambda: messages.Leave(request, rng.random() < 0.5, 0.0, rejected=False),
            lambda: messages.Free([0]),
            lambda: messages.Clear(0, rng.random() < 0.5),
            lambda: self._items(request),
            lambda: self._items(request),
            lambda: self._items(request),
        ])  # fmt: skip
        made = make()
        return made if isinstance(made, tuple) else (made, b"")

    def _items(self, request: int) -> tuple[Message, bytes]:
        rng, outputs, count = self._rng, pack_outputs(DENSE_ONLY), len(LETTERS)
        ids = b"".join(letter.to_bytes(4, "little") for letter in LETTERS) + bytes(4)
        numbers = (rng.choice([-1, 1, 2, 10**6]) % 2**32).to_bytes(4, "little") * 2
        payload: Any = rng.choice([
            PackedIds(outputs, count),
            PackedSequence(outputs, count, None, 0, 0, rng.choice([None, 2]), [], False, rng.choice([None, 2]), None),
            PackedImage(outputs, count, PackedPixels("|u1", [count], None, 1, None)),
        ])  # fmt: skip
        raw = ids + numbers * 2 if not isinstance(payload, PackedImage) else LETTERS + bytes(5)
        lane = "image" if isinstance(payload, PackedImage) else "text"
        key = (request, rng.randrange(3), 0)
        made = messages.Items(0, lane, rng.randrange(3), 0.001, None, len(raw), [key], [rng.randbytes(16)], [payload])
        return (made if rng.random() < 0.8 else structs.replace(made, lane=rng.choice(["text", "image"]))), raw
