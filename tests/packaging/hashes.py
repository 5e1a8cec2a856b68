"""Write `deploy/hashes/`: each version that the image and the release install, with the hashes that PyPI has for it.

pip then takes a file only if its hash is among them. Needs `uv`, and PyPI: `make hashes`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "deploy/hashes"

OF_TORCH: Final = re.compile(r"torch|triton|(nvidia|cuda)-.*")
"""Packages that come with a build of torch, and not with each: a build of another index has hashes of its own."""

_PINNED: Final = re.compile(r"^([\w.-]+)==([\w.!+]+)")


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the version and all lines of each requirement of a file."""
    for entry in re.split(r"\n(?=\w)", text.strip()):
        if found := _PINNED.match(entry):
            yield found[1], found[2], entry


def _compiled(*arguments: str, wanted: str = "") -> str:
    """Resolve requirements to the versions of `constraints.txt`, with hashes, for each machine."""
    command = [
        str(Path(sys.executable).with_name("uv")), "pip", "compile", *arguments, "--quiet", "--universal",
        "--python-version", "3.11", "--constraints", "constraints.txt", "--generate-hashes", "--no-header",
        "--no-annotate", "--default-index", "https://pypi.org/simple",
    ]  # fmt: skip
    return subprocess.run(command, input=wanted, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _write(name: str, what: str, found: Sequence[tuple[str, str, str]]) -> None:
    lines = "\n".join(entry for *_, entry in found)
    (FOLDER / name).write_text(f"# {what} Written by `make hashes`.\n{lines}\n")


def _main() -> None:
    FOLDER.mkdir(exist_ok=True)
    server = list(entries(_compiled("pyproject.toml")))
    torch = list(entries(_compiled("-", wanted="torch")))
    build = list(entries(_compiled("-", wanted="build\nsetuptools\n")))
    _write(
        "server.txt",
        "What the server needs beside torch.",
        [each for each in server if not OF_TORCH.fullmatch(each[0])],
    )
    _write("torch.txt", "torch as PyPI has it, and what that build needs.", torch)
    _write("build.txt", "What builds the package.", build)


if __name__ == "__main__":
    _main()
