"""The regions of files, printed without a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from page_regions.__main__ import main
from tests.examples.documents.drawn_pages import FOOT, TITLE, drawn, encoded, pdf


def test_regions_of_files_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = drawn(TITLE, FOOT)
    for name, data in {"a.png": encoded(page), "b.pdf": pdf([page, drawn()]), "c.png": b"no image"}.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page_regions", "a.png", "b.pdf", "c.png"])
    main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["a.png, page 0: 850 x 1100 pixels", "    152    70   582   101", "    381  1035   445  1052"]
    assert [line for line in printed if "page" in line][1:] == [
        "b.pdf, page 0: 851 x 1100 pixels",
        "b.pdf, page 1: 851 x 1100 pixels",
        "c.png, page 0: The image is in no known format: it must be JPEG, PNG, WebP, GIF or BMP.",
    ]
