"""Progress bars of the hub's client that draw nothing, and count its bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # it is listed in a lazy module


def counting_bars(moved: Callable[[int, int], None]) -> type[Any]:
    """Return the class of bars for one download.

    The client has one or two bars of bytes for all files, of which the totals grow as files begin. With two, one
    counts the bytes of the network, and its total is a guess. So the smaller total counts, and the bar that is ahead.

    Args:
        moved: Called with the downloaded and the total bytes, in the threads of the client.
    """
    lock = threading.Lock()
    bars: list[CountingBar] = []

    class CountingBar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": True})  # type: ignore[no-untyped-call]
            if settings.get("unit") == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            with lock:
                self.n += n or 0
            self.refresh()
            return None

        def refresh(self, *args: Any, **settings: Any) -> None:
            totals = [int(bar.total) for bar in bars if bar.total]
            if self in bars and totals:
                moved(int(max(bar.n for bar in bars)), min(totals))

    return CountingBar
