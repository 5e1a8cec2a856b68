"""Settings that say nothing, and what stands for them."""

from __future__ import annotations

import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (8, 8), (64, 16)])
def test_images_have_a_thread_for_each_core_unless_the_setting_says_how_many(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.runtime.config.usable_cores", lambda: cores)
    assert EngineConfig().image_preprocess_threads == threads
    assert EngineConfig(image_preprocess_limit=3).image_preprocess_threads == 3


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_an_invalid_limit_is_rejected_by_its_name(limit: int) -> None:
    with pytest.raises(ConfigError, match="image_preprocess_limit"):
        EngineConfig(image_preprocess_limit=limit)
