"""The quicker ways to run a forward, and that each gives way where it would be wrong."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Row, TokenSequence
from staged_pool.runtime.models import fused, linear, products, stack
from staged_pool.runtime.models.fused import FusedLayers
from staged_pool.runtime.models.image_tower import ImageTower
from staged_pool.runtime.models.linear import PrepackedLinear, prepack_linears
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.products import FEW, MANY, LayerShape, Product
from staged_pool.runtime.models.stack import Group, Layer
from staged_pool.runtime.models.threads import (
    SIZES,
    ThreadPlan,
    alone_tokens,
    plan_workers,
    use_threads,
    usual_alone_tokens,
    usual_workers,
)
from staged_pool.runtime.requests import DENSE_ONLY, Output
from staged_pool.runtime.threads import OwnThreads, is_first
from tests.doubles import captured_logs
from tests.models.asking import embed, text_tower
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.dtypes import PREPACKED


@pytest.fixture(autouse=True)
def own_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured of processors that are made up is not kept for other tests."""
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
    layers = [type(layer) for layer in text_tower(load_tiny("modernbert-cls")).body.model.modules()]
    assert PrepackedLinear in layers
    assert nn.Linear not in layers


def test_a_model_that_changes_under_prepacking_keeps_its_layers(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrepackedLinear, "forward", lambda self, x: x.new_ones((*x.shape[:-1], self.out_features)))
    with captured_logs() as logged:
        model = load_model(EngineConfig(model=str(tiny_folder("modernbert-cls")), dtype="float32"))
    assert not any(isinstance(layer, PrepackedLinear) for layer in text_tower(model).body.model.modules())
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
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise error("this path needs another processor")

    config = EngineConfig(model=str(tiny_folder(kind)), dtype="float32", tune="again")
    usual = embed(load_model(config), ["a few words"], Output.DENSE).embeddings
    monkeypatch.setattr(linear, "prepacked", missing)
    monkeypatch.setattr(products, "prepacked", missing)
    monkeypatch.setattr(fused, "quickest_product", products.quickest_product.__wrapped__)
    monkeypatch.setattr(fused, "splits_pay", products.splits_pay.__wrapped__)
    with captured_logs() as logged:
        model = load_model(config)
    layers = [*text_tower(model).body.model.modules()]
    assert kept in {type(layer) for layer in layers}
    assert {way for layer in layers if isinstance(layer, FusedLayers) for way in ways(layer)} <= {"plain", "split"}
    reasons = [line["reason"] for line in logged if line["event"] == "model.not_prepacked"]
    assert bool(reasons) == (kept is nn.Linear)
    assert all("needs another processor" in reason for reason in reasons)
    np.testing.assert_allclose(embed(model, ["a few words"], Output.DENSE).embeddings, usual, atol=1e-5)


def test_the_quickest_way_to_multiply_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    took, now = {"fused": 1.0, "prepacked": 1.0, "plain": 1.0}, [0.0]

    def run(x: torch.Tensor, groups: list[Group], layers: list[Layer], causal: bool) -> None:
        assert (len(x), groups, causal) == (MANY[0].sequences * MANY[0].tokens, [*MANY], False)
        now[0] += took[layers[0].product]

    monkeypatch.setattr(products, "layers_as_one_call", lambda: run)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    quickest = products.quickest_product.__wrapped__
    shape = LayerShape(16, 32, 2, torch.float32, "gelu", "none")
    threads = torch.get_num_threads()
    took["plain"] = 0.97  # which other cores at work may well turn round
    assert quickest(shape, MANY) == "fused"
    took["plain"] = 0.9
    assert quickest(shape, MANY) == "plain"
    took["prepacked"] = 0.8
    assert quickest(shape, MANY) == "prepacked"
    assert torch.get_num_threads() == threads


