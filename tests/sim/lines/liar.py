"""A front that lies: among right messages it says wrong ones, which no front of ours would ever say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import anyio
from msgspec import structs

from staged_pool.runtime.card import Lane
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

LETTERS = b"lie"


class Liar:
    """One end of a line to the engine process.

    Args:
        plan: Its messages and their times.
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
        """Yield the frames, one or several at once."""
        rng, plan = self._rng, self._plan
        yield plain_frame(messages.Hello(VERSION))
        for request in range(plan.requests):
            said = self._request(request)
            if rng.random() < 0.2:
                rng.shuffle(said)
            frames = [
                corrupted_once(rng, *each) if rng.random() < plan.lies else plain_frame(*each)
                for each in said
                for _ in range(1 + (rng.random() < 0.05))
            ]
            if len(said) == 2:  # it goes as it comes, and says so again, so that one read has both
                frames += frames[-1:] * 10
            while frames:
                count = len(frames) if len(said) == 2 else rng.randint(1, len(frames))
                yield b"".join(frames[:count])
                del frames[:count]

    def _request(self, request: int) -> list[tuple[Message, bytes]]:
        """Return the messages of a request, in order."""
        rng = self._rng
        priority, waits = rng.choice([*Priority]), rng.random() < 0.5
        said: list[tuple[Message, bytes]] = [
            (messages.Admit(request, 0, 10, rng.choice([None, 0.005]), priority, "a", None, waits), b"")
        ]
        if rng.random() < 0.6:
            said.append((messages.Count(request, {"text": 2, "image": 1}), b""))
            said += [self._items(request) for _ in range(rng.randint(0, 4))]
        if rng.random() < 0.7:
            said.append((messages.Leave(request, rng.random() < 0.5, 0.0, rejected=False), b""))
        if rng.random() < 0.1:
            said.append((rng.choice([messages.Free([0]), messages.Clear(0, results=True)]), b""))
        return said

    def _items(self, request: int) -> tuple[Message, bytes]:
        rng, outputs, count = self._rng, pack_outputs(DENSE_ONLY), len(LETTERS)
        ids = b"".join(letter.to_bytes(4, "little") for letter in LETTERS) + bytes(4)
        ids = ids if rng.random() < 0.8 else rng.choice([b"\xff", b"\x7f"]) * 4 + ids[4:]
        numbers = b"".join((rng.choice([-1, 0, 1, 2, 10**6]) % 2**32).to_bytes(4, "little") for _ in range(2))
        payload: Any = rng.choice([
            PackedIds(outputs, count),
            PackedSequence(outputs, count, None, 0, 0, rng.choice([None, 2]), [], False, rng.choice([None, 2]), None),
            PackedImage(outputs, count, PackedPixels("|u1", [count], None, 1, None)),
        ])  # fmt: skip
        raw = ids + numbers * 2 if not isinstance(payload, PackedImage) else LETTERS + bytes(5)
        lane: Lane = "image" if isinstance(payload, PackedImage) else "text"
        key = (request, rng.randrange(3), 0)
        made = messages.Items(0, lane, rng.randrange(3), 0.001, None, len(raw), [key], [rng.randbytes(16)], [payload])
        return (made if rng.random() < 0.8 else structs.replace(made, lane=rng.choice(["text", "image"]))), raw
