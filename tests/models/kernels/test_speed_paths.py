"""The quicker ways to run a forward; each gives way where it would be wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.devices import processor
from staged_pool.runtime.models.devices.processor import bfloat16_pays, bfloat16_usually_pays
from staged_pool.runtime.models.kernels import linear
from staged_pool.runtime.models.kernels.linear import (
    PrepackedLinear,
    Product,
    default_product,
    has_prepacked,
    prepack_linears,
)
from staged_pool.runtime.models.kernels.torch_threads import ThreadPlan, default_workers, use_threads
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.transformer.fused import FusedLayers
from staged_pool.runtime.payloads import Row, TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, Output
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.worker import is_first
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.dtypes import PREPACKED
from tests.models.requests import embed, text_tower
from tests.support.logs import captured_logs


@pytest.fixture(autouse=True)
def own_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep measurements of made-up processors from other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", PREPACKED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (2, 7, 48)])
def test_a_prepacked_layer_computes_what_the_layer_did(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 96, bias=bias).to(dtype)
    x = torch.randn(shape).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(PrepackedLinear(linear.weight, linear.bias)(x), linear(x))


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
    layers = [type(layer) for layer in text_tower(load_tiny("modernbert-cls")).transformer.model.modules()]
    assert PrepackedLinear in layers
    assert nn.Linear not in layers


def test_a_model_that_changes_under_prepacking_keeps_its_layers(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrepackedLinear, "forward", lambda self, x: x.new_ones((*x.shape[:-1], self.out_features)))
    with captured_logs() as logged:
        model = load_model(EngineConfig(model=str(tiny_folder("modernbert-cls")), dtype="float32"))
    assert not any(isinstance(layer, PrepackedLinear) for layer in text_tower(model).transformer.model.modules())
    (reason,) = [line["reason"] for line in logged if line["event"] == "model.not_prepacked"]
    assert "other vectors" in reason


@pytest.mark.parametrize("error", linear.NO_KERNEL)
@pytest.mark.parametrize(("kind", "kept"), [("bert-mean", FusedLayers), ("modernbert-cls", nn.Linear)])
def test_a_processor_without_kernels_for_prepacked_weights_multiplies_without(
    kind: str,
    kept: type[nn.Module],
    error: type[Exception],
    tiny_folder: TinyFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise error("this path needs another processor")

    config = EngineConfig(model=str(tiny_folder(kind)), dtype="float32")
    usual = embed(load_model(config), ["a few words"], Output.DENSE).embeddings
    monkeypatch.setattr(linear, "prepacked", missing)
    with captured_logs() as logged:
        model = load_model(config)
    layers = [*text_tower(model).transformer.model.modules()]
    assert kept in {type(layer) for layer in layers}
    assert {way for layer in layers if isinstance(layer, FusedLayers) for way in ways(layer)} <= {"plain"}
    reasons = [line["reason"] for line in logged if line["event"] == "model.not_prepacked"]
    assert bool(reasons) == (kept is nn.Linear)
    assert all("needs another processor" in reason for reason in reasons)
    np.testing.assert_allclose(embed(model, ["a few words"], Output.DENSE).embeddings, usual, atol=1e-5)


class Elsewhere:
    """An operator that is there, but not for this processor."""

    def default(self, *_: object) -> torch.Tensor:
        raise NotImplementedError("this path needs another processor")

    binary = __call__ = default


ONEDNN = ("_reorder_linear_weight", "_linear_pointwise")


def without(name: str, instead: object = None) -> Any:
    """Pretend a build of torch without one of oneDNN's operators, or with another."""
    found = {one: getattr(torch.ops.mkldnn, one) for one in ONEDNN if one != name}
    return SimpleNamespace(mkldnn=SimpleNamespace(**(found if instead is None else found | {name: instead})))


