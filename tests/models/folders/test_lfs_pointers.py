"""A file that Git LFS has not fetched is named, with the command for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers as hf

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.folders.test_adapters import lora, write
from tests.models.tiny import edit_json

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345678\n"
NOT_READ = ("README.md", "generation_config.json", "video_preprocessor_config.json")
"""Files without which a model that reads no videos answers alike."""


def rejection(folder: Path) -> str:
    with pytest.raises(ConfigError) as rejected:
        load_model(EngineConfig(model=str(folder), torch_threads=1, offline=True))
    return str(rejected.value)


def says(name: str) -> str:
    return f"{name}: is a Git LFS pointer, not the file: fetch it with `git lfs pull`"


@pytest.mark.parametrize(
    "kind", ["bert-max-dense", "xlmr-prompt", "ce-qwen3-lm", "colbert-pylate", "bge-m3", "clip", "qwen3-vl-reranker"]
)
def test_each_file_of_a_folder_may_be_a_pointer(kind: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder(kind), tmp_path / "model")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    found = {}
    for name in names:
        if name not in NOT_READ:
            content = (folder / name).read_bytes()
            (folder / name).write_text(POINTER)
            found[name] = rejection(folder).removeprefix("model/")
            (folder / name).write_bytes(content)
    assert len(found) >= 4
    assert found == {name: says(name) for name in found}


def test_a_page_retriever_may_have_a_pointer_as_weights(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("colqwen2.5"), tmp_path / "model")
    (folder / "model.safetensors").write_text(POINTER)
    assert rejection(folder) == says("model.safetensors")


def test_a_vocabulary_may_be_a_pointer_where_it_is_read(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("bert-mean"), tmp_path / "model")
    (folder / "vocab.txt").write_text(POINTER)
    load_model(EngineConfig(model=str(folder), torch_threads=1)).close()
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    assert rejection(folder) == says("vocab.txt")


def test_an_adapter_may_be_a_pointer(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = tiny_folder("bert-mean")
    folder = write(tmp_path / "adapter", base, lora(hf.AutoModel.from_pretrained(base), "query"))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_text(POINTER)
        assert rejection(folder) == says(name)
        (folder / name).write_bytes(content)
