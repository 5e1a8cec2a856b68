"""Commands that run modules of this package with this interpreter."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program.

    It finds the same modules as this process.
    """
    isolation = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, *isolation, "-m", module, *arguments]
