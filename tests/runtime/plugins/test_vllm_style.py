"""vLLM's plugins behind the adapter: their methods in order, on every event loop, without a mix of requests."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from PIL import Image as PillowImage

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.plugins.vllm_style import VllmPlugin
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import InvalidInput, PluginFailed
from tests.servers.engines import engine_of_plugin
from tests.support.cards import BOTH_LANES, CARD, LABELS
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Fetching:
    """In the manner of TerraTorch's: `pre_process` runs a coroutine in an event loop of its own."""

    def __init__(self) -> None:
        self.requests_cache: dict[str, Any] = {}
        self.threads: set[str] = set()

    def parse_data(self, data: Any) -> Any:
        return data["text"]

    def merge_pooling_params(self, params: Any = None) -> Any:
        return params or SimpleNamespace(task="plugin")

    def pre_process(self, prompt: str, request_id: str | None = None, **kwargs: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return asyncio.run(self.pre_process_async(prompt, request_id))

    async def pre_process_async(self, prompt: str, request_id: str | None = None, **kwargs: Any) -> Any:
        assert request_id is not None
        await asyncio.sleep(0)
        self.requests_cache[request_id] = prompt
        return [{"prompt": word} for word in prompt.split()]

    def post_process(self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any) -> Any:
        assert request_id is not None
        rows = [row.outputs.data.tolist() for row in model_output]
        return {"prompt": self.requests_cache[request_id], "rows": rows}


async def test_a_pre_process_that_runs_an_event_loop_works_in_its_thread() -> None:
    plugin = Fetching()
    async with engine_of_plugin(VllmPlugin(plugin), LetterModel()) as engine:
        output = await engine.process({"text": "two words"})
        assert output == {"prompt": "two words", "rows": [expected("two").tolist(), expected("words").tolist()]}
        await until(lambda: plugin.requests_cache == {})
    assert threading.current_thread().name not in plugin.threads


async def test_nothing_is_kept_of_a_request_that_fails() -> None:
    plugin = Fetching()
    async with engine_of_plugin(VllmPlugin(plugin), LetterModel()) as engine:
        with pytest.raises(Exception, match="NaN"):
            await engine.process({"text": "good NaN"})
        await until(lambda: plugin.requests_cache == {})


class Queueing:
    """In the manner of BGE-M3's: `merge_pooling_params` belongs to the latest `pre_process`."""

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def parse_data(self, data: Any) -> Any:
        self.waiting.append(data)
        return data

    def pre_process(self, prompt: str, request_id: str | None = None, **kwargs: Any) -> Any:
        return [prompt]

    def merge_pooling_params(self, params: Any = None) -> Any:
        mine = self.waiting.pop(0)
        return SimpleNamespace(task="embed" if mine.startswith("e") else "classify")

    def post_process(self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any) -> Any:
        return [row.outputs.data.shape[0] for row in model_output]


async def test_requests_at_once_keep_their_own_parameters() -> None:
    model = LetterModel(replace(CARD, outputs=(Output.DENSE, Output.LABELS), labels=tuple(LABELS), scoring=None))
    outputs: dict[str, Any] = {}
    async with engine_of_plugin(VllmPlugin(Queueing()), model, config=EngineConfig(preprocess_limit=4)) as engine:

        async def ask(text: str) -> None:
            outputs[text] = await engine.process(text)

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(ask, f"{'ec'[number % 2]}{number}")
    assert outputs == {text: [4 if text.startswith("e") else len(LABELS)] for text in outputs}


async def test_only_the_async_forms_are_run_in_a_loop_of_their_own() -> None:
    class OnlyAsync:
        def parse_data(self, data: Any) -> Any:
            return data

        async def pre_process_async(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            return prompt

        async def post_process_async(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            return len(model_output)

    async with engine_of_plugin(VllmPlugin(OnlyAsync()), LetterModel()) as engine:
        assert await engine.process(["a", "b"]) == 2


async def test_older_names_are_accepted() -> None:
    class Older:
        def parse_request(self, request: Any) -> Any:
            return request.data

        def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return prompt

        def validate_or_generate_params(self, params: Any = None) -> Any:
            return params

        def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return len(model_output)

        def output_to_response(self, plugin_output: Any) -> Any:
            return SimpleNamespace(data={"count": plugin_output}, request_id="x")

    async with engine_of_plugin(VllmPlugin(Older()), LetterModel()) as engine:
        assert await engine.process(["a", "b", "c"]) == {"count": 3}


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [("abc", 1), ([97, 98], 1), ([[97], [98]], 2), ({"prompt_token_ids": [97]}, 1), (["a", {"prompt": "b"}], 2)],
)
async def test_prompts_of_every_form(prompt: Any, rows: int) -> None:
    class Gives(Fetching):
        def parse_data(self, data: Any) -> Any:
            return data

        def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return prompt

        def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return [(row.outputs.data.ndim, row.finished) for row in model_output]

    async with engine_of_plugin(VllmPlugin(Gives()), LetterModel()) as engine:
        assert await engine.process(prompt) == [(1, True)] * rows


async def test_an_image_of_pillow_goes_to_the_model_as_a_file() -> None:
    seen: list[bytes] = []

    class Sees(Fetching):
        def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return {"prompt": "", "multi_modal_data": {"image": PillowImage.new("RGB", (3, 2), "red")}}

        def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return len(model_output)

    def read(file: bytes) -> str:
        seen.append(file)
        return "image"

    async with engine_of_plugin(VllmPlugin(Sees()), LetterModel(BOTH_LANES, read_image=read)) as engine:
        assert await engine.process({"text": ""}) == 1
    assert PillowImage.open(io.BytesIO(seen[0])).size == (3, 2)


async def test_a_prompt_that_the_model_cannot_read_is_named() -> None:
    class Tensors(Fetching):
        def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return {"prompt_token_ids": [1], "multi_modal_data": {"image": {"pixel_values": [1.0]}}}

    async with engine_of_plugin(VllmPlugin(Tensors()), LetterModel()) as engine:
        with pytest.raises(InvalidInput, match="forward"):
            await engine.process({"text": ""})


async def test_a_forward_gets_the_prompts_as_they_are() -> None:
    class Tensors(Fetching):
        def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return [{"multi_modal_data": {"image": {"pixel_values": [1.0, 2.0]}}}]

        def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
            return [row.outputs.data for row in model_output]

    def forward(batch: Sequence[Any]) -> Sequence[Any]:
        return [sum(prompt["multi_modal_data"]["image"]["pixel_values"]) for prompt in batch]

    async with engine_of_plugin(VllmPlugin(Tensors(), forward=forward)) as engine:
        assert await engine.process({"text": ""}) == [3.0]


async def test_an_unknown_pooling_task_fails_by_name() -> None:
    class Unknown(Fetching):
        def merge_pooling_params(self, params: Any = None) -> Any:
            return SimpleNamespace(task="reward")

    async with engine_of_plugin(VllmPlugin(Unknown()), LetterModel()) as engine:
        with pytest.raises(PluginFailed, match="`preprocess`"):
            await engine.process({"text": "a"})


def test_a_class_needs_a_setup() -> None:
    with pytest.raises(TypeError, match="setup"):
        VllmPlugin(Fetching)
