"""The description of the routes, and the pages: complete, true, and of this server alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from blockbuster import BlockBuster

from staged_pool import asgi
from staged_pool.api.addresses import CANCEL_BATCH, FILE_CONTENT, ONE_BATCH, ONE_FILE
from staged_pool.api.app.call import LIVE
from staged_pool.api.app.dialects import TEI_PATHS
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.metrics import ServerMetrics
from staged_pool.api.app.pages import PAGES
from staged_pool.api.app.plugin_routes import PluginRoutes
from staged_pool.api.app.routes import Routes
from staged_pool.api.app.tasks import TASKS
from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import OPEN
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.openapi.admin import ADMIN_OPERATIONS
from staged_pool.api.openapi.batches import BATCH_OPERATIONS
from staged_pool.api.openapi.document import MEANINGS, document
from staged_pool.api.openapi.operations import OPERATIONS
from staged_pool.api.status import TABLE
from staged_pool.api.wire.dialects.invocations import candidates
from staged_pool.runtime.requests import Output
from staged_pool.runtime.tasks.zero_shot import entailment
from tests.api.batches.asking import Asking, requests
from tests.models.tiny import build
from tests.servers.engines import engine_on
from tests.servers.in_memory import InMemory, serving_in_memory
from tests.servers.tiny_models import tiny
from tests.support.cards import CLASSIFIER, CROSS_ENCODER, EMBEDDER, TAGGER
from tests.support.gates import Gate
from tests.support.model import LetterModel

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

KINDS = ("bert-mean", "ce-bert-1label", "ce-nli-3label", "tokcls-ner", "splade-bert", "colbert-pylate")


@pytest.fixture(autouse=True)
def models_may_load(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """A model's code is imported when it loads."""
    nothing_blocks_the_event_loop.deactivate()


@cache
def described(**config: Any) -> Any:
    """Return the whole description, which nobody changes."""
    return json.loads(document([*OPERATIONS, *BATCH_OPERATIONS, *ADMIN_OPERATIONS], ServerConfig(**config)))


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


# The description


def test_every_route_is_described_and_nothing_else_is() -> None:
    registry = EngineRegistry()
    table = Routes(registry, ServerMetrics(registry, ServerState()), PluginRoutes(registry)).table()
    assert {path: set(methods) for path, methods in OPERATIONS.items()} == {
        path: set(handlers) for path, handlers in table.items()
    }


def test_its_schemas_are_schemas() -> None:
    whole = described(api_keys=("key",), root_path="/models")
    assert whole["openapi"].startswith("3.1")
    assert whole["servers"] == [{"url": "/models"}]
    for schema in whole["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema)


def test_every_reference_leads_somewhere() -> None:
    whole = described()
    names = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(whole))
    assert names
    assert set(names) <= set(whole["components"]["schemas"])


def test_every_field_says_what_it_may_be() -> None:
    unsaid = {
        f"{name}.{field}"
        for name, schema in described()["components"]["schemas"].items()
        for field, said in schema.get("properties", {}).items()
        if not set(said) - {"default", "description"}
    }
    assert not unsaid


def test_routes_that_read_forms_say_so() -> None:
    paths = described()["paths"]
    for path, task in TASKS.items():
        content = paths[path]["post"]["requestBody"]["content"]
        assert ("multipart/form-data" in content) is task.forms


def test_headers_of_requests_and_answers_are_described() -> None:
    paths = described()["paths"]
    for path in TASKS:
        operation = paths[path]["post"]
        read = {parameter["name"] for parameter in operation["parameters"]}
        assert read >= {"X-Request-Timeout", "X-Priority", "traceparent"}
        written = set(operation["responses"]["200"]["headers"])
        theirs = {"x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time", "x-compute-tokens"}
        assert (theirs <= written) is (path in TEI_PATHS or path.endswith("rerank"))
        assert ("metadata" in written) is (path in ("/v1/embeddings", "/embeddings", "/embeddings_image", "/pooling"))


