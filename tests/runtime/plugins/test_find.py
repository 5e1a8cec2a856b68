"""Plugins by name: entry points of installed packages, their errors, and engines that open with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engine, open_engines
from staged_pool.runtime.models.folders.resolver import resolve
from staged_pool.runtime.plugins.find import all_plugins, find_plugin
from staged_pool.stages.errors import ConfigError, Unsupported
from tests.runtime.plugins.hosting import Letters

MODULE = """
import staged_pool


class Reversed(staged_pool.Processor):
    def preprocess(self, loaded, context):
        return [loaded]

    def forward(self, batch):
        return [text[::-1] for text in batch]


class Lengths(staged_pool.Processor):
    def __init__(self, setup):
        self.card = setup.card

    def preprocess(self, loaded, context):
        return loaded

    def postprocess(self, rows, context):
        return [self.card.width, len(rows), [row.values["dense"].shape for row in rows]]


def theirs():
    return "words_plugin.Theirs"


class Theirs:
    def __init__(self, vllm_config, renderer):
        self.width = vllm_config.model_config.hf_config.to_dict()["hidden_size"]
        self.tokenizer = renderer.get_tokenizer()

    def parse_data(self, data):
        return data["text"]

    def pre_process(self, prompt, request_id=None, **kwargs):
        return [self.tokenizer(prompt)["input_ids"]]

    def merge_pooling_params(self, params=None):
        return params

    def post_process(self, model_output, request_id=None, **kwargs):
        (row,) = model_output
        return {"width": self.width, "shape": list(row.outputs.data.shape), "tokens": len(row.prompt_token_ids)}


def broken():
    return 7
"""

POINTS = """
[staged_pool.plugins]
reversed = words_plugin:Reversed
lengths = words_plugin:Lengths
missing = no_such_module:Plugin
[vllm.io_processor_plugins]
theirs = words_plugin:theirs
broken = words_plugin:broken
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with plugins, for the length of a test."""
    (tmp_path / "words_plugin.py").write_text(MODULE)
    about = tmp_path / "words.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: words\nVersion: 1\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("words_plugin", None)


@pytest.mark.anyio
@pytest.mark.usefixtures("installed")
async def test_a_plugin_with_a_forward_needs_no_model() -> None:
    async with open_engine(EngineConfig(plugin=("reversed",))) as engine:
        assert await engine.process("abc") == ["cba"]
        assert engine.card.is_plugin
        with pytest.raises(Unsupported):
            await engine.embed("a")


@pytest.mark.anyio
@pytest.mark.usefixtures("installed")
async def test_plugins_stand_beside_their_model() -> None:
    model_folder = await anyio.to_thread.run_sync(lambda: str(resolve(None).folder))
    config = EngineConfig(model=model_folder, plugin=("lengths", "theirs"))
    async with open_engines([config], plugins=[Letters()]) as engines:
        assert list(engines)[1:] == ["lengths", "theirs", "codes"]
        model = next(iter(engines.values()))
        assert (await model.embed("a")).embeddings.shape == (1, 384)
        assert await model.process(["a", "b"], plugin="lengths") == [384, 2, [(384,), (384,)]]
        assert await model.process({"text": "a b"}, plugin="theirs") == {"width": 384, "shape": [384], "tokens": 4}
        assert (await engines["lengths"].process({"text": "a"}, plugin="codes"))["codes"] == [97]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("revers", r"plugin='revers': no installed package .* staged_pool.plugins; did you mean 'reversed'\?"),
        ("zzz", "installed: broken, lengths, missing, reversed, theirs"),
    ],
)
def test_an_unknown_plugin_is_named_with_its_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_plugin(name)


@pytest.mark.anyio
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "plugin='missing': no_such_module:Plugin could not be imported: ModuleNotFoundError"),
        ("broken", "plugin='broken': the entry point words_plugin:broken must return the name of a class"),
        ("lengths", "plugin 'lengths': it has no `forward`, so it needs a model: give one with --model"),
    ],
)
async def test_a_plugin_that_cannot_be_opened_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with open_engine(EngineConfig(plugin=(name,))):
            pass


def test_two_plugins_of_one_name_are_rejected() -> None:
    with pytest.raises(ConfigError, match="plugin='codes': two plugins have this name"):
        all_plugins((), [Letters(), Letters])
