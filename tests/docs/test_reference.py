"""The pages of the reference are what the code says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import staged_pool
from staged_pool.api.openapi.operations import OPERATIONS
from tests.docs.reference import PAGES, commands_page, python_page, routes_page
from tests.packaging.documents import every_command


@pytest.mark.parametrize(("path", "page"), PAGES.items(), ids=lambda value: getattr(value, "name", ""))
def test_the_page_is_up_to_date(path: Path, page: Callable[[], str]) -> None:
    assert path.read_text() == page(), "run `python -m tests.docs.reference`"


def test_every_name_has_a_place() -> None:
    page = python_page()
    assert [name for name in staged_pool.__all__ if f"\n### {name}\n" not in page] == ["__version__"]


def test_every_route_has_a_place() -> None:
    page = routes_page()
    assert not [path for path, methods in OPERATIONS.items() for method in methods if f"`{method} {path}`" not in page]


def test_every_flag_of_a_command_has_a_place() -> None:
    page = commands_page()
    for words, command in every_command():
        section = page.partition(f"\n## staged-pool {' '.join(words)}\n")[2].partition("\n## ")[0]
        if "Every flag of" not in section:
            for parameter in command.params:
                assert all(name in section for name in (*parameter.opts, *parameter.secondary_opts) if name[0] == "-")
