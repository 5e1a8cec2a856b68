"""The made-up scene that the README begins with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from geo_segmentation import sample
from geo_segmentation.geotiff import read_bands, read_header


def test_the_sample_is_a_scene_that_the_plugin_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sample", str(tmp_path / "scene.tif")])
    sample.main()
    tiff = read_header((tmp_path / "scene.tif").read_bytes(), None, max_values=64_000_000, place="data.data")
    bands, valid = read_bands(tiff)
    assert bands.shape == (6, sample.HEIGHT, sample.WIDTH)
    assert not valid[0, 0]
    assert valid[-1, -1]
    assert 0.9 < valid.mean() < 1


def test_a_file_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sample"])
    with pytest.raises(SystemExit, match=r"usage: python -m geo_segmentation.sample FILE"):
        sample.main()
