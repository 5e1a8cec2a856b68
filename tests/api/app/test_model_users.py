"""Users of a model that keep it from being replaced or removed: pipelines, batches and plugins."""

from __future__ import annotations

from pathlib import Path

import pytest

from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.model_admin import ModelAdmin
from staged_pool.api.app.model_users import users_of
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor
from staged_pool.runtime.pipelines.file import read_pipelines
from tests.api.batches.asking import Asking, requests
from tests.runtime.plugins.hosting import Letters
from tests.servers.engines import engine_of_plugin
from tests.servers.in_memory import serving_in_memory
from tests.servers.on_socket import serving
from tests.support.cards import EMBEDDER
from tests.support.gates import Gate
from tests.support.model import LetterModel

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

PIPELINE = """
name = "search"
items = "data"

[[stage]]
name = "embed"
model = "letters"
"""


async def test_a_pipeline_uses_its_models_until_the_server_ends(tmp_path: Path) -> None:
    (tmp_path / "search.toml").write_text(PIPELINE)
    files = read_pipelines([tmp_path / "search.toml"])
    async with serving_in_memory(LetterModel(card=EMBEDDER), pipelines=files) as served:
        (pipeline_on,) = users_of(served.registry, None)
        assert pipeline_on(served.engine) == "the pipeline search uses it until the server ends"


async def test_a_batch_uses_every_model_that_can_do_its_task_until_it_has_ended(tmp_path: Path) -> None:
    gate = Gate()
    model = LetterModel(card=EMBEDDER, on_forward=gate)
    async with serving(model, batch_dir=tmp_path) as served, served.client() as client:
        _, batch_on = users_of(served.server.registry, served.server._batches)
        assert batch_on(served.engine) is None
        asking = Asking(client)
        batch = await asking.create(requests(3))
        await gate.arrived()
        user = batch_on(served.engine)
        gate.open()
        await asking.ended(batch["id"])
        assert user == f"the batch {batch['id']} has not ended, and may use it; wait for it, or cancel it"
        assert batch_on(served.engine) is None


async def test_a_plugin_uses_its_model_until_the_server_ends() -> None:
    async with engine_of_plugin(Letters()) as engine:
        admin = ModelAdmin(EngineRegistry(), EngineConfig(), MemoryGovernor(UNLIMITED_BYTES))
        (name,) = engine.plugins
        assert admin._user_of(engine) == f"the plugin {name} uses it until the server ends"
