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
        ('"""A queue. It keeps what is left."""\n', "has a plainer phrase than 'what is'"),
        ("# Keep what it gives.\n", "has a plainer phrase than 'what it'"),
        ("# Keep what they give.\n", "has a plainer phrase than 'what they'"),
        ("# Take so many items.\n", "has a plainer phrase than 'so many'"),
        ("# Take as many as fit.\n", "has a plainer phrase than 'as many as'"),
        ("# Answer whoever asks.\n", "has a plainer phrase than 'whoever'"),
        ("# Take whichever comes.\n", "has a plainer phrase than 'whichever'"),
        ("# It had better wait.\n", "has a plainer phrase than 'had better'"),
        ("# Keep that which waits.\n", "has a plainer phrase than 'that which'"),
        ("# Answer those who wait.\n", "has a plainer phrase than 'those who'"),
        ("# A list. Of which one is kept.\n", "has a plainer phrase than 'Of which'"),
        ('"""Load pictures."""\n', "has a plainer phrase than 'pictures'"),
        ("# It refuses the request.\n", "has a plainer phrase than 'refuses'"),
        ("# A client is turned away.\n", "has a plainer phrase than 'turned away'"),
        ("# It declined the request.\n", "has a plainer phrase than 'declined'"),
        ("X = 1  # whether it runs\n", "comment begins with an indirect question"),
        ("# How many wait.\n", "comment begins with an indirect question"),
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
        "# Connection refused: the peer sends `refuse` or REFUSED_STREAM; ConnectionRefusedError here.\n",
        "# How many wait? One list.\n",
        "# When a batch ends, the next one starts.\n",
        '"""A module."""\n# Longer than 350 lines: one table that is read as a whole.\n' + "X = 1\n" * 360,
    ],
)
def test_plain_text_and_explained_lengths_pass(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    assert list(faults_of(ROOT / "stages" / "made_up.py")) == []
