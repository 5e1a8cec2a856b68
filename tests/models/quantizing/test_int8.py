"""int8: exact integer products, vectors near those of float32, and clear errors where it does not run."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.resolver import resolve
from staged_pool.runtime.models.kernels.encoder_layers import linear, linear_added, to_integers
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.quantizing.agreement import LEAST_MEAN, Agreement
from staged_pool.runtime.models.quantizing.int8 import Int8Linear, to_int8, why_no_int8
from staged_pool.runtime.models.quantizing.ranges import InputRange, record_ranges
from staged_pool.runtime.models.towers import text as text_tower
from staged_pool.stages.errors import ConfigError
from tests.models import oracle
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.dtypes import needs_int8
from tests.models.retrieval import PASSAGES, QUERIES
from tests.models.vectors.test_oracle import Vectors, embed
from tests.models.vectors.test_static import potion
from tests.support.logs import captured_logs

TEXTS = [*PASSAGES, *(question for question, _ in QUERIES)]


def rounded(x: Tensor, weight: Tensor, inputs: InputRange) -> Tensor:
    """x W^T with both factors rounded by the formulas of SmoothQuant, in float64."""
    x, weight, least, greatest = (some.double() for some in (x, weight, inputs.least, inputs.greatest))
    smoothing = torch.maximum(least.abs(), greatest.abs()) ** 0.8 / weight.abs().amax(dim=0) ** 0.2
    low, high = min(0.0, float((least / smoothing).min())), max(0.0, float((greatest / smoothing).max()))
    step = (high - low) / 255
    zero = round(-low / step)
    integers = (torch.floor(x / smoothing / step + zero + 0.5)).clamp(0, 255) - zero
    weight_steps = (weight * smoothing).abs().amax(dim=1) / 127
    return (integers * step) @ ((weight * smoothing / weight_steps[:, None]).round() * weight_steps[:, None]).T


def seen(x: Tensor) -> InputRange:
    return InputRange(x.amin(dim=0), x.amax(dim=0))


@pytest.fixture
def factors() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs with two channels far larger than the others, weights and a bias."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, 32), torch.randn(48, 32), torch.randn(48)
    x[:, 3] *= 50
    x[:, 7] = x[:, 7].abs() * 20
    return x, weight, bias


@needs_int8
def test_a_product_is_that_of_the_rounded_factors(factors: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias = factors
    matrix = to_int8(weight, bias, seen(x))
    wanted = rounded(x, weight, seen(x)) + bias
    found = linear(x, matrix, "int8")
    # A number in the middle between two integers may be rounded to either: a step of an input, in one row.
    assert ((found - wanted).abs().amax(dim=1) < 1e-3).float().mean() > 0.9
    assert (found - wanted).norm() / wanted.norm() < 2e-3
    other = torch.randn(40, 48)
    assert torch.allclose(linear_added(x, matrix, other, "int8"), found + other, atol=1e-4)
    exact = F.linear(x, weight, bias)
    assert 1e-4 < (found - exact).norm() / exact.norm() < 0.02


@needs_int8
def test_large_channels_cost_the_others_little(factors: tuple[Tensor, Tensor, Tensor]) -> None:
    """Without smoothing, numbers of ordinary channels would all be rounded to a few integers."""
    x, weight, bias = factors
    given = to_integers(x, to_int8(weight, bias, seen(x)).int8)  # type: ignore[arg-type]
    used = [len({*given[:, channel].tolist()}) for channel in range(32) if channel not in {3, 7}]
    assert min(used) > 8


@needs_int8
def test_inputs_beyond_the_range_are_cut_to_it(factors: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias = factors
    matrix = to_int8(weight, bias, seen(x))
    assert matrix.int8 is not None
    integers = to_integers(x * 1e6, matrix.int8)
    assert {0, 255} <= {*integers.flatten().tolist()}
    widest = max(abs(float(x[:, 3].min())), float(x[:, 3].max()))
    far = torch.zeros(1, 32)
    far[0, 3] = widest * 1e9
    near = far.clone()
    near[0, 3] = widest * 300
    assert torch.equal(linear(far, matrix, "int8"), linear(near, matrix, "int8"))


@needs_int8
def test_a_layer_of_zeros_gives_its_bias() -> None:
    matrix = to_int8(torch.zeros(8, 4), torch.arange(8.0), InputRange(torch.zeros(4), torch.zeros(4)))
    assert torch.equal(linear(torch.randn(3, 4), matrix, "int8"), torch.arange(8.0).expand(3, 8))


@needs_int8
def test_a_layer_takes_inputs_of_any_shape() -> None:
    x = torch.randn(2, 5, 16)
    layer = nn.Linear(16, 8)
    assert layer.bias is not None
    found = Int8Linear(layer.weight, layer.bias.detach(), seen(x.view(-1, 16)))(x)
    assert found.shape == (2, 5, 8)
    assert (found - layer(x)).norm() / layer(x).norm() < 0.02


def test_ranges_are_those_of_all_runs() -> None:
    layers = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    never = nn.Linear(4, 4)
    given = [torch.randn(5, 4), torch.randn(2, 3, 4)]
    first, last = layers[0], layers[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)

    def run() -> None:
        for x in given:
            layers(x)

    ranges = record_ranges([first, last, never], run)
    every = torch.cat([x.reshape(-1, 4) for x in given])
    assert torch.equal(ranges[first].least, every.amin(dim=0))
    assert torch.equal(ranges[last].greatest, layers[1](first(every)).amax(dim=0))
    assert never not in ranges
    assert torch.equal(ranges[first].times(2).greatest, every.amax(dim=0) * 2)
    assert not first._forward_pre_hooks


@pytest.fixture(scope="module")
def minilm() -> Encoder:
    return load_model(EngineConfig(dtype="int8"))


@needs_int8
def test_real_weights_keep_the_vectors_of_sentence_transformers(minilm: Encoder) -> None:
    wanted = oracle.loaded("SentenceTransformer", resolve(None).folder).encode(TEXTS, show_progress_bar=False)
    cosines = (embed(minilm, TEXTS) * wanted).sum(axis=1)
    assert cosines.mean() >= LEAST_MEAN
    assert cosines.min() >= 0.99
    assert cosines.mean() < 0.99999  # it does run in int8
    assert minilm.card.dtype == "int8"


@needs_int8
def test_real_weights_find_the_same_answers(minilm: Encoder) -> None:
    exact = load_model(EngineConfig(dtype="float32"))

    def answers(model: Encoder) -> list[int]:
        similarities = embed(model, TEXTS[len(PASSAGES) :]) @ embed(model, PASSAGES).T
        found: list[int] = similarities.argmax(axis=1).tolist()
        return found

    assert answers(minilm) == answers(exact)


@needs_int8
def test_a_text_has_the_same_vector_in_any_company(minilm: Encoder) -> None:
    together = embed(minilm, TEXTS)
    alone = np.concatenate([embed(minilm, [one]) for one in TEXTS[:8]])
    # Attention rounds in another order, and a number between two integers may then go to the other one.
    assert (alone * together[:8]).sum(axis=1).min() > 0.9999


FUSED = ("bert-mean", "distilbert-mean")
OTHERS = ("modernbert-cls", "qwen3-last", "t5-mean", "mpnet-mean")
"""Kinds whose layers keep their code."""


@needs_int8
@pytest.mark.parametrize(("kind", "attention"), [*product(FUSED, ("packed", "padded")), *product(OTHERS, ("auto",))])
def test_vectors_are_near_those_of_float32(
    kind: str, attention: Any, load_tiny: LoadTiny, tiny_folder: TinyFolder
) -> None:
    model = load_tiny(kind, dtype="int8", attention=attention)
    found, wanted = (_normalised(embed(one, PASSAGES)) for one in (model, load_tiny(kind)))
    cosines = (found * wanted).sum(axis=1)
    assert LEAST_MEAN <= cosines.mean() < 0.999999


def _normalised(vectors: Vectors) -> Vectors:
    normalised: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalised


@needs_int8
def test_too_little_agreement_is_an_error(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tower, "LEAST_MEAN", 0.999999)
    message = rejection(tiny_folder("bert-mean"), dtype="int8")
    assert re.fullmatch(
        r"dtype='int8': vectors of \S+ agree too little with those of float32: cosines are 0\.\d{4} in the mean, "
        r"0\.\d{4} at least, and the mean must be 0\.999999 or more; use float32 or bfloat16",
        message,
    )


@needs_int8
def test_the_log_has_the_agreement(tiny_folder: TinyFolder) -> None:
    with captured_logs() as logs:
        load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="int8"))
    (line,) = [line for line in logs if line["event"] == "model.int8"]
    assert LEAST_MEAN <= line["cosine_mean"] <= 1
    assert line["cosine_least"] <= line["cosine_mean"]


@needs_int8
def test_models_of_images_alone_are_rejected(tiny_folder: TinyFolder) -> None:
    message = rejection(tiny_folder("vit"), dtype="int8")
    assert message == "dtype='int8': is for texts, and the model reads images only; use float32 or bfloat16"


@needs_int8
def test_models_without_matrices_are_rejected(tmp_path: Path) -> None:
    potion(tmp_path / "static")
    message = rejection(tmp_path / "static", dtype="int8")
    assert re.fullmatch(r"dtype='int8': \w+ has no linear layers; use float32", message)


def test_it_is_rejected_for_a_gpu() -> None:
    with pytest.raises(ConfigError, match="is for CPUs; a GPU takes float32, bfloat16 or float16"):
        EngineConfig(dtype="int8", device="cuda")


@pytest.mark.parametrize("able", [{}, {"avx512_f": True, "avx2": True, "avx_vnni": False}])
def test_it_needs_exact_products_of_bytes(able: dict[str, Any]) -> None:
    reason = why_no_int8(able)
    assert reason is not None
    assert "no instruction for exact products of 8-bit integers" in reason


def test_it_needs_the_kernels_of_torch() -> None:
    reason = why_no_int8({"avx_vnni": True}, SimpleNamespace(onednn=SimpleNamespace()))
    assert reason is not None
    assert reason.startswith("this build of torch has no kernel for them")


def test_agreement_is_of_cosines() -> None:
    found = Agreement.of(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    assert found.mean == pytest.approx((1 + 0.5**0.5) / 2)
    assert found.least == pytest.approx(0.5**0.5)


def rejection(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(EngineConfig(model=str(folder), **settings))
    return str(caught.value)
