"""Paths inside a model folder, as its files name them."""

from __future__ import annotations

import os
from pathlib import Path


def leads_out(name: str) -> bool:
    """Return True if a relative path would lead out of its folder.

    Only the name counts: a link in the folder is a choice of its maker. In the hub's cache the
    files are links.
    """
    path = Path(os.path.normpath(name))
    return bool(path.anchor) or path.parts[:1] == ("..",)
