"""`python -m tests.fuzz`: run the fuzzer, with a number of examples for each route."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from tests.fuzz.run import Wrong, fuzz


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="for each route (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="repeats a run (default: a new one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            cases, said = fuzz(Path(folder), examples=arguments.examples, seed=arguments.seed)
        except Wrong as wrong:
            sys.exit(f"{wrong}\nseed {arguments.seed}")
    print(f"{said}\n{cases} requests, seed {arguments.seed}: nothing is wrong")


if __name__ == "__main__":
    main()
