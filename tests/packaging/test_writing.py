"""The rules of writing and of size hold in every file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.writing import FOLDERS, ROOT, faults_of, files


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_keeps_the_rules(folder: str) -> None:
    assert [str(fault) for path in files([folder]) for fault in faults_of(path)] == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('"""Whether it runs."""\n', "begins with an indirect question"),
        ('"""Of the weights."""\n', "begins with an indirect question"),
        ('"""' + "word " * 16 + '."""\n', "first sentence over 15 words"),
        ('"""A value.\n\n' + "word " * 31 + '."""\n', "sentence over 30 words"),
        ('"""A value, and"""\n', "does not end its sentence"),
        ('X = 1\n"""and its unit."""\n', "begins like the end of another"),
        ("# " + "word " * 31 + "\n", "sentence over 30 words"),
        ('"""A module."""\n' + "X = 1\n" * 351, "over 350 lines"),
        ('"""A module."""\n\n\ndef run() -> None:\n' + "    print()\n" * 71, "function over 70 lines"),
    ],
)
def test_a_place_that_breaks_a_rule_is_found(source: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "stages" / "made_up.py"
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    assert rule in " ".join(fault.rule for fault in faults_of(path))


@pytest.mark.parametrize(
    "source",
    [
        '"""Vectors of texts: [texts, width], float32."""\n',
        '"""Return the row; None if there is none.\n\nArgs:\n    row: The row.\n"""\n',
        '"""A module."""\n# Longer than 350 lines: one table that is read as a whole.\n' + "X = 1\n" * 360,
    ],
)
def test_plain_text_and_explained_lengths_pass(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    assert list(faults_of(ROOT / "stages" / "made_up.py")) == []
