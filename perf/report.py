"""What a command says: tables, percentiles that name their number of samples, targets, and a JSON file of it all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from perf.servers import ROOT

RESULTS: Final = ROOT / "perf" / "results"
_PACKAGES: Final = ("staged-pool", "torch", "transformers", "tokenizers", "numpy", "anyio", "hypercorn", "uvloop",
                    "trio", "uvicorn", "fastapi")  # fmt: skip

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
"""As wide as the terminal; a file gets whole tables."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one set of samples. With fewer than 100 samples, p99 is the largest one."""

    samples: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary | None:
        """None: there are no samples."""
        if not values:
            return None
        p50, p99 = float(np.percentile(values, 50)), float(np.percentile(values, 99, method="higher"))
        return cls(len(values), p50, p99, max(values))

    @staticmethod
    def cells(summary: Summary | None) -> tuple[str, str, str, str]:
        """For a table: p50, p99, maximum, number of samples."""
        if summary is None:
            return "-", "-", "-", "0"
        return number(summary.p50), number(summary.p99), number(summary.max), str(summary.samples)


def number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print a table; the first column holds names, the others numbers."""
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The lines of a table; the first column holds names, the others numbers."""
    marks = ["-" if place == 0 else "-:" for place in range(len(columns))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, marks, *rows))


def write_markdown(
    command: str, *tables: tuple[Sequence[str], Sequence[Sequence[str]]], note: str, folder: Path = RESULTS
) -> None:
    """Write tables, each its columns and its rows, to `<command>.md` in a folder."""
    paragraphs = [markdown_table(columns, rows) for columns, rows in tables]
    folder.mkdir(exist_ok=True)
    (folder / f"{command}.md").write_text("\n".join([*paragraphs, f"{note}\n"]))


@dataclass(frozen=True, slots=True)
class Target:
    """A limit that a measured value is held to."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False
    """The limit is the least value that meets the target, not the largest."""

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def show(self) -> None:
        verdict = "[green]met[/]" if self.met else "[red]missed[/]"
        value, limit = number(self.value), f"{self.limit:g}"
        unit, sign = f" {self.unit}" if self.unit else "", ">=" if self.at_least else "<="
        console.print(f"{self.name}: {value}{unit}, target {sign} {limit}{unit}: {verdict}")


class Record:
    """What one command found; becomes its JSON file."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.settings = settings
        self.results: dict[str, object] = {}
        self.targets: list[Target] = []

    def show_target(self, name: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> None:
        """Print whether a target is met, and keep it."""
        self.keep_target(name, value, limit, unit, at_least=at_least).show()

    def keep_target(self, name: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> Target:
        """Keep a target, to be shown later."""
        target = Target(name, value, limit, unit, at_least)
        self.targets.append(target)
        return target


@contextmanager
def recording(command: str, settings: Mapping[str, object], *, folder: Path = RESULTS) -> Iterator[Record]:
    """Write `<command>.json` in a folder at the end of the block, unless it raised.

    Also says how many cores other processes took meanwhile: on a busy machine, figures are worth less.
    """
    record = Record(settings)
    started, others_before_s = time.perf_counter(), others_s()
    yield record
    others_cores = max(0.0, (others_s() - others_before_s) / (time.perf_counter() - started))
    document = {
        "command": command,
        "command_line": ["python", "-m", "perf", *sys.argv[1:]],
        "machine": machine_facts(),
        "others_cores": round(others_cores, 2),
        "settings": record.settings,
        "results": record.results,
        "targets": [asdict(target) | {"met": target.met} for target in record.targets],
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{command}.json"
    path.write_text(json.dumps(document, indent=2, default=asdict) + "\n")
    console.print(f"other processes took {others_cores:.2f} cores meanwhile; written: {os.path.relpath(path, ROOT)}\n")


def machine_facts() -> dict[str, object]:
    """What the figures depend on besides the code."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": sys.version,
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").splitlines(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@contextmanager
def progress(what: str, steps: int) -> Iterator[Progress]:
    """A bar of so many steps; call `advance(bar.task_ids[0])` after each. Gone at the end of the block."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(what, total=steps)
        yield bar


def _version(package: str) -> str:
    """Empty: it is not installed, and was not needed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def others_s() -> float:
    """CPU time so far that neither this process nor its children took; only differences mean something."""
    return _busy_s() - own_s()


def own_s() -> float:
    """CPU time of this process and its children so far, ended or not."""
    own = psutil.Process()
    times = own.cpu_times()
    total_s = times.user + times.system + times.children_user + times.children_system
    for child in own.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile: its parent has its time
            times = child.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return float(total_s)


def _busy_s() -> float:
    """Time of all cores so far in which they were not idle; `nice` is what threads that stand back have run."""
    times = psutil.cpu_times()
    return float(times.user + getattr(times, "nice", 0.0) + times.system)