def test_up_to_how_many_tokens_are_few_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    took: dict[tuple[str, int], float] = {}
    now, asked = [0.0], list[int]()

    def run(x: torch.Tensor, groups: list[Group], layers: list[Layer], causal: bool) -> None:
        asked.append(torch.get_num_threads())
        now[0] += took.get((layers[0].product, len(x)), 1.0)

    monkeypatch.setattr(products, "layers_as_one_call", lambda: run)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(products, "_LONG_ENOUGH_S", math.inf)
    few = products.few_tokens.__wrapped__
    shape = LayerShape(16, 32, 2, torch.float32, "gelu", "none")
    took |= {("plain", 16): 0.9, ("plain", 64): 0.8, ("plain", 128): 1.5}
    assert few(shape, "plain", "fused", 2) == 64
    assert set(asked) == {2}
    took["plain", 32] = 1.1  # one that was disturbed makes no end
    assert few(shape, "plain", "fused", 1) == 64
    took["plain", 16] = took["plain", 64] = 1.1
    assert few(shape, "plain", "fused", 1) == 0


def test_few_tokens_count_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    took, now = {("plain", 16): 1.1, ("plain", 64): 0.8}, [0.0]

    def run(x: torch.Tensor, groups: list[Group], layers: list[Layer], causal: bool) -> None:
        now[0] += took.get((layers[0].product, len(x)), 1.0)

    monkeypatch.setattr(products, "layers_as_one_call", lambda: run)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    quickest = products.quickest_product.__wrapped__
    shape = LayerShape(16, 32, 2, torch.float32, "gelu", "none")
    assert quickest(shape, FEW) == "plain"
    took["plain", 16] = 1.3
    assert quickest(shape, FEW) == "fused"


UP_TO = {1: 32, 2: 48}
"""Tokens that are few, by the number of threads."""


def multiply(monkeypatch: pytest.MonkeyPatch, *, few: Product, many: Product) -> None:
    monkeypatch.setattr(fused, "quickest_product", lambda shape, batches: {FEW: few, MANY: many}[batches])
    monkeypatch.setattr(fused, "few_tokens", lambda shape, few, many, threads: UP_TO[threads])
    monkeypatch.setattr(fused, "splits_pay", lambda shape, threads: False)


def seeing_tower(tiny_folder: TinyFolder) -> ImageTower:
    tower = load_model(
        EngineConfig(model=str(tiny_folder("clip")), dtype="float32", torch_threads=2, tune="again")
    ).towers["image"]
    assert isinstance(tower, ImageTower)
    return tower


def ways(layers: FusedLayers) -> tuple[str, str]:
    """How few tokens are multiplied, and how many."""
    (few,), (many,) = ({layer.product for layer in each} for each in (layers.layers_of_few, layers.layers))
    return few, many


def fused_in(model: nn.Module) -> list[FusedLayers]:
    return [layers for layers in model.modules() if isinstance(layers, FusedLayers)]


