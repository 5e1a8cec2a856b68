"""Folders whose settings ask for far more than their weights have: each is rejected before anything is built."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.folders import claims
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.folders.limited import little_room
from tests.models.tiny import edit_json

HUGE = 10**8


def refusal(folder: Path) -> str:
    """Load a folder that must be rejected, with little memory and time."""
    with little_room(), pytest.raises(ConfigError) as refused:
        load_model(EngineConfig(model=str(folder), dtype="float32", torch_threads=1))
    return str(refused.value).replace(f"{folder}/", "")


def nested(folder: Path, part: str, **fields: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    content[part] |= fields
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("kind", "field", "says"),
    [
        ("bert-mean", "num_hidden_layers", "config.json: num_hidden_layers=100000000, but the weights have 3 layers"),
        ("bert-mean", "num_labels", "config.json: num_labels=100000000, but the weights have "),
        ("bert-mean", "vocab_size", "config.json: vocab_size=100000000 asks for a model of "),
        ("bert-mean", "hidden_size", "config.json: hidden_size=100000000 asks for a model of "),
        ("bert-mean", "intermediate_size", "config.json: intermediate_size=100000000 asks for a model of "),
        ("bert-mean", "type_vocab_size", "config.json: type_vocab_size=100000000 asks for a model of "),
        ("bert-mean", "max_position_embeddings", "config.json: max_position_embeddings=100000000 asks for a model of "),
        ("ce-bert-1label", "num_labels", "num_labels=100000000"),
        ("distilbert-mean", "n_layers", "config.json: n_layers=100000000, but the weights have "),
        ("albert-mean", "num_hidden_groups", "config.json: num_hidden_groups=100000000, but the weights have "),
        ("qwen3-last", "num_attention_heads", "config.json: num_attention_heads=100000000, but the weights have "),
        ("vit", "num_hidden_layers", "config.json: num_hidden_layers=100000000, but the weights have "),
        ("vit", "num_channels", "num_channels=100000000"),
    ],
)
def test_a_number_beyond_the_weights_is_refused_by_name(copy: TinyFolder, kind: str, field: str, says: str) -> None:
    folder = copy(kind)
    edit_json(folder / "config.json", **{field: HUGE})
    assert says in refusal(folder)


@pytest.mark.parametrize(
    ("kind", "part", "field"),
    [
        ("clip", "text_config", "num_hidden_layers"),
        ("clip", "vision_config", "num_hidden_layers"),
        ("qwen2-vl", "text_config", "num_hidden_layers"),
        ("qwen2-vl", "vision_config", "depth"),
        ("colpali", "vlm_config", "num_hidden_layers"),
    ],
)
def test_a_config_inside_a_config_is_read_too(copy: TinyFolder, kind: str, part: str, field: str) -> None:
    folder = copy(kind)
    nested(folder, part, **{field: HUGE})
    assert f"config.json: {part}: {field}=100000000, but the weights have " in refusal(folder)


def test_a_table_of_positions_that_is_computed_one_by_one_is_bounded(copy: TinyFolder) -> None:
    folder = copy("distilbert-mean")
    edit_json(folder / "config.json", sinusoidal_pos_embds=True, max_position_embeddings=HUGE)
    assert "config.json: max_position_embeddings=100000000, but the weights have " in refusal(folder)


def test_a_number_beyond_32_bits_is_refused_whatever_it_is_for(copy: TinyFolder) -> None:
    folder = copy("qwen3-last")
    edit_json(folder / "config.json", max_position_embeddings=10**4000)
    assert refusal(folder).startswith(
        "config.json: max_position_embeddings=a number of 13288 bits must be a number between"
    )


def test_a_field_that_nobody_reads_may_hold_any_number(copy: TinyFolder) -> None:
    folder = copy("bert-mean")
    edit_json(folder / "config.json", training_tokens=10**13, rope_theta=3_580_165_449)
    load_model(EngineConfig(model=str(folder), torch_threads=1)).close()


def test_an_empty_tensor_does_not_stand_for_layers_or_widths(copy: TinyFolder) -> None:
    folder = copy("bert-mean")
    weights = load_file(folder / "model.safetensors")
    empty = {f"encoder.layer.{place}.a": torch.empty(0) for place in range(2000)} | {"other": torch.empty(HUGE, 0)}
    save_file(weights | empty, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", num_labels=HUGE)
    assert "num_labels=100000000, but the weights have " in refusal(folder)
    edit_json(folder / "config.json", num_labels=2, num_hidden_layers=2000)
    assert "num_hidden_layers=2000, but the weights have 3 layers" in refusal(folder)


def pickled(folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda weights: None) -> Path:
    """Bring the weights of a folder into a pickle."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_settings_are_compared_with_the_tensors_of_a_pickle(copy: TinyFolder) -> None:
    folder = copy("bert-mean")
    pickled(folder)
    edit_json(folder / "config.json", num_hidden_layers=HUGE)
    assert "config.json: num_hidden_layers=100000000, but the weights have 3 layers" in refusal(folder)


def test_a_pickle_that_repeats_one_value_is_refused(copy: TinyFolder) -> None:
    folder = copy("bert-mean")
    name = "embeddings.word_embeddings.weight"
    pickled(folder, lambda weights: weights.update({name: torch.ones(1).expand(HUGE, HUGE)}))
    assert f"pytorch_model.bin: {name} has {HUGE**2} values, more than the file's" in refusal(folder)


def test_a_pickle_that_grows_when_it_is_unpacked_is_refused(copy: TinyFolder, tmp_path: Path) -> None:
    folder = copy("bert-mean")
    name = "embeddings.word_embeddings.weight"
    file = pickled(folder, lambda weights: weights.update({name: torch.zeros(3_000_000)}))
    with zipfile.ZipFile(file) as plain, zipfile.ZipFile(tmp_path / "small", "w", zipfile.ZIP_DEFLATED) as small:
        for entry in plain.infolist():
            small.writestr(entry.filename, plain.read(entry))
    (tmp_path / "small").replace(file)
    assert file.stat().st_size < 3_000_000
    assert "pytorch_model.bin: its entries unpack to 1" in refusal(folder)


def test_layers_up_to_a_few_may_share_their_weights() -> None:
    config = {"model_type": "albert", "num_hidden_layers": claims.LEAST_LAYERS, "num_hidden_groups": 1}
    claims.check_claims(config, {})
    with pytest.raises(ConfigError, match="num_hidden_layers=129, but the weights have 0 layers"):
        claims.check_claims(config | {"num_hidden_layers": claims.LEAST_LAYERS + 1}, {})
