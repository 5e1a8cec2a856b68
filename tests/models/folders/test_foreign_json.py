"""Files of a model folder that end decoders: each is an error that names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.plugins.processor import PluginSetup
from staged_pool.runtime.plugins.vllm_style import _vllm_config
from staged_pool.stages.errors import ConfigError
from tests.servers.tiny_models import folder, tiny

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("content", [DEEP, DEEP[:200_000], '{"model_type": ' + DEEP + "}"])
@pytest.mark.parametrize("name", ["config.json", "modules.json", "tokenizer_config.json", "1_Pooling/config.json"])
def test_brackets_in_a_file_are_an_error_that_names_it(tmp_path: Path, name: str, content: str) -> None:
    model = shutil.copytree(folder("embedder"), tmp_path / "model")
    assert (model / name).exists()
    (model / name).write_text(content)

    async def load() -> None:
        async with open_engine(tiny(model)):
            pass

    with pytest.raises(ConfigError, match=f"{name}: cannot be read as JSON: it is nested too deeply"):
        anyio.run(load)


def test_a_plugin_in_the_style_of_vllm_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    setup = PluginSetup(config=EngineConfig(), card=None, fetch=None, folder=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON: it is nested too deeply"):
        _vllm_config(setup)