@pytest.mark.parametrize(
    "ops",
    [SimpleNamespace(), *map(without, ONEDNN), *(without(name, Elsewhere()) for name in ONEDNN)],
    ids=["no oneDNN", "no layout", "no product", "layout for another processor", "product for another processor"],
)
def test_a_build_without_kernels_is_told_by_trying(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "capabilities", lambda: {"amx_bf16": True})
    assert not has_prepacked(torch.float32, ops)
    assert not bfloat16_pays(ops)
    assert not bfloat16_usually_pays(ops)


@pytest.mark.parametrize(
    ("able", "kernels", "product"),
    [("AVX512", True, "fused"), ("AVX512_VNNI", True, "fused"), ("AVX512", False, "plain"), ("AVX2", True, "plain")],
)
def test_the_way_to_multiply_goes_by_the_processor(
    able: str, kernels: bool, product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "has_prepacked", lambda dtype: kernels)
    assert default_product(torch.float32, able) == product


def ways(layers: FusedLayers) -> set[str]:
    """The ways to multiply of all layers."""
    return {layer.product for layer in layers.layers}


def test_forwards_at_once_share_the_threads() -> None:
    before = torch.get_num_threads()
    try:
        for plan, tokens, at_once, threads in (
            (ThreadPlan(2), 1, 1, 2),
            (ThreadPlan(2), 1, 2, 1),
            (ThreadPlan(2), 1, 5, 1),
            (ThreadPlan(2, short_tokens=32), 32, 1, 1),
            (ThreadPlan(2, short_tokens=32), 33, 1, 2),
            (ThreadPlan(2, always_alone=True), 100, 1, 1),
        ):
            plan.use(tokens, at_once)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_thread_keeps_its_number_whatever_another_sets_before_its_first_operation() -> None:
    before, meeting = torch.get_num_threads(), threading.Barrier(2, timeout=10)
    seen: list[int] = []

    def work() -> None:
        use_threads(1)
        meeting.wait()
        meeting.wait()
        torch.ones(1 << 20).sum()  # large enough to be shared
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        meeting.wait()
        torch.set_num_threads(2)
        meeting.wait()
    finally:
        thread.join()
        torch.set_num_threads(before)
    assert seen == [1]


@pytest.mark.anyio
async def test_only_the_first_thread_has_enough_for_all_cores() -> None:
    meeting = threading.Barrier(2, timeout=10)
    seen: dict[bool, list[int]] = {}

    def use(plan: ThreadPlan) -> None:
        counts = seen[is_first()] = []
        for at_once in (1, 2, 4):
            plan.use(100, at_once)
            counts.append(torch.get_num_threads())
        meeting.wait()

    async with DedicatedThreads("forwards").running(2) as threads:
        await threads.run_on_each(use, ThreadPlan(8))
    assert seen == {True: [8, 4, 2], False: [4, 4, 2]}


@pytest.mark.parametrize(("threads", "workers"), [(1, 1), (2, 2), (4, 2), (8, 4), (64, 4)])
def test_forwards_at_once_by_the_table(threads: int, workers: int) -> None:
    assert default_workers(threads) == workers


def test_the_card_says_how_many_forwards_run_at_once(tiny_folder: TinyFolder) -> None:
    folder = str(tiny_folder("bert-mean"))
    assert load_model(EngineConfig(model=folder, forward_workers=3)).card.forward_workers == 3
    assert load_model(EngineConfig(model=folder, torch_threads=1)).card.forward_workers == 1


def test_forwards_at_once_give_what_they_give_alone(tiny_folder: TinyFolder) -> None:
    model = load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32", torch_threads=2))
    batches = [[TokenSequence([2, 5 + i, 6 + i, 3], DENSE_ONLY)] * (i % 3 + 1) for i in range(24)]
    alone = [model.forward(batch, 1) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda batch: model.forward(batch, 2), batches))
    for one, other in zip(alone, at_once, strict=True):
        for row, same in zip(one, other, strict=True):
            assert isinstance(row, Row)
            assert isinstance(same, Row)
            np.testing.assert_allclose(row.values[Output.DENSE], same.values[Output.DENSE], atol=1e-5)  # type: ignore[arg-type]
