"""Each published layout gives its oracle's results, or is rejected with its cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models.published import Layout, embedders, scores, seeing, tokens, unserved, unserved_seeing
from tests.needed import skip_below

TABLES = [table.LAYOUTS for table in (embedders, tokens, scores, seeing, unserved, unserved_seeing)]
LAYOUTS: dict[str, Layout] = {name: layout for table in TABLES for name, layout in table.items()}
SERVED = [name for name, layout in LAYOUTS.items() if layout.equal is not None]
REJECTED = [name for name, layout in LAYOUTS.items() if layout.equal is None]
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"


def made(layout: Layout, folder: Path) -> Path:
    if layout.needs is not None:
        skip_below("transformers", layout.needs, "the layout")
    folder.mkdir()
    torch.manual_seed(7)
    layout.make(folder)
    return folder


def config(folder: Path, layout: Layout) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", torch_threads=1, **layout.settings)


@pytest.mark.parametrize("name", SERVED)
def test_a_published_layout_gives_the_results_of_its_oracle(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    folder = made(layout, tmp_path / "model")
    assert layout.equal is not None
    layout.equal(folder, load_model(config(folder, layout)))


@pytest.mark.parametrize("name", REJECTED)
def test_a_published_layout_that_is_not_served_is_rejected_with_its_cause(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    folder = made(layout, tmp_path / "model")
    with pytest.raises(ConfigError) as error:
        load_model(config(folder, layout))
    message = str(error.value)
    assert "\n" not in message
    assert layout.cause
    assert [text for text in layout.cause if text not in message] == [], message


def test_the_document_counts_the_layouts() -> None:
    assert sum(map(len, TABLES)) == len(LAYOUTS) > 80
    found = re.search(
        r"(\d+) published layouts.{0,200}?(\d+) give.{0,200}?(\d+) are rejected", DOCUMENT.read_text(), re.S
    )
    assert found is not None
    assert [int(number) for number in found.groups()] == [len(LAYOUTS), len(SERVED), len(REJECTED)]
