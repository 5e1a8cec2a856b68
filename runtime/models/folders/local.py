"""Local model folders, distinguished from hub ids without a request to the hub."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Final

from staged_pool.stages.errors import ConfigError

_HUB_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables that forbid downloads. As for the hub's client, the first one that is set counts."""


def offline_variable() -> str:
    """Return the name of the variable that forbids downloads; empty if none does."""
    name = next((name for name in _OFFLINE if os.environ.get(name)), "")
    return name if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} else ""


def local_folder(model: str) -> Path | None:
    """The folder that `model` names; None if it has the form of a hub id and no such path exists.

    Raises:
        ConfigError: It is neither, or the path is not a folder with files.
    """
    folder = Path(model).expanduser()
    try:
        if not folder.exists() and _HUB_ID.fullmatch(model):
            return None
        if not folder.exists():
            raise ConfigError(
                f"model={model!r}: there is no such folder; {_neighbour(folder)}name one that holds a config.json, or "
                "a hub id (organisation/name)"
            )
        if not folder.is_dir():
            raise ConfigError(f"model={model!r}: is a file; name the folder that holds it")
        if not any(folder.iterdir()):
            raise ConfigError(f"model={model!r}: the folder is empty; name one that holds a config.json")
    except OSError as error:  # an invalid file name, or a folder without read permission
        raise ConfigError(f"model={model!r}: cannot be read: {error.strerror or error}") from error
    return folder


def _neighbour(folder: Path) -> str:
    """Ask for the neighbour of a missing folder with nearly the same name; empty without one."""
    try:
        names = [entry.name for entry in os.scandir(folder.parent) if entry.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(folder.name, names, n=1, cutoff=0.8)
    return f"did you mean {str(folder.parent / near[0])!r}? Else " if near else ""
