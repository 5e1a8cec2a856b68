"""Mixtures of experts where torch has no product for all of them in one call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from tests.models.requests import text_tower
from tests.models.transformer.test_architectures import ARCHITECTURES, CLOSE, USED, build
from tests.models.vectors.test_oracle import embed


def test_experts_run_in_turn_where_torch_cannot_multiply_by_all_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, tokenizer, _ = ARCHITECTURES["Mixtral"]
    config = EngineConfig(model=str(build("Mixtral", settings, tokenizer(), tmp_path / "model")), dtype="float32")
    wanted = embed(load_model(config), USED)
    monkeypatch.setattr("staged_pool.runtime.models.checkpoint.experts._grouped", lambda device, dtype: False)
    model = load_model(config)
    assert text_tower(model).transformer.model.config._experts_implementation == "eager"
    assert np.abs(embed(model, USED) - wanted).max() < CLOSE
