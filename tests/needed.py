"""Tests of what an old version of a library does not have: they are skipped below the version that does."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, least: str, why: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where `package` is older than `least`."""
    return pytest.mark.skipif(is_older(package, least), reason=_reason(package, least, why))


def skip_below(package: str, least: str, why: str) -> None:
    """Skip the test that runs where `package` is older than `least`."""
    if is_older(package, least):
        pytest.skip(_reason(package, least, why))


def is_older(package: str, least: str) -> bool:
    return Version(version(package)) < Version(least)


def _reason(package: str, least: str, why: str) -> str:
    return f"{why} needs {package} {least}"
