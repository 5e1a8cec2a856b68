"""A trio program that ranks the lines of a file for several queries at once.

Run it with `python trio_program.py FILE QUERY ...`. `MODEL` is a folder or a hub id.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import trio

import staged_pool


async def ask(engine: staged_pool.Engine, query: str, lines: list[str]) -> None:
    """Print the three best lines; other queries go on if this one takes more than ten seconds."""
    with trio.move_on_after(10) as scope:  # cancels the request in the engine, too
        result = await engine.rerank(query, lines, top_n=3)
        for rank in result.ranking:
            print(f"{query}\t{rank.score:.3f}\t{lines[rank.index]}")
    if scope.cancelled_caught:
        print(f"{query}\ttoo late")


async def main(path: str, *queries: str) -> None:
    text = await trio.Path(path).read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    config = staged_pool.EngineConfig(model=os.environ.get("MODEL"))
    async with staged_pool.open_engine(config) as engine, trio.open_nursery() as nursery:
        for query in queries:
            nursery.start_soon(ask, engine, query, lines)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: trio_program.py FILE QUERY ...")
    trio.run(partial(main, *sys.argv[1:]))
