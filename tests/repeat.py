"""`python -m tests.repeat PATHS`: tests again and again beside busy loops, and which of them fail by chance."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

_BUSY: Final = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Program of a busy loop, which ends with its parent at the latest."""

_UNTOLD: Final = "(the run itself)"
"""Name for a run that has failed without a failed test: it crashed, or could not be started."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a test has failed in any round."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, folders or tests")
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--busy", type=int, default=2, help="busy loops beside the tests (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=3600, help="longest time of a round (default: %(default)s)")
    parser.add_argument("-k", dest="only", default="", help="only tests that match, as for pytest")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    failures: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    folder = Path(tempfile.mkdtemp(prefix="staged-pool-repeat-"))
    with _busy_loops(options.busy):
        for number in range(1, options.rounds + 1):
            began_at = time.monotonic()
            failed = _round(options.paths, options.only, options.limit_s, folder / f"round-{number}")
            failures.update(failed.keys())
            reasons |= failed
            took_s = time.monotonic() - began_at
            console.print(f"round {number}: {took_s:.0f} s, {len(failed)} failed", *failed, sep="\n  ", markup=False)
    table = Table("test", "failed", "last reason")
    for test, count in failures.most_common():
        table.add_row(Text(test), f"{count} of {options.rounds}", Text(reasons[test]))
    if failures:
        console.print(table)
        console.print(f"output of the rounds: {folder}")
    return bool(failures)


@contextmanager
def _busy_loops(number: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _round(paths: Sequence[str], only: str, limit_s: float, output: Path) -> dict[str, str]:
    """Run the tests once. Returns the failed ones, each with its reason in one line."""
    report = output.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *paths]
    with output.with_suffix(".txt").open("w") as file:
        run = subprocess.Popen([*command, "-k", only] if only else command, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = run.wait(limit_s)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGABRT)  # pytest prints what each thread does
            run.wait()
            return {_UNTOLD: f"it did not end within {limit_s:g} s"}
    failed = dict(_failures(report)) if report.exists() else {}
    return failed or ({_UNTOLD: f"exit code {code}"} if code else {})


def _failures(report: Path) -> Iterator[tuple[str, str]]:
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                yield f"{case.get('classname')}::{case.get('name')}", (found.get("message") or kind).split("\n", 1)[0]


if __name__ == "__main__":
    sys.exit(main())
