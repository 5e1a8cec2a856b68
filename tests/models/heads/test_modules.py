"""The modules behind a pooling, built from the files of their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from staged_pool.runtime.models.heads.modules import build_modules
from staged_pool.runtime.models.specs.model import Dense
from staged_pool.stages.errors import ConfigError


def dense(folder: Path, activation: str = "Identity") -> Dense:
    return Dense(folder=folder, in_features=3, out_features=2, bias=True, activation=activation, residual=False)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"linear.weight": torch.randn(2, 3), "linear.bias": torch.randn(2)}


@pytest.mark.parametrize(
    ("name", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)], ids=["safe", "pickled"]
)
def test_a_dense_module_is_read_from_either_file(name: str, save: Callable[..., None], tmp_path: Path) -> None:
    save(tensors(), tmp_path / name)
    modules, width = build_modules([dense(tmp_path)], 3)
    pooled = torch.randn(4, 3)
    wanted = nn.functional.linear(pooled, *tensors().values())
    assert width == 2
    torch.testing.assert_close(modules(pooled), wanted)


def quantised() -> dict[str, torch.Tensor]:
    return {**tensors(), "linear.weight": torch.ones(2, 3, dtype=torch.int8)}


def unsafe(file: Path) -> None:
    torch.save({"linear.weight": Path("of no tensor")}, file)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("model.safetensors", lambda file: file.write_bytes(b"")),
        ("model.safetensors", lambda file: file.write_bytes(b"\xff" * 100)),
        ("model.safetensors", lambda file: save_file({"linear.weight": torch.ones(2, 3)}, file)),
        ("pytorch_model.bin", lambda file: file.write_bytes(b"")),
        ("pytorch_model.bin", lambda file: file.write_bytes(b"no pickle")),
        ("pytorch_model.bin", lambda file: torch.save([torch.ones(2, 3)], file)),
        ("pytorch_model.bin", unsafe),
        ("model.safetensors", lambda file: save_file(quantised(), file)),
        ("pytorch_model.bin", lambda file: torch.save(quantised(), file)),
    ],
    ids=[
        "empty",
        "damaged",
        "without a bias",
        "pickled, empty",
        "pickled, damaged",
        "pickled list",
        "pickled code",
        "whole numbers",
        "pickled whole numbers",
    ],
)
def test_weights_that_cannot_be_used_are_rejected_by_their_folder(
    name: str, save: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{tmp_path.name}: the weights cannot be used"):
        build_modules([dense(tmp_path)], 3)


def test_a_folder_without_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="and no pytorch_model"):
        build_modules([dense(tmp_path)], 3)


def test_weights_of_an_activation_are_read(tmp_path: Path) -> None:
    save_file({**tensors(), "activation_function.weight": torch.tensor([0.5])}, tmp_path / "model.safetensors")
    modules, _ = build_modules([dense(tmp_path, "PReLU")], 3)
    pooled = torch.randn(4, 3)
    wanted = nn.functional.linear(pooled, *tensors().values())
    torch.testing.assert_close(modules(pooled), torch.where(wanted > 0, wanted, wanted * 0.5))


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        ("Threshold", "torch.nn.Threshold is no activation, or needs arguments"),
        ("MultiheadAttention", "torch.nn.MultiheadAttention is no activation, or needs arguments"),
        ("GLU", "activation GLU changes the number of values"),
        ("Nothing", "activation Nothing is not in torch.nn"),
    ],
)
def test_an_unknown_activation_is_rejected_by_name(activation: str, message: str, tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        build_modules([dense(tmp_path, activation)], 3)