def test_invocations_may_answer_whatever_the_routes_that_it_leads_to_do() -> None:
    bodies: tuple[Mapping[str, object], ...] = (
        {"input": "a"},
        {"query": "a"},
        {"text_1": "a", "text_2": "b"},
        {"texts": ["a"]},
        {"inputs": "a"},
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    )
    leads_to = {path for body in bodies for path in candidates(json.dumps(body).encode())}
    assert len(leads_to) == 12
    may = set(map(str, OPERATIONS["/invocations"]["POST"].answer))
    assert {str(answer) for path in leads_to for answer in OPERATIONS[path]["POST"].answer} == may


def test_what_the_source_says_of_fields_is_said() -> None:
    fields = described()["components"]["schemas"]["EmbeddingsBody"]["properties"]
    assert fields["prompt"]["description"] == "Text that is put before each text, as an alternative to `prompt_name`."
    assert fields["truncation_side"]["anyOf"][0]["enum"] == ["left", "right"]


def test_every_status_of_an_error_has_a_meaning() -> None:
    assert {kind.status for kind in TABLE.values()} - {499} <= set(MEANINGS)
    used = {int(code) for _, _, operation in operations(described(api_keys=("k",))) for code in operation["responses"]}
    assert used == {200, 202, 204, *MEANINGS}


def test_it_says_which_routes_need_a_key() -> None:
    whole = described(api_keys=("key",))
    assert whole["security"] == [{"key": []}]
    for path, _, operation in operations(whole):
        is_open = path in OPEN
        assert (operation.get("security") == []) is is_open
        assert ("401" in operation["responses"]) is not is_open
    assert "security" not in described()
    asks = {path for path, _, operation in operations(described()) if "401" in operation["responses"]}
    assert asks == {*ADMIN_OPERATIONS}  # they are never without a key


def test_names_of_operations_are_unique() -> None:
    names = [operation["operationId"] for _, _, operation in operations(described())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("card", "there", "not_there"),
    [
        (EMBEDDER, {"/v1/embeddings", "/score", "/rerank", "/pooling"}, {"/classify", "/classify_tokens"}),
        (CROSS_ENCODER, {"/score", "/v1/rerank", "/classify"}, {"/v1/embeddings"}),
        (CLASSIFIER, {"/classify"}, {"/score", "/v1/embeddings", "/classify_tokens"}),
        (TAGGER, {"/classify_tokens"}, {"/classify", "/score"}),
    ],
)
async def test_only_routes_that_the_models_have_are_described(card: Any, there: set[str], not_there: set[str]) -> None:
    served = InMemory()
    async with engine_on(LetterModel(card)) as engine, served.client() as client:
        assert (await client.get("/openapi.json")).status_code == 503
        served.registry.open(engine)
        paths = set((await client.get("/openapi.json")).json()["paths"])
    assert there <= paths
    assert not not_there & paths
    assert {"/health", "/tokenize", "/docs", "/"} <= paths


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("models")
    return [build(kind, parent / kind) for kind in KINDS]


async def test_every_example_is_answered_as_described_by_real_models(folders: list[Path]) -> None:
    seen: set[str] = set()
    for folder in folders:
        async with serving_in_memory(tiny(folder)) as served:
            async with served.client() as client:
                description = Described((await client.get("/openapi.json")).json())
                for path, method, operation in operations(description.whole):
                    if path == LIVE:  # its answer never ends; `test_live` reads it
                        seen.add(path)
                        continue
                    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
                    examples = [each["value"] for each in content.get("examples", {}).values()] if content else [None]
                    for example in examples:
                        if content:
                            description.validate(content["schema"], example)
                        model = served.engine.card.name
                        response = await client.request(method, path.replace("{id}", model), json=example)
                        succeeded = OPERATIONS[path][method.upper()].status
                        if "candidate_labels" in json.dumps(example) and entailment(served.engine.card) is None:
                            succeeded = 501
                        gives_tokens = Output.MULTI_VECTOR in served.engine.card.outputs
                        if "late_chunking_params" in json.dumps(example) and not gives_tokens:
                            succeeded = 501
                        assert response.status_code == succeeded, (path, example, response.text)
                        description.validate_answer(operation, response)
                    seen.add(path)
                failed = await client.post("/tokenize", json={"prompt": 1})
                description.validate_answer(description.whole["paths"]["/tokenize"]["post"], failed)
    assert seen == set(OPERATIONS)


