"""Output of the commands: tables, percentiles, targets, and a JSON file."""

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

from perf.tools.servers import ROOT

RESULTS: Final = ROOT / "perf" / "results"
_PACKAGES: Final = ("staged-pool", "torch", "transformers", "tokenizers", "numpy", "anyio", "hypercorn", "uvloop",
                    "trio", "uvicorn", "fastapi")  # fmt: skip

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
"""Console as wide as the terminal; wide enough for whole tables in a file."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Percentiles of one set of samples; with fewer than 100 samples, p99 is the largest."""

    samples: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary | None:
        """Return the summary of samples; None if there are none."""
        if not values:
            return None
        p50, p99 = float(np.percentile(values, 50)), float(np.percentile(values, 99, method="higher"))
        return cls(len(values), p50, p99, max(values))

    @staticmethod
    def cells(summary: Summary | None) -> tuple[str, str, str, str]:
        """Return the cells of a table: p50, p99, maximum, number of samples."""
        if summary is None:
            return "-", "-", "-", "0"
        return number(summary.p50), number(summary.p99), number(summary.max), str(summary.samples)


def number(value: float) -> str:
    """Format a number with three significant digits, or as an integer from 100 on."""
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
    """Return a Markdown table; the first column holds names, the others numbers."""
    marks = ["-" if place == 0 else "-:" for place in range(len(columns))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, marks, *rows))


def write_markdown(
    command: str, *tables: tuple[Sequence[str], Sequence[Sequence[str]]], note: str, folder: Path = RESULTS
) -> None:
    """Write tables, each with columns and rows, to `<command>.md` in a folder."""
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
    """The limit is a minimum, not a maximum."""

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def show(self) -> None:
        verdict = "[green]met[/]" if self.met else "[red]missed[/]"
        value, limit = number(self.value), f"{self.limit:g}"
        unit, sign = f" {self.unit}" if self.unit else "", ">=" if self.at_least else "<="
        console.print(f"{self.name}: {value}{unit}, target {sign} {limit}{unit}: {verdict}")


class Record:
    """Settings, results and targets of one command, for its JSON file."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.settings = settings
        self.results: dict[str, object] = {}
        self.targets: list[Target] = []

    def show_target(self, name: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> None:
        """Record a target, and print if it is met."""
        self.keep_target(name, value, limit, unit, at_least=at_least).show()

    def keep_target(self, name: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> Target:
        """Record a target, to be shown later."""
        target = Target(name, value, limit, unit, at_least)
        self.targets.append(target)
        return target


@contextmanager
def recording(command: str, settings: Mapping[str, object], *, folder: Path = RESULTS) -> Iterator[Record]:
    """Write `<command>.json` in a folder at the end of the block, unless it raised.

    It also prints the cores that other processes used meanwhile, because they make the figures less reliable.
    """
    record = Record(settings)
    started, others_before_s = time.perf_counter(), others_s()
    yield record
    others_cores = max(0.0, (others_s() - others_before_s) / (time.perf_counter() - started))
    document = {
        "command": command,
        "command_line": ["python", "-m", _package(), *sys.argv[1:]],
        "machine": machine_facts(),
        "others_cores": round(others_cores, 2),
        "settings": record.settings,
        "results": record.results,
        "targets": [asdict(target) | {"met": target.met} for target in record.targets],
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{command}.json"
    path.write_text(json.dumps(document, indent=2, default=asdict) + "\n")
    console.print(f"other processes used {others_cores:.2f} cores meanwhile; written: {os.path.relpath(path, ROOT)}\n")


def _package() -> str:
    """Return the package whose command this is, such as `perf.gpu`."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec is not None and spec.name.startswith("perf") else "perf"


def machine_facts() -> dict[str, object]:
    """Return facts about the machine, the libraries and the commit."""
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
    """Show a progress bar during the block; call `advance(bar.task_ids[0])` after each step."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(what, total=steps)
        yield bar


def _version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
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
    """Return the CPU time of unrelated processes in seconds; only differences are meaningful."""
    return _busy_s() - own_s()


def own_s() -> float:
    """Return the CPU time of this process and its children so far, in seconds."""
    own = psutil.Process()
    times = own.cpu_times()
    total_s = times.user + times.system + times.children_user + times.children_system
    for child in own.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, and its time counts for its parent
            times = child.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return float(total_s)


def _busy_s() -> float:
    """Return the busy time of all cores so far in seconds; `nice` is that of low-priority threads."""
    times = psutil.cpu_times()
    return float(times.user + getattr(times, "nice", 0.0) + times.system)
