"""Files of a model folder that have no end, or too many bytes: none is read whole before that is known."""

from __future__ import annotations

import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.folders import token_ids
from staged_pool.runtime.models.folders.chat_pairs import chat_template
from staged_pool.runtime.models.folders.readme import model_card
from staged_pool.runtime.models.folders.reranker_families import looks_like_qwen3
from staged_pool.runtime.models.folders.token_ids import check_token_ids
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.plugins.processor import PluginSetup
from staged_pool.runtime.plugins.vllm_style import _vllm_config
from staged_pool.stages.errors import ConfigError
from tests.models.folders.limited import little_room
from tests.servers.tiny_models import folder


def zeros(file: Path) -> None:
    file.symlink_to("/dev/zero")


def pipe(file: Path) -> None:
    os.mkfifo(file)


def huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 2**31)  # takes no room on the disk


Maker = Callable[[Path], None]
ENDLESS: tuple[Maker, ...] = (zeros, pipe)
FAULTS: dict[Maker, str] = {
    zeros: "it is no regular file",
    pipe: "it is no regular file",
    huge: "it has 2147483648 bytes, and 268435456 are allowed",
}


OWN = {"runtime/models/devices/kernel_choices.py": "a file of this program"}


def test_files_of_a_model_folder_are_read_in_one_place() -> None:
    root = Path(__file__).parents[3]
    sources = [*(root / "runtime/models").rglob("*.py"), *(root / "runtime/plugins").rglob("*.py")]
    found = {
        str(source.relative_to(root)) for source in sources if re.search(r"\.read_(text|bytes)\(", source.read_text())
    }
    assert found == OWN.keys()


@pytest.mark.parametrize("make", FAULTS)
def test_a_file_without_an_end_is_not_read(tmp_path: Path, make: Maker) -> None:
    make(tmp_path / "config.json")
    with little_room(), pytest.raises(ConfigError, match=rf"config\.json: cannot be read as JSON: {FAULTS[make]}"):
        JsonFile.read(tmp_path / "config.json", root=tmp_path)
    setup = PluginSetup(config=EngineConfig(), card=None, fetch=None, folder=str(tmp_path))  # type: ignore[arg-type]
    with little_room(), pytest.raises(ConfigError, match=rf"config\.json: cannot be read as JSON: {FAULTS[make]}"):
        _vllm_config(setup)


@pytest.mark.parametrize("make", FAULTS)
def test_no_reader_of_a_folder_reads_such_a_file(tmp_path: Path, make: Maker) -> None:
    make(tmp_path / "chat_template.jinja")
    make(tmp_path / "tokenizer.json")
    with little_room(), pytest.raises(ConfigError, match=r"chat_template\.jinja: cannot be read as text: it "):
        chat_template(tmp_path, root=tmp_path)
    with little_room(), pytest.raises(ConfigError, match=rf"tokenizer\.json: cannot be read: {FAULTS[make]}"):
        check_token_ids(tmp_path)
    with little_room():
        assert not looks_like_qwen3({"model_type": "qwen3"}, tmp_path)


@pytest.mark.parametrize("make", ENDLESS)
def test_a_model_card_without_an_end_is_none(tmp_path: Path, make: Maker) -> None:
    make(tmp_path / "README.md")
    assert model_card(tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("preprocessor_config.json", zeros),
        ("preprocessor_config.json", huge),
        ("vocab.txt", huge),
        ("1_Pooling/notes", pipe),
        ("merges.txt", zeros),
    ],
)
def test_a_folder_with_such_a_file_is_rejected_before_a_library_reads_it(
    tmp_path: Path, name: str, make: Maker
) -> None:
    model = shutil.copytree(folder("embedder"), tmp_path / "model")
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with little_room(), pytest.raises(ConfigError, match=f"{name}: cannot be read: {FAULTS[make]}"):
        load_model(EngineConfig(model=str(model), dtype="float32", torch_threads=1))


def test_a_link_to_nothing_and_a_large_file_that_nobody_reads_do_no_harm(tmp_path: Path) -> None:
    model = shutil.copytree(folder("embedder"), tmp_path / "model")
    (model / "flax_model.msgpack").symlink_to(tmp_path / "absent")
    huge(model / "model.onnx_data")
    assert load_model(EngineConfig(model=str(model), dtype="float32", torch_threads=1)).card.outputs


@pytest.mark.parametrize("content", [b"[12345678.", b"[12345678", b"[12345678 ", b'"12345678', b"[-", b"1234567 "])
def test_a_search_for_long_numbers_reads_each_byte_once(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vocab.json").write_bytes(content * 2**20)
    found = (token_ids._LONG.search(content * 2) is not None) and b'"' not in content
    tracemalloc.start()
    try:
        assert token_ids._has_long(tmp_path / "vocab.json") is found
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place", range(2**20 - 30, 2**20 + 2))
@pytest.mark.parametrize("number", ["-99999999", "123456789012345678901234567890"])
def test_a_long_number_is_found_wherever_a_piece_ends(tmp_path: Path, place: int, number: str) -> None:
    beginning = '{"a": "'
    file = tmp_path / "added_tokens.json"
    file.write_text(f'{beginning}{"x" * (place - len(beginning) - 8)}", "b":{number}\n}}')
    with pytest.raises(ConfigError, match=r"added_tokens\.json: b=.* must be between -16777216 and 16777216"):
        check_token_ids(tmp_path)