def test_few_tokens_may_multiply_in_another_way_than_many(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32", torch_threads=2, tune="again")
    multiply(monkeypatch, few="plain", many="plain")
    (usual,) = fused_in(text_tower(load_model(config)).body.model)
    multiply(monkeypatch, few="prepacked", many="plain")
    (layers,) = fused_in(text_tower(load_model(config)).body.model)
    assert (ways(usual), ways(layers)) == (("plain", "plain"), ("prepacked", "plain"))
    run, taken = layers._run, list[str]()

    def note(x: torch.Tensor, groups: list[Group], given: list[Layer], causal: bool) -> torch.Tensor:
        taken.append(given[0].product)
        return run(x, groups, given, causal)

    monkeypatch.setattr(layers, "_run", note)
    before = torch.get_num_threads()
    try:
        for threads, limit in UP_TO.items():
            torch.set_num_threads(threads)
            for tokens in (limit, limit + 1):
                x, group = torch.randn(1, tokens, layers.config.hidden_size), Group(1, tokens, tokens)
                with torch.inference_mode():
                    torch.testing.assert_close(layers(x, packed_groups=[group]), usual(x, packed_groups=[group]))
    finally:
        torch.set_num_threads(before)
    assert taken == ["prepacked", "plain"] * 2


def test_matrices_are_held_in_one_layout_where_two_are_not_worth_it(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply(monkeypatch, few="prepacked", many="plain")
    (seeing,) = fused_in(seeing_tower(tiny_folder).eye.image)  # a picture is many tokens
    assert ways(seeing) == ("plain", "plain")
    monkeypatch.setattr(fused, "_MOST_TWICE_BYTES", 100)
    model = load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32", tune="again"))
    (reading,) = fused_in(text_tower(model).body.model)
    assert ways(reading) == ("plain", "plain")


def test_few_tokens_are_split_among_threads_where_that_pays(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply(monkeypatch, few="plain", many="plain")
    monkeypatch.setattr(stack, "_LEAST_COLUMNS", 8)
    asked = list[int]()

    def pay(_: LayerShape, threads: int) -> bool:
        asked.append(threads)
        return True

    monkeypatch.setattr(fused, "splits_pay", pay)
    (seeing,) = fused_in(seeing_tower(tiny_folder).eye.image)
    assert ways(seeing) == ("split", "plain")
    assert set(asked) == {2}  # of both towers: trying out how pictures are read has not changed it
    for few, many in zip(seeing.layers_of_few, seeing.layers, strict=True):
        assert few.up.dim() == 3
        assert few.up.data_ptr() == many.up.data_ptr()  # no memory of its own
    multiply(monkeypatch, few="prepacked", many="prepacked")
    (seeing,) = fused_in(seeing_tower(tiny_folder).eye.image)
    assert ways(seeing) == ("prepacked", "prepacked")


@pytest.mark.parametrize(
    ("columns", "threads", "parts"), [(768, 2, 4), (768, 16, 12), (384, 1, 2), (100, 8, 1), (150, 8, 2)]
)
def test_a_matrix_is_cut_into_parts_that_are_alike_and_not_too_narrow(columns: int, threads: int, parts: int) -> None:
    assert stack._parts(columns, threads) == parts


def test_whether_splits_pay_is_measured_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    took, now = {"plain": 1.0, "split": 0.9}, [0.0]

    def run(x: torch.Tensor, groups: list[Group], layers: list[Layer], causal: bool) -> None:
        assert torch.get_num_threads() == 2
        now[0] += took[layers[0].product]

    monkeypatch.setattr(products, "layers_as_one_call", lambda: run)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pay = products.splits_pay.__wrapped__
    shape = LayerShape(64, 128, 2, torch.float32, "gelu", "none")
    assert pay(shape, 2)
    assert not pay(shape, 1)
    took["split"] = 1.1
    assert not pay(shape, 2)


def test_small_batches_run_on_one_thread_and_large_ones_on_all() -> None:
    before = torch.get_num_threads()
    try:
        plan = ThreadPlan(2, alone_tokens=32)
        plan.use(32)
        assert torch.get_num_threads() == 1
        plan.use(33)
        assert torch.get_num_threads() == 2
        plan.use(33, 2)
        assert torch.get_num_threads() == 1
        plan.use(33, 5)
        assert torch.get_num_threads() == 1
        plan = ThreadPlan(2, alone_tokens=0, always_alone=True)
        plan.use(512)
        assert torch.get_num_threads() == 1
        plan.use_most()
        assert torch.get_num_threads() == 1
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
            plan.use(33, at_once)
            counts.append(torch.get_num_threads())
        plan.use_most()
        counts.append(torch.get_num_threads())
        meeting.wait()

    async with OwnThreads("forwards").running(2) as threads:
        await threads.run_on_each(use, ThreadPlan(8, alone_tokens=32))
    assert seen == {True: [8, 4, 2, 8], False: [4, 4, 2, 4]}


def test_texts_and_pictures_have_plans_of_their_own(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def measured(threads: int, forward: Callable[[Sequence[int]], object], longest: int) -> int:
        forward([longest])
        tried.append(longest)
        return SIZES[len(tried)]

    monkeypatch.setattr("staged_pool.runtime.models.load.alone_tokens", measured)
    model = load_model(EngineConfig(model=str(tiny_folder("clip")), dtype="float32", torch_threads=2, tune="again"))
    assert tried == [tower.max_tokens for tower in model.towers.values()]
    assert [plan.alone_tokens for plan in model.plans.values()] == [*SIZES[1:3]]


def test_more_threads_are_worth_it_where_that_is_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tries = 0.0, Counter[int]()
    before = torch.get_num_threads()

    def forward(batch: Sequence[int]) -> None:
        nonlocal clock
        threads = torch.get_num_threads()
        tries[threads] += 1
        clock += 3.0 if threads == 1 else 2.0 if tries[threads] == 5 else 4.0

    monkeypatch.setattr("staged_pool.runtime.models.threads.SIZES", (8,))
    monkeypatch.setattr("staged_pool.runtime.models.threads.time.sleep", lambda _: None)
    monkeypatch.setattr("staged_pool.runtime.models.threads.time.perf_counter", lambda: clock)
    try:
        assert alone_tokens(2, forward, 512) == 0
        assert tries == {1: 6, 2: 6}
        assert alone_tokens(2, forward, 512) == 8
    finally:
        torch.set_num_threads(before)


def test_every_try_follows_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wakes = 0.0, 0.0
    before = torch.get_num_threads()

    def rest(_: float) -> None:
        nonlocal wakes
        wakes = 60.0

    def forward(batch: Sequence[int]) -> None:
        nonlocal clock, wakes
        threads = torch.get_num_threads()
        clock += batch[0] / threads + (20 + wakes) * (threads - 1)
        wakes = 0.0

    monkeypatch.setattr("staged_pool.runtime.models.threads.time.perf_counter", lambda: clock)
    monkeypatch.setattr("staged_pool.runtime.models.threads.time.sleep", rest)
    try:
        found = [alone_tokens(threads, forward, longest) for threads, longest in ((2, 512), (2, 64), (2, 20), (1, 512))]
    finally:
        torch.set_num_threads(before)
    assert found == [128, 64, 16, 0]


@pytest.mark.parametrize(
    ("parameters", "longest", "tokens"),
    [(22_700_000, 512, 16), (110_000_000, 512, 0), (1000, 512, 256), (1000, 20, 16)],
)
def test_threads_by_the_table_go_by_the_size_of_the_model(parameters: int, longest: int, tokens: int) -> None:
    assert usual_alone_tokens(parameters, longest) == tokens


@pytest.mark.parametrize(("threads", "workers"), [(1, 1), (2, 2), (4, 2), (8, 4), (64, 4)])
def test_forwards_at_once_by_the_table(threads: int, workers: int) -> None:
    assert usual_workers(threads) == workers


def _seconds_of(seconds: dict[int, float]) -> Callable[..., float]:
    return lambda forward, batch, workers, threads, *, batches: seconds[workers]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({1: 4.0, 2: 2.0, 4: 3.0}, 2), ({1: 4.0, 2: 4.3, 4: 4.1}, 4), ({1: 1.0, 2: 2.0, 4: 3.0}, 1)],
    ids=["more done", "hardly less done", "clearly less done"],
)
def test_several_forward_workers_are_used_unless_they_get_clearly_less_done(
    seconds: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.runtime.models.threads._seconds_at_once", _seconds_of(seconds))
    assert plan_workers(4, lambda batch: None, 64) == best


def test_a_slow_moment_does_not_decide_how_many_forwards_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Counter[int]()

    def seconds(forward: object, batch: object, workers: int, threads: int, *, batches: int) -> float:
        tries[workers] += 1
        return 1.0 if workers == 1 else 0.9 if tries[workers] > 3 else 1.3

    monkeypatch.setattr("staged_pool.runtime.models.threads._seconds_at_once", seconds)
    assert plan_workers(2, lambda batch: None, 64) == 2


def test_one_thread_is_one_forward_worker() -> None:
    def forward(batch: Sequence[int]) -> None:
        raise AssertionError("there is nothing to find out")

    assert plan_workers(1, forward, 64) == 1


def test_every_way_to_run_forwards_does_the_same_work_on_its_share_of_the_threads() -> None:
    ran: list[tuple[int, int]] = []

    def forward(batch: Sequence[int]) -> None:
        ran.append((threading.get_ident(), torch.get_num_threads()))

    before = torch.get_num_threads()
    plan_workers(4, forward, 64)
    assert torch.get_num_threads() == before
    tries = Counter(threads for _, threads in ran)
    rounds = tries[4] / (4 + 1)
    assert rounds in (3, 6), "as often again where the first ones say that one at a time gets more done"
    assert {threads: count / rounds for threads, count in tries.items()} == {4: 4 + 1, 2: 4 + 2, 1: 4 + 4}


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
