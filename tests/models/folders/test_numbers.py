"""Every number of a folder's files, made hostile: the model loads, or is rejected in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.folders.limited import little_room

KINDS: Final = ("bert-max-dense", "colbert-pylate", "clip", "qwen3-last", "seqcls-multiclass")

FILES: Final = (
    "config.json", "1_Pooling/config.json", "2_Dense/config.json", "sentence_bert_config.json",
    "config_sentence_transformers.json", "tokenizer_config.json", "preprocessor_config.json", "tokenizer.json",
)  # fmt: skip

MOST_OF_A_FILE: Final = 60
"""Most numbers of one file: a vocabulary has thousands of a kind."""

HOSTILE: Final[tuple[object, ...]] = (
    -1,
    0,
    1,
    4097,
    10**9,
    10**18,
    10**400,
    -(10**9),
    2.5,
    float("nan"),
    float("inf"),
    "7",
    True,
    [3],
    {},
    None,
)


class Number(NamedTuple):
    """The place of a number in the files of a folder."""

    kind: str
    file: str
    fields: tuple[str | int, ...]


def places(value: Any, fields: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each number inside a value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield fields
    elif isinstance(value, dict | list):
        for place, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*fields, place))


@pytest.fixture(scope="module")
def folders(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    copies = tmp_path_factory.mktemp("numbers")
    return {kind: Path(shutil.copytree(tiny_folder(kind), copies / kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def numbers(folders: dict[str, Path]) -> list[Number]:
    found = []
    for kind, folder in folders.items():
        for file in FILES:
            if (folder / file).is_file():
                inside = list(places(json.loads((folder / file).read_text())))
                step = max(1, len(inside) // MOST_OF_A_FILE)
                found += [Number(kind, file, fields) for fields in inside[::step]]
    return found


@example(place=0.999, value=10**9)
@given(place=st.floats(0, 1, exclude_max=True), value=st.sampled_from(HOSTILE))
def test_a_hostile_number_is_served_or_refused_by_name(
    folders: dict[str, Path], numbers: list[Number], place: float, value: object
) -> None:
    number = numbers[int(place * len(numbers))]
    folder = folders[number.kind]
    file = folder / number.file
    before = file.read_text()
    content = inner = json.loads(before)
    for field in number.fields[:-1]:
        inner = inner[field]
    inner[number.fields[-1]] = value
    file.write_text(json.dumps(content))
    config = EngineConfig(model=str(folder), dtype="float32", torch_threads=1, tune="off", offline=True)
    try:
        with little_room():
            load_model(config).close()
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message, number
        assert len(message) < 1000, number
    finally:
        file.write_text(before)
