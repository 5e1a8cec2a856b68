"""The quicker ways to run a forward, and that each gives way where it would be wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import structlog
import torch
from torch import nn

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import TokenIds
from staged_pool.runtime.models.linear import PrepackedLinear, prepack_linears
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.threads import ThreadPlan, plan_threads
from tests.models.conftest import LoadTiny, TinyFolder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (2, 7, 48)])
def test_a_prepacked_layer_computes_what_the_layer_did(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 96, bias=bias).to(dtype)
    x = torch.randn(shape).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(PrepackedLinear(linear)(x), linear(x))


def test_prepacking_reaches_every_layer_and_can_be_undone() -> None:
    class Special(nn.Linear):
        """Computes something of its own, perhaps."""

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Special(4, 4))
    with torch.inference_mode():
        restore = prepack_linears(model)
        assert sum(isinstance(layer, PrepackedLinear) for layer in model.modules()) == 2
        assert type(model[2]) is Special
        restore()
    assert not any(isinstance(layer, PrepackedLinear) for layer in model.modules())


def test_a_real_model_runs_on_prepacked_layers(load_tiny: LoadTiny) -> None:
    layers = [type(layer) for layer in load_tiny("bert-mean").body.model.modules()]
    assert PrepackedLinear in layers
    assert nn.Linear not in layers


def test_a_model_that_changes_under_prepacking_keeps_its_layers(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrepackedLinear, "forward", lambda self, x: x.new_ones((*x.shape[:-1], self.out_features)))
    with structlog.testing.capture_logs() as logged:
        model = load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32"))
    assert not any(isinstance(layer, PrepackedLinear) for layer in model.body.model.modules())
    (reason,) = [line["reason"] for line in logged if line["event"] == "model.not_prepacked"]
    assert "other vectors" in reason


def test_small_batches_run_on_one_thread_and_large_ones_on_all() -> None:
    before = torch.get_num_threads()
    try:
        plan = ThreadPlan(2, alone_tokens=32)
        plan.use(32)
        assert torch.get_num_threads() == 1
        plan.use(33)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_plan_is_made_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    before = torch.get_num_threads()

    def forward(batch: Sequence[TokenIds]) -> None:
        nonlocal clock
        threads = torch.get_num_threads()
        clock += len(batch[0]) / threads + 20 * (threads - 1)

    monkeypatch.setattr("staged_pool.runtime.models.threads.time.perf_counter", lambda: clock)
    try:
        assert plan_threads(2, forward, [0] * 512) == ThreadPlan(2, alone_tokens=32)
        assert plan_threads(2, forward, [0] * 20) == ThreadPlan(2, alone_tokens=16)
        assert plan_threads(1, forward, [0] * 512) == ThreadPlan(1, alone_tokens=0)
    finally:
        torch.set_num_threads(before)
