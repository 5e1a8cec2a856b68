"""Parts that a torch may lack: a model loads without them, and the log says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.kernels import attention
from staged_pool.runtime.models.kernels import encoder_layers as stack
from staged_pool.runtime.models.kernels.encoder_layers import layers_as_one_call, run_layers
from staged_pool.runtime.models.kernels.optional_torch import optional_torch
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.transformer import fused
from staged_pool.runtime.requests import Output
from tests.models.conftest import TinyFolder
from tests.models.requests import embed


def raising(error: Exception) -> Callable[[str], Any]:
    def importer(module: str) -> Any:
        raise error

    return importer


@pytest.mark.parametrize(
    "importer",
    [
        raising(ModuleNotFoundError("No module named 'torch.nn.attention.varlen'")),
        raising(AttributeError("'_OpNamespace' 'torch_attn' object has no attribute '_varlen_attn'")),
        raising(RuntimeError("operator torch_attn::_varlen_attn does not exist")),
        lambda module: SimpleNamespace(),
    ],
    ids=["no module", "no name in the module", "no operator", "an empty module"],
)
def test_a_part_that_is_not_there_is_told_in_the_log(
    importer: Callable[[str], Any], logged: list[structlog.typing.EventDict]
) -> None:
    assert optional_torch("torch.nn.attention.varlen.varlen_attn", instead="groups", importer=importer) is None
    (line,) = logged
    assert (line["event"], line["part"], line["instead"]) == (
        "model.torch_lacks",
        "torch.nn.attention.varlen.varlen_attn",
        "groups",
    )


def test_a_part_that_is_there_is_given() -> None:
    assert optional_torch("torch.nn.functional.softmax", instead="nothing") is torch.nn.functional.softmax


def test_a_model_loads_without_any_of_these_parts(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32")
    usual = embed(load_model(config), ["a few words"], Output.DENSE).embeddings

    def gone(path: str, *, instead: str) -> None:
        return None

    monkeypatch.setattr(attention, "varlen_attn", None)
    monkeypatch.setattr(stack, "is_scripting", stack._never)
    monkeypatch.setattr(fused, "layers_as_one_call", lambda: layers_as_one_call(gone))
    model = load_model(config)
    transformer = model.towers["text"].transformer  # type: ignore[attr-defined]
    found = [layers for layers in transformer.model.modules() if isinstance(layers, fused.FusedLayers)]
    assert [layers._run for layers in found] == [run_layers]
    np.testing.assert_allclose(embed(model, ["a few words"], Output.DENSE).embeddings, usual, atol=1e-5)
