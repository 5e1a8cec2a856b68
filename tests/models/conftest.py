from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's client is imported, which reads it once

from staged_pool.runtime.config import DType, EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from tests.models.tiny import OCR, build
from tests.models.varlen import varlen_attn

TinyFolder = Callable[[str], Path]
LoadTiny = Callable[..., Encoder]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """Gives the folder of a kind of tiny model, built once a session. Copy it before changing anything in it."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else build(kind, path)

    return folder


@pytest.fixture
def copy(tiny_folder: TinyFolder, tmp_path: Path) -> TinyFolder:
    """Gives a copy of such a folder, which a test may change."""

    def copied(kind: str) -> Path:
        return Path(shutil.copytree(tiny_folder(kind), tmp_path / kind))

    return copied


@pytest.fixture(scope="session")
def load_tiny(tiny_folder: TinyFolder) -> LoadTiny:
    """Loads a kind of tiny model in float32, once for each set of settings."""
    loaded: dict[EngineConfig, Encoder] = {}

    def load(kind: str, *, dtype: DType = "float32", **settings: Any) -> Encoder:
        asked = {"task": "embed", **settings} if kind in OCR else settings  # nothing else says that they embed
        config = EngineConfig(model=str(tiny_folder(kind)), dtype=dtype, **asked)
        if config not in loaded:
            loaded[config] = load_model(config)
        return loaded[config]

    return load


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences attend in one call, as they do on a GPU."""
    monkeypatch.setattr("staged_pool.runtime.models.kernels.attention.varlen_attn", varlen_attn)
    monkeypatch.setattr("staged_pool.runtime.models.transformer.speedups.takes_varlen", lambda device, dtype: True)
    monkeypatch.setattr("staged_pool.runtime.models.transformer.speedups.Speedups.fuse", lambda _: None)
