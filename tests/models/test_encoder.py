"""The forward: its rows, and its errors when a row, the memory or the device fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from staged_pool.runtime.model import Model
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.payloads import Row, TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, Output
from staged_pool.stages.errors import DeviceLost, ModelFailed, OutOfMemory, StagedPoolError
from tests.models.conftest import LoadTiny
from tests.models.requests import text_tower


def sequences(*ids: list[int]) -> list[TokenSequence]:
    return [TokenSequence(each, DENSE_ONLY) for each in ids]


def dense(row: Row | ModelFailed) -> NDArray[np.float32]:
    assert isinstance(row, Row)
    values = row.values[Output.DENSE]
    assert isinstance(values, np.ndarray)
    return values


def failing(encoder: Encoder, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*arguments: object, **others: object) -> Any:
        raise error

    monkeypatch.setattr(text_tower(encoder).transformer.model.get_input_embeddings(), "forward", fail)


def test_it_is_a_model_to_the_engine(load_tiny: LoadTiny) -> None:
    model: Model = load_tiny("bert-mean")
    assert model.card.name == "bert-mean"


def test_rows_are_float32_views_of_one_array(load_tiny: LoadTiny) -> None:
    model = load_tiny("bert-mean", dtype="bfloat16")
    rows = model.forward(sequences([2, 9, 3], [2, 8, 7, 3]))
    assert len(rows) == 2
    for row in map(dense, rows):
        assert row.dtype == np.float32
        assert row.shape == (model.card.width,)
        assert row.base is not None
        assert row.base.shape == (2, model.card.width)


def test_a_row_without_numbers_fails_alone(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_tiny("bert-mean")
    table = text_tower(model).transformer.model.get_input_embeddings().weight
    poisoned = table.detach().clone()
    poisoned[9] = torch.nan
    healthy = model.forward(sequences([2, 8, 3], [2, 7, 3]))
    monkeypatch.setattr(table, "data", poisoned)
    first, bad, last = model.forward(sequences([2, 8, 3], [2, 9, 3], [2, 7, 3]))
    assert isinstance(bad, ModelFailed)
    assert str(bad) == "The model gave NaN or Inf for this input."
    for row, wanted in zip((first, last), healthy, strict=True):
        assert np.abs(dense(row) - dense(wanted)).max() < 1e-5


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (MemoryError(), OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfMemory),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), DeviceLost),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost),
    ],
)
def test_what_happened_to_the_device_is_said_in_the_engines_words(
    error: Exception, meaning: type[StagedPoolError], load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("bert-mean")
    failing(model, monkeypatch, error)
    with pytest.raises(meaning) as raised:
        model.forward(sequences([2, 3]))
    assert raised.value.__cause__ is error


def test_memory_that_really_cannot_be_had_is_said_so(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_tiny("bert-mean")
    embedding = text_tower(model).transformer.model.get_input_embeddings()
    monkeypatch.setattr(embedding, "forward", lambda _: torch.empty(10**15))
    with pytest.raises(OutOfMemory):
        model.forward(sequences([2, 3]))


def test_another_failure_is_left_to_the_engine(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_tiny("bert-mean")
    error = RuntimeError("shapes cannot be multiplied")
    failing(model, monkeypatch, error)
    with pytest.raises(RuntimeError) as raised:
        model.forward(sequences([2, 3]))
    assert raised.value is error
