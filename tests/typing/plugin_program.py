"""A user's plugins, and a program that uses them."""

from collections.abc import Sequence
from typing import Any

import anyio

import staged_pool


class Lengths(staged_pool.Processor):
    """Measures lines with a forward of its own."""

    name = "lengths"
    isolation = "thread"
    max_batch_items = 32

    def __init__(self, setup: staged_pool.PluginSetup) -> None:
        self.fetch = setup.fetch
        self.device: str = setup.config.device

    def parse(self, data: Any, context: staged_pool.PluginContext) -> str:
        if not isinstance(data, str):
            raise staged_pool.InvalidInput("data: expected a URL", param="data")
        return data

    async def load(self, prompt: str, context: staged_pool.PluginContext) -> bytes:
        context.state = {"url": prompt, "left_s": context.left_s}
        return await self.fetch(prompt)

    def preprocess(self, loaded: bytes, context: staged_pool.PluginContext) -> list[bytes]:
        context.check()
        return loaded.splitlines()

    def forward(self, batch: Sequence[bytes]) -> list[int]:
        return [len(line) for line in batch]

    def postprocess(self, rows: list[int], context: staged_pool.PluginContext) -> dict[str, object]:
        return {"lengths": rows, **context.state}

    def tokens(self, item: bytes) -> int:
        return len(item)

    async def cancelled(self, context: staged_pool.PluginContext) -> None:
        print(f"{context.id} left in {context.hook}")

    async def aclose(self) -> None:
        print("closed")


class Words(staged_pool.Processor):
    """Embeds words with the served model."""

    def preprocess(self, loaded: str, context: staged_pool.PluginContext) -> staged_pool.ModelInputs:
        return staged_pool.ModelInputs(loaded.split(), ("dense",))

    def postprocess(self, rows: list[staged_pool.Row], context: staged_pool.PluginContext) -> list[int]:
        return [row.numbers for row in rows]


async def main() -> None:
    config = staged_pool.EngineConfig(plugin=("installed",))
    async with staged_pool.open_engine(config, plugins=[Lengths, Words()]) as engine:
        try:
            output = await engine.process("https://example.org", plugin="lengths", timeout_s=5.0)
            print(output)
        except staged_pool.PluginFailed as error:
            print(error.plugin, error.hook)
        statistics = engine.plugins["lengths"].statistics().plugin
        print(None if statistics is None else statistics.running["load"])


if __name__ == "__main__":
    anyio.run(main)
