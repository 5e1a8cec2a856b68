"""The memory of GPUs, as models share it. No GPU is needed: what one says of its memory is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.devices.accelerators import fitting_tokens
from staged_pool.runtime.models.devices.launch import Replica, Replicas
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model, share_memory
from tests.models.conftest import TinyFolder

ONE, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
FREE = {ONE: 10_000_000, OTHER: 4_000_000}


@pytest.mark.parametrize(
    ("token_bytes", "lanes", "tokens"),
    [
        pytest.param([{ONE: 1000.0}], [1], [9000], id="one model"),
        pytest.param([{ONE: 1000.0}], [2], [4500], id="one model with two lanes"),
        pytest.param([{ONE: 1000.0}, {ONE: 1000.0}], [1, 1], [4500, 4500], id="two models"),
        pytest.param([{ONE: 1000.0}, {ONE: 100.0}], [1, 2], [3000, 30_000], id="each lane has an equal part"),
        pytest.param([{ONE: 1000.0, OTHER: 1000.0}], [1], [3600], id="the smaller of two GPUs"),
        pytest.param([{ONE: 1000.0, OTHER: 1000.0}, {ONE: 1000.0}], [1, 1], [3600, 4500], id="one GPU is shared"),
        pytest.param([{ONE: 1e9}], [1], [1], id="no room"),
        pytest.param([{ONE: 0.0}], [1], [9_000_000], id="nothing is taken"),
        pytest.param([], [], [], id="no model"),
    ],
)
def test_free_memory_is_divided_among_models(
    token_bytes: list[dict[torch.device, float]], lanes: list[int], tokens: list[int]
) -> None:
    assert fitting_tokens(token_bytes, lanes, FREE.__getitem__) == tokens


def on_gpu(model: Encoder, name: str) -> Encoder:
    """The same, as if its weights lay on a GPU."""
    (replica,) = model.replicas
    card = replace(model.card, name=name, device="cuda:0")
    return replace(model, card=card, replicas=Replicas([Replica(ONE, replica.towers, token_bytes=1000.0)]))


def test_memory_is_looked_at_once_when_all_models_are_loaded(tiny_folder: TinyFolder) -> None:
    model = load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32"))
    asked = []

    def free(device: torch.device) -> int:
        asked.append(device)
        return FREE[device]

    told = share_memory([on_gpu(model, "first"), on_gpu(model, "second"), model], free)
    assert [one.card.memory_tokens for one in told] == [4500, 4500, None]
    assert asked == [ONE]
    assert [one.card.memory_tokens for one in share_memory([on_gpu(model, "first")], free)] == [9000]