class Described:
    """The description of a server, which bodies and answers are held against."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self._components = json.dumps(whole["components"])

    def validate(self, schema: Any, value: Any) -> None:
        _validator(json.dumps(schema), self._components).validate(value)

    def validate_answer(self, operation: Any, response: httpx.Response) -> None:
        content = operation["responses"][str(response.status_code)].get("content")
        if content is None:
            assert response.content == b""
            return
        media_type = response.headers["content-type"].split(";")[0]
        assert media_type in content
        if media_type == "application/json":
            self.validate(content[media_type]["schema"], response.json())


@cache
def _validator(schema: str, components: str) -> jsonschema_rs.Draft202012Validator:
    """Compile a schema once: it takes longer than an answer."""
    return jsonschema_rs.Draft202012Validator(json.loads(schema) | {"components": json.loads(components)})


async def test_the_routes_of_batches_are_described_and_answered_so(tmp_path: Path) -> None:
    gate = Gate()
    async with engine_on(LetterModel(on_forward=gate)) as engine:
        pool = asgi.app(engine, server=ServerConfig(batch_dir=tmp_path))
        transport = httpx.ASGITransport(pool)
        async with pool.running(), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            description = Described(whole := (await client.get("/openapi.json")).json())
            assert {*BATCH_OPERATIONS} <= {*whole["paths"]}
            asked = Asking(client)
            batch = await asked.create(requests(2))
            ids = {ONE_FILE: (await asked.upload(b"a"))["id"], FILE_CONTENT: batch["input_file_id"]}
            ids |= {ONE_BATCH: batch["id"], CANCEL_BATCH: batch["id"]}
            try:
                await gate.arrived()  # a batch that has ended cannot be cancelled
                await asked.post(f"/v1/batches/{batch['id']}/cancel")
            finally:
                gate.open()
            await asked.ended(batch["id"])
            example = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/embeddings"}
            seen = set()
            for path, methods in BATCH_OPERATIONS.items():
                for method, operation in methods.items():
                    more: dict[str, Any] = {"json": example} if operation.body else {}
                    if operation.uploads:
                        more = {"files": {"file": ("a", b"a")}, "data": {"purpose": "batch"}}
                    response = await client.request(method, path.replace("{id}", ids.get(path, "")), **more)
                    assert response.status_code == 200, response.text
                    description.validate_answer(whole["paths"][path][method.lower()], response)
                    seen.add(path)
            assert seen == {*BATCH_OPERATIONS}


# The pages


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_nothing_but_this_server(path: str) -> None:
    text = PAGES[path].body.decode()
    text = text.replace("location.href", "").replace("http://www.w3.org/2000/svg", "")  # a name, and no address
    assert not re.search(r"(https?:)?//[a-z]", text)
    assert "innerHTML" not in text
    policy = dict(PAGES[path].headers)[b"content-security-policy"].decode()
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_there_while_models_load_and_asks_for_a_key_where_one_is_needed(path: str) -> None:
    async with InMemory().client() as client:
        page = await client.get(path)
    assert (page.status_code, page.content) == (200, PAGES[path].body)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    served = InMemory(ServerConfig(api_keys=("key",)))
    async with served.client(served.behind_front_door) as client:
        locked = await client.get(path)
        other = await client.get("/v1/models")
    assert (locked.status_code, locked.content) == (401, PAGES[path].body)
    assert locked.headers["www-authenticate"] == "Bearer"
    assert other.json()["error"]["code"] == 401


def test_pages_ask_for_existing_routes() -> None:
    for page in PAGES.values():
        for path in re.findall(r'new URL\("([a-z0-9./]+)", root\)', page.body.decode()):
            assert f"/{path}" in OPERATIONS
