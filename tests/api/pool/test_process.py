"""A pool with a plugin: data of the user's own kind through its hooks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from staged_pool.pool import Pool
from staged_pool.pool.engine_thread import Backend
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.plugins.processor import PluginContext, Processor
from staged_pool.stages.errors import InvalidInput, PluginFailed, Unsupported
from tests.api.pool.conftest import Open


class Codes(Processor):
    """Gives the code of each letter of a text."""

    def parse(self, data: Any, context: PluginContext) -> Any:
        if not isinstance(data, str):
            raise InvalidInput("data: must be a text", param="data")
        return data

    def preprocess(self, loaded: Any, context: PluginContext) -> Sequence[str]:
        return list(loaded)

    def forward(self, batch: Sequence[str]) -> Sequence[int]:
        return [ord(letter) for letter in batch]

    def postprocess(self, rows: Sequence[int], context: PluginContext) -> list[int]:
        if not rows:
            raise KeyError("nothing")
        return list(rows)


def test_data_goes_through_the_hooks_of_a_plugin(backend: Backend) -> None:
    with Pool(plugins=[Codes], backend=backend) as pool:
        assert pool.process("abc") == [97, 98, 99]
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(pool.process, "abcdefgh")) == [[code] for code in range(97, 105)]
        with pytest.raises(InvalidInput, match="must be a text"):
            pool.process(3)
        with pytest.raises(PluginFailed):
            pool.process("")
        with pytest.raises(InvalidInput, match="timeout_s"):
            pool.process("abc", timeout_s=0)


def test_requests_of_a_plugin_wait_for_room(backend: Backend) -> None:
    with Pool(EngineConfig(max_requests=1), plugins=[Codes], backend=backend) as pool:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(pool.process, "abcdefgh")) == [[code] for code in range(97, 105)]


def test_without_a_plugin_there_is_nothing_to_process(letters: Open) -> None:
    with pytest.raises(Unsupported, match="No plugin is served"):
        letters().process("abc")
