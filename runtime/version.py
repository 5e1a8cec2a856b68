"""Version of the installed package."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

VERSION: Final = version("staged-pool")
