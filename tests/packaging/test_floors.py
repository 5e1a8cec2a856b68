"""Folders are floors: no import runs up, and no modules import each other in a circle."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.packaging.floors import FLOORS, folder, imports, modules


def test_every_folder_has_a_floor_and_every_floor_is_a_folder() -> None:
    assert {folder(place) for place in modules().values()} == set(FLOORS)
    assert len(FLOORS) == len(set(FLOORS))


def test_no_import_runs_up() -> None:
    assert not [
        str(one)
        for one in imports(modules())
        if FLOORS.index(folder(one.importer)) > FLOORS.index(folder(one.imported))
    ]


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[Path, set[Path]] = {}
    for one in imports(modules()):
        graph.setdefault(one.importer, set()).add(one.imported)
    circle: list[Path] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle
