"""Check of a device without memory: one long input fails with the right error, and all others are right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from perf.gpu.findings import Finding, failed, guarded
from perf.gpu.inputs import texts_of
from perf.gpu.models import bert_folder
from perf.gpu.reference import reference_vectors
from perf.gpu.right_http import Volume, idle
from perf.gpu.traffic import Result, Vectors, asks, embed, judge, row_differences, send, vectors_of
from perf.tools.client import Reply
from perf.tools.servers import Options, Server, serving
from staged_pool.runtime.models.devices.accelerators import open_devices
from staged_pool.runtime.models.kernels.self_check import TOLERANCE

NAME: Final = "served, full device"
_ATTEMPTS: Final = 3
_LEFT: Final = 1 / 3
"""Share of the long input's memory that is left free at the first attempt; half as much at each later one."""
_COUNTED_ON: Final = 0.9
"""Share of the free memory that `memory_tokens` in `/ready` counts on."""
_SMALLEST_BYTES: Final = 32 * 2**20
"""Smallest allocation that fills the device: torch takes smaller ones from larger blocks."""
_LARGEST_BYTES: Final = 2**32
_SHORT_WORDS: Final = 8
_LONG_WORDS: Final = 9000
"""Words of a text that is longer than the longest input: it is cut to that."""
_SLOWEST: Final = 0.5
"""Smallest accepted throughput after the memory is given back, as a share of that before."""
_STATUS: Final = 503
_WORDS: Final = "no memory for this batch"
"""Words of the error of a batch without memory; see `encoder.compute`."""


@dataclass(frozen=True, slots=True)
class FullDevice:
    """Model and texts of the check, with their vectors by the reference."""

    model: Path
    short: Sequence[str]
    long: Sequence[str]
    """The one long text."""
    wanted: Vectors
    """Vectors of the short texts, then that of the long one."""

    @classmethod
    def prepare(cls, folder: Path, texts: int) -> FullDevice:
        """Make the model and the texts. It needs no GPU, so other checks may use it meanwhile."""
        model = _long_model(folder / "long")
        short = list(dict.fromkeys(texts_of([1 + place % _SHORT_WORDS for place in range(texts)])))
        long = texts_of([_LONG_WORDS])
        return cls(model, short, long, reference_vectors(str(model), [*short, *long]))

    def check(self, device: str, volume: Volume) -> Iterator[Finding]:
        """Take nearly all memory from a server on a GPU, and give it back.

        A server that has run a long input keeps its memory for the next one, which then cannot fail. So the long input
        is the first one of its server, and each attempt has a server of its own, with less memory left.
        """
        for attempt in range(_ATTEMPTS):
            with serving(Options(model=str(self.model), device=device).serve_command()) as server:
                run = _Attempt(self, server, open_devices(device)[0], server.card().dtype, volume)
                steps = partial(run.findings, _LEFT / 2**attempt)
                findings = list(guarded(steps, partial(failed, NAME, "", "the next step")))
            if not run.ran_beside or attempt == _ATTEMPTS - 1:
                yield from findings
                return


def _long_model(folder: Path) -> Path:
    """Make a model whose longest input takes over half a GB of memory.

    Most of it is for the wide vectors inside of its feed-forward parts. A short input takes a thousandth of that.
    """
    return bert_folder(
        folder,
        layers=2,
        width=768,
        heads=12,
        inner=16_384,
        device="cpu",
        dtype="float32",
        tokenizer=None,
        positions=8192,
    )


@dataclass(slots=True)
class _Attempt:
    """One attempt on a server of its own."""

    given: FullDevice
    server: Server
    device: torch.device
    dtype: str
    volume: Volume
    ran_beside: bool = False
    """True: the long input has run although the device was full."""

    def findings(self, left: float) -> Iterator[Finding]:
        """Run all steps.

        Args:
            left: Memory that stays free, as a share of that of the long input.
        """
        before = self._send()
        yield from self._judged("before", before)
        left_bytes = int(left * self._long_bytes())
        with _filled(self.device, left_bytes) as free_bytes:
            way = f"{free_bytes / 2**20:.0f} MiB free"
            during, reply = self._send_beside()
        self.ran_beside = reply.status == 200
        body = reply.body[:200].decode(errors="replace")
        right = reply.status == _STATUS and _WORDS in body
        yield Finding(NAME, way, "the long input fails", right=right, note=f"{reply.status} {body}")
        yield from self._judged(way, during)
        yield self._long_is_right()
        after = self._send()
        yield from self._judged("after", after)
        note = f"{before.rate:.0f} requests/s before, {during.rate:.0f} meanwhile, {after.rate:.0f} after"
        ratio = after.rate / before.rate
        yield Finding(NAME, "after", f"throughput is {ratio:.2f} of before", right=ratio >= _SLOWEST, note=note)
        yield from idle(NAME, "after", self.server)

    def _send(self) -> Result:
        given = asks(self.volume.requests, len(self.given.short), most=1, leaving=0.0)
        return send(self.server.port, self.given.short, given, self.volume.clients)

    def _send_beside(self) -> tuple[Result, Reply]:
        """Send the long text, and the short ones until it has its answer."""
        with ThreadPoolExecutor(1) as thread:
            long = thread.submit(embed, self.server.port, self.given.long)
            parts = [self._send()]
            while not long.done():
                parts.append(self._send())
        outcomes = [outcome for part in parts for outcome in part.outcomes]
        return Result(outcomes, sum(part.seconds for part in parts)), long.result()

    def _judged(self, way: str, sent: Result) -> list[Finding]:
        return judge(NAME, way, sent.outcomes, self.given.wanted[: len(self.given.short)], self._bound)

    def _long_is_right(self) -> Finding:
        reply = embed(self.server.port, self.given.long)
        finding = Finding(NAME, "after", "the same long input", right=False)
        if reply.status != 200:
            return replace(finding, note=f"{reply.status} {reply.body[:200].decode(errors='replace')}")
        apart = float(row_differences(vectors_of(reply), self.given.wanted[-1:], self.given.wanted)[0])
        return replace(finding, right=apart <= self._bound, difference=apart, bound=self._bound)

    @property
    def _bound(self) -> float:
        return TOLERANCE[getattr(torch, self.dtype)]

    def _long_bytes(self) -> float:
        """Return the bytes of a forward of the longest input, from the server's figures."""
        card = json.loads(self.server.wait_ok("/ready").body)["models"][0]
        token_bytes = _COUNTED_ON * _free_bytes(self.device) / card["memory_tokens"]
        return float(token_bytes * card["max_tokens"])


@contextmanager
def _filled(device: torch.device, left_bytes: int) -> Iterator[int]:
    """Take all memory of a device but `left_bytes` during the block; yields the bytes that are still free."""
    taken: list[Tensor] = []
    try:
        size = _LARGEST_BYTES
        while size >= _SMALLEST_BYTES:
            if _free_bytes(device) - left_bytes < size:
                size //= 2
                continue
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                size //= 2
        yield _free_bytes(device)
    finally:
        taken.clear()
        torch.cuda.empty_cache()


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]
