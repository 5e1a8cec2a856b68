"""Throughput of preprocess by number of threads, and the cost of an image.

The defaults of the limits of preprocess are based on these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Final, TypeVar, get_args

from perf.cost.at_once import Block
from perf.cost.preparing import Costs, Given, Images, Way, processor_folders, stock_class
from perf.cost.tokenizing import CALLERS, WORDS, AmongLong, Length, Texts
from perf.tools import report
from perf.tools.jpegs import SIZES
from perf.tools.report import number
from perf.tools.servers import Options
from perf.tools.workers import worker

TEXT_THREADS: Final = (1, 2, 4, 8)
IMAGE_THREADS: Final = (1, 2, 4, 6)
FAMILIES: Final = ("CLIP", "Qwen2-VL")
"""Families whose images are preprocessed by several threads."""
WARM_UP_S: Final = 0.2

T = TypeVar("T")
R = TypeVar("R")

Rows = Mapping[str, tuple[Callable[[Block[T]], R], T]]
"""Worker and argument of each row, by its name."""


def run(options: Options, *, rounds: int, seconds: float) -> None:
    """Measure, print and record.

    Each round has everything once, in alternating order. The gain of more threads is the median of the ratios within a
    round, so that a drift of the machine's speed does not bias it.
    """
    settings = {"options": options, "rounds": rounds, "seconds": seconds, "words": WORDS}
    with report.recording("preprocess", settings) as record, processor_folders() as folders:
        _texts(record, options, rounds, seconds)
        _images(record, folders, rounds, seconds)
        _costs(record, folders)


def _texts(record: report.Record, options: Options, rounds: int, seconds: float) -> None:
    with worker(partial(Texts, options)) as texts, worker(partial(AmongLong, options)) as among:
        lengths: tuple[Length, ...] = get_args(Length)
        rates = _rounds(
            {f"{WORDS[length]} words": (texts, length) for length in lengths}, TEXT_THREADS, rounds, seconds
        )
        alone: Rows[Length, list[float]] = {"short": (among, "short")}
        waits = _rounds(alone, TEXT_THREADS, rounds, seconds)["short"]
    _show_rates(record, "Texts tokenized per second", rates, TEXT_THREADS)
    taken = {threads: report.Summary.of(list(chain(*of_rounds))) for threads, of_rounds in waits.items()}
    record.results["short text among long ones, ms"] = taken
    rows = [[str(threads), *report.Summary.cells(summary)] for threads, summary in taken.items()]
    title = f"One short text, while {CALLERS} callers have lists of long ones tokenized (ms)"
    report.show_table(title, ["threads", "p50", "p99", "max", "n"], rows)


def _images(record: report.Record, folders: Mapping[str, Path], rounds: int, seconds: float) -> None:
    chosen = {family: folders[family] for family in FAMILIES}
    with ExitStack() as running:
        ways: tuple[Way, ...] = get_args(Way)
        workers = {way: running.enter_context(worker(partial(Images, chosen, way))) for way in ways}
        rows = {
            f"{family}, {size}, {way}": (workers[way], Given(family, size))
            for family, size, way in product(FAMILIES, SIZES, ways)
        }
        rates = _rounds(rows, IMAGE_THREADS, rounds, seconds)
    classes = [stock_class(folder) for folder in chosen.values()]
    record.results["stock"] = classes
    note = f"stock: {' and '.join(classes)}, with all of torch's threads"
    _show_rates(record, "Images prepared per second", rates, IMAGE_THREADS, note)


def _costs(record: report.Record, folders: Mapping[str, Path]) -> None:
    rows = []
    with worker(partial(Costs, folders)) as ask:
        for family, size in product(folders, SIZES):
            cost = ask(Given(family, size))
            prepared = [cost.fast_s - cost.decode_s, cost.exact_s - cost.decode_s]
            record.results[f"one image: {family}, {size}"] = cost
            rows.append(
                [f"{family}, {size}", *(number(s * 1e3) for s in (cost.decode_s, cost.fast_s, cost.exact_s)),
                 number(cost.exact_s / cost.fast_s), number(prepared[1] / prepared[0]),
                 *(number(size_bytes / 1e3) for size_bytes in (cost.fast_bytes, cost.exact_bytes, cost.stock_bytes))]
            )  # fmt: skip
    columns = ["one image, one thread", "decode, ms", "fast", "exact", "exact / fast", "not decoding",
               "kB: fast", "exact", "stock"]  # fmt: skip
    note = "CPU time, all of it and without decoding; bytes that go to the device"
    report.show_table("What an image takes", columns, rows, note)


def _rounds(rows: Rows[T, R], threads: Sequence[int], rounds: int, seconds: float) -> dict[str, dict[int, list[R]]]:
    """Run each row with each number of threads; return the figures of the rounds."""
    seen: dict[str, dict[int, list[R]]] = {name: {count: [] for count in threads} for name in rows}
    with report.progress("preprocess", rounds * len(rows)) as bar:
        for ask, what in rows.values():
            ask(Block(what, max(threads), WARM_UP_S))
        for place in range(rounds):
            order = -1 if place % 2 else 1
            for name in list(rows)[::order]:
                ask, what = rows[name]
                for count in threads[::order]:
                    seen[name][count].append(ask(Block(what, count, seconds)))
                bar.advance(bar.task_ids[0])
    return seen


def _show_rates(
    record: report.Record,
    title: str,
    rates: Mapping[str, Mapping[int, Sequence[float]]],
    threads: Sequence[int],
    note: str = "",
) -> None:
    rows = []
    for name, by_threads in rates.items():
        gained = {count: gain(by_threads[count], by_threads[1]) for count in threads}
        record.results[name] = {"per_second": by_threads, "gained": gained}
        cells = [f"{number(median(by_threads[count]))} ({gained[count]:+.0%})" for count in threads[1:]]
        rows.append([name, number(median(by_threads[1])), *cells])
    report.show_table(title, ["", "1 thread", *(f"{count} threads" for count in threads[1:])], rows, note)


def gain(rates: Sequence[float], of_one: Sequence[float]) -> float:
    """Return the relative gain of several threads over one: the median of the rounds."""
    return median(several / one for several, one in zip(rates, of_one, strict=True)) - 1
