"""`python -m tests.fuzz.parsers`: coverage-guided fuzzing of our own parsers, by atheris.

atheris is no requirement of the project: `pip install atheris` first. Findings are written to a folder; a finding
that is fixed goes into `tests/fuzz/corpus/<target>/`, which ordinary tests replay.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

CORPUS: Final = Path(__file__).with_name("corpus")
INSTRUMENTED: Final = [
    "staged_pool.api.http.protocol.strict_reader", "staged_pool.api.http.protocol.content_coding",
    "staged_pool.api.wire", "staged_pool.client", "staged_pool.runtime.models.images", "staged_pool.runtime.media.urls",
    "h11", "python_multipart",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.parsers", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of all targets together (default: %(default)s)")
    parser.add_argument("--only", default="", help="one target; default: all, one after the other")
    parser.add_argument(
        "--found", type=Path, default=Path("fuzz-found"), help="folder of findings (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer; 0: a new one")
    given = parser.parse_args()
    if os.environ.get("STAGED_POOL_FUZZING"):
        _fuzz(given.only)
        return
    from tests.fuzz.targets import TARGETS

    names = [given.only] if given.only else list(TARGETS)
    seconds = max(1, int(given.minutes * 60 / len(names)))
    failed = [name for name in names if not _run(name, seconds, given.found, given.seed)]
    print(
        f"{len(names)} targets, {given.minutes:g} minutes: {f'findings in {failed}' if failed else 'nothing is wrong'}"
    )
    sys.exit(bool(failed))


def _run(name: str, seconds: int, found: Path, seed: int) -> bool:
    """Fuzz one target in a process of its own; False if something was found."""
    corpus, kept = found / "corpus" / name, CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.parsers", "--only", name]
    settings = [
        f"-max_total_time={seconds}",
        "-timeout=10",
        "-rss_limit_mb=4096",
        "-max_len=4096",
        "-print_final_stats=1",
    ]
    settings += [f"-artifact_prefix={found}/{name}-", f"-seed={seed}", "-verbosity=0", str(corpus)]
    settings += [str(kept)] if kept.is_dir() else []
    environment = os.environ | {"STAGED_POOL_FUZZING": "\n".join(settings)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, errors="replace")
    said = [line for line in done.stderr.splitlines() if "number_of_executed" in line or "new_units" in line]
    print(f"{name:16} {'nothing' if done.returncode == 0 else 'FOUND'}  {' '.join(' '.join(said).split())}", flush=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
    return done.returncode == 0


def _fuzz(name: str) -> None:
    """Run libFuzzer in this process, which ends with it."""
    atheris: Any = importlib.import_module("atheris")

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.targets import TARGETS
    atheris.Setup([sys.argv[0], *os.environ["STAGED_POOL_FUZZING"].split("\n")], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
