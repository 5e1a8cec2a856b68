"""Both clients against a real server: their results equal those of its engines."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import staged_pool
from staged_pool.api.http.listener import bind
from staged_pool.client import AsyncClient, BadAnswer, Client, ConnectionFailed, RetryPolicy, Unauthorized
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.requests import MODEL_MAX, Image
from staged_pool.stages.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineStopped,
    InvalidInput,
    ModelFailed,
    Overloaded,
    UnknownModel,
    Unsupported,
)
from tests.servers.on_socket import Served, serving
from tests.servers.tiny_models import tiny_models
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

R = TypeVar("R")
Ask: TypeAlias = Callable[..., Any]
"""Calls a method of a client by its name, and waits for the result."""

pytestmark = pytest.mark.anyio

TEXTS = ["A man is eating food.", "naïve café, Ωmega 🙂", "short", "Someone has a meal."]
NOT_AGAIN = RetryPolicy(retries=0)


@asynccontextmanager
async def asking(blocking: bool, url: str, **settings: Any) -> AsyncIterator[Ask]:
    """One of the clients. The blocking one lives in a thread, as everything that blocks does here."""
    if blocking:
        with Client(url, **settings) as client:

            async def in_thread(method: str, *args: Any, **options: Any) -> Any:
                return await anyio.to_thread.run_sync(lambda: getattr(client, method)(*args, **options))

            yield in_thread
    else:
        async with AsyncClient(url, **settings) as other:

            async def here(method: str, *args: Any, **options: Any) -> Any:
                return await getattr(other, method)(*args, **options)

            yield here


@pytest.fixture(params=[False, True], ids=["async", "blocking"])
def blocking(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@asynccontextmanager
async def letters(
    model: LetterModel | None = None, *, engine: EngineConfig | None = None, **config: Any
) -> AsyncIterator[tuple[str, Any]]:
    async with serving(model or LetterModel(), engine=engine, **config) as served:
        yield served.url, served


async def test_every_method_gives_what_the_engine_gives(blocking: bool, anyio_backend: object) -> None:
    async with serving(*tiny_models()) as server:
        for settings in ({}, {"batch_items": 3, "concurrency": 2}):
            async with asking(blocking, server.url, **settings) as ask:
                await check_vectors(ask, server)
                await check_scores(ask, server)
                await check_labels(ask, server)
                await check_tokens(ask, server)
                await check_the_rest(ask, server)


async def check_vectors(ask: Ask, server: Served) -> None:
    engine = server.engines["embedder"]
    ids = [(await engine.tokenize(text, add_special_tokens=False)).ids for text in TEXTS]
    every = ["dense", "sparse", "multi_vector"]
    asked: list[tuple[Any, dict[str, Any]]] = [
        (TEXTS, {}),
        ("one text", {}),
        (ids, {}),
        (TEXTS, {"prompt": "query: ", "max_tokens": MODEL_MAX}),
        (TEXTS, {"max_tokens": 4, "normalize": False}),
        (TEXTS, {"outputs": ["dense", "sparse"]}),
        (TEXTS, {"outputs": "sparse", "prompt": "query: "}),
        (TEXTS, {"outputs": every}),
        (TEXTS, {"outputs": ["token_weights", "dense"]}),
        (TEXTS, {"prompt_name": "query", "model": "prompted"}),
    ]
    for inputs, options in asked:
        found = await ask("embed", inputs, **{"model": "embedder", **options})
        wanted = await server.engines[options.pop("model", "embedder")].embed(inputs, **options)
        assert (found.usage, found.model) == (wanted.usage, wanted.model)
        assert (found.dense is None) == (wanted.dense is None)
        if wanted.dense is not None:
            assert found.embeddings.dtype == np.float32
            assert_allclose(found.embeddings, wanted.embeddings, atol=3e-6)
        for one, other in zip(found.sparse or (), wanted.sparse or (), strict=True):
            assert_array_equal(one.indices, other.indices)
            assert_allclose(one.values, other.values, atol=3e-6)
        for some, others in zip(found.multi_vector or (), wanted.multi_vector or (), strict=True):
            assert_allclose(some, others, atol=3e-6)
        assert (found.token_weights is None) == (wanted.token_weights is None)
        for some, others in zip(found.token_weights or (), wanted.token_weights or (), strict=True):
            assert_allclose(some, others, atol=3e-6)


async def check_scores(ask: Ask, server: Served) -> None:
    embedder, ranker = server.engines["embedder"], server.engines["ranker"]
    found = await ask("score", TEXTS[0], TEXTS, model="embedder")  # by the cosine
    assert_allclose(found.scores, (await embedder.score(TEXTS[0], TEXTS)).scores, atol=3e-6)
    assert (await ask("score", TEXTS[0], TEXTS)).model == "ranker"
    asked: list[tuple[Any, dict[str, Any]]] = [
        (TEXTS[0], {}),
        (TEXTS[0], {"activate": False, "max_tokens": 9}),
        (TEXTS[::-1], {"activate": False}),
    ]
    for queries, options in asked:
        found = await ask("score", queries, TEXTS, model="ranker", **options)
        wanted = await ranker.score(queries, TEXTS, **options)
        assert (found.usage, found.model) == (wanted.usage, "ranker")
        assert_allclose(found.scores, wanted.scores, atol=3e-6)
    best = await ask("rerank", TEXTS[0], TEXTS, top_n=3, model="ranker")
    ranked = await ranker.rerank(TEXTS[0], TEXTS, top_n=3)
    assert [one.index for one in best.ranking] == [one.index for one in ranked.ranking]
    assert_allclose([one.score for one in best.ranking], [one.score for one in ranked.ranking], atol=3e-6)


async def check_labels(ask: Ask, server: Served) -> None:
    engine = server.engines["classifier"]
    for inputs in (TEXTS, [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")]):
        for activate in (True, False):
            found = await ask("classify", inputs, activate=activate, model="classifier")
            wanted = await engine.classify(inputs, activate=activate)
            assert (found.labels, found.usage, found.model) == (wanted.labels, wanted.usage, wanted.model)
            assert_allclose(found.scores, wanted.scores, atol=3e-6)


async def check_tokens(ask: Ask, server: Served) -> None:
    found = await ask("classify_tokens", TEXTS, aggregation="none")
    wanted = await server.engines["tagger"].classify_tokens(TEXTS, aggregation="none")
    assert any(wanted.entities)
    assert (found.usage, found.model) == (wanted.usage, wanted.model)
    for some, others in zip(found.entities, wanted.entities, strict=True):
        assert [(one.label, one.start, one.end, one.text) for one in some] == [
            (one.label, one.start, one.end, one.text) for one in others
        ]
        assert_allclose([one.score for one in some], [one.score for one in others], atol=3e-6)


async def check_the_rest(ask: Ask, server: Served) -> None:
    engine = server.engines["embedder"]
    for special in (True, False):
        found = await ask("tokenize", TEXTS[0], add_special_tokens=special, model="embedder")
        wanted = await engine.tokenize(TEXTS[0], add_special_tokens=special)
        assert (found.ids, found.strings) == (tuple(wanted.ids), tuple(wanted.strings))
    assert await ask("detokenize", found.ids, model="embedder") == await engine.detokenize(found.ids)
    models = await ask("models")
    assert [model.name for model in models] == list(server.engines)
    assert models[0].max_tokens == engine.card.max_tokens
    assert models[0].card["vocabulary"] == engine.card.vocabulary
    assert await ask("ready")


async def test_a_long_list_comes_back_in_order_and_says_how_far_it_is(blocking: bool) -> None:
    texts = [f"{'a' * (number % 7 + 1)}{number}" for number in range(50)]
    told: list[tuple[int, int]] = []
    async with letters() as (url, _), asking(blocking, url, batch_items=4, concurrency=3) as ask:
        result = await ask("embed", texts, progress=lambda done, total: told.append((done, total)))
    assert_array_equal(result.embeddings, np.stack([expected(text) for text in texts]))
    assert result.usage.prompt_tokens == sum(map(len, texts))
    assert [done for done, _ in told] == [*range(4, 49, 4), 50] or sorted(told) == told
    assert (told[-1], len(told)) == ((50, 50), 13)


async def test_a_stream_gives_every_vector_once(blocking: bool) -> None:
    texts = [f"text {number}" for number in range(20)]

    def in_thread(url: str) -> tuple[list[tuple[int, Any]], Any]:
        with Client(url, batch_items=8) as client, client.embed_stream(texts) as stream:
            return list(stream), stream.usage

    async with letters() as (url, served):
        if blocking:
            found, usage = await anyio.to_thread.run_sync(in_thread, url)
        else:
            async with AsyncClient(url, batch_items=8) as client, client.embed_stream(texts) as stream:
                found = [vector async for vector in stream]
                usage = stream.usage
        await until(lambda: served.in_flight == 0)
    assert sorted(index for index, _ in found) == list(range(20))
    for index, vector in found:
        assert_array_equal(vector, expected(texts[index]))
    assert usage.prompt_tokens == sum(map(len, texts))


def held_after_the_first() -> tuple[LetterModel, Gate]:
    """A model that computes one text, and then waits."""
    gate, model = Gate(), LetterModel()
    model.on_forward = lambda texts: gate() if len(model.forwarded) > 1 else None
    return model, gate


ONE_BY_ONE = EngineConfig(max_batch_items=1, chunk_items=1)


async def test_a_vector_comes_before_the_next_one_is_computed(blocking: bool) -> None:
    model, gate = held_after_the_first()
    texts = ["a", "bb", "ccc"]

    def in_thread(url: str) -> tuple[Any, list[Any]]:
        with Client(url) as client, client.embed_stream(texts) as stream:
            first = next(stream)
            gate.open()
            return first, list(stream)

    async with letters(model, engine=ONE_BY_ONE) as (url, _):
        if blocking:
            first, others = await anyio.to_thread.run_sync(in_thread, url)
        else:
            async with AsyncClient(url) as client, client.embed_stream(texts) as stream:
                first = await anext(stream)
                gate.open()
                others = [vector async for vector in stream]
    assert sorted(index for index, _ in (first, *others)) == [0, 1, 2]
    for index, vector in (first, *others):
        assert_array_equal(vector, expected(texts[index]))


@pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning")  # httpx leaves its own to the collector
async def test_a_stream_that_is_left_early_ends_the_request(blocking: bool) -> None:
    model, gate = held_after_the_first()
    texts = ["a"] * 50

    def in_thread(url: str) -> None:
        with Client(url) as client, client.embed_stream(texts) as stream:
            next(stream)

    async with letters(model, engine=ONE_BY_ONE) as (url, served):
        if blocking:
            await anyio.to_thread.run_sync(in_thread, url)
        else:
            async with AsyncClient(url) as client, client.embed_stream(texts) as stream:
                await anext(stream)
        await until(lambda: served.in_flight == 0)
        gate.open()
    assert len(model.forwarded) < len(texts)
    gc.collect()


async def test_an_error_in_the_middle_of_a_stream_is_raised_there(blocking: bool) -> None:
    texts = ["fine"] * 6 + ["NaN"]

    def in_thread(url: str) -> None:
        with Client(url) as client, client.embed_stream(texts) as stream:
            list(stream)

    async def here(url: str) -> None:
        async with AsyncClient(url) as client, client.embed_stream(texts) as stream:
            async for _ in stream:
                pass

    async with letters(engine=ONE_BY_ONE) as (url, _):
        with pytest.raises(ModelFailed) as raised:
            await (anyio.to_thread.run_sync(in_thread, url) if blocking else here(url))
    assert raised.value.index == 6


async def test_a_batch_of_a_stream_that_is_rejected_is_named(blocking: bool) -> None:
    def in_thread(url: str) -> None:
        with Client(url, batch_items=1) as client, client.embed_stream(["a", ""]) as stream:
            assert next(stream)[0] == 0
            next(stream)

    async def here(url: str) -> None:
        async with AsyncClient(url, batch_items=1) as client, client.embed_stream(["a", ""]) as stream:
            assert (await anext(stream))[0] == 0
            await anext(stream)

    async with letters() as (url, _):
        with pytest.raises(InvalidInput, match="Inputs 1 to 1 of 2: ") as raised:
            await (anyio.to_thread.run_sync(in_thread, url) if blocking else here(url))
    assert raised.value.index == 1


async def test_a_failed_batch_does_not_wait_for_one_that_pauses(anyio_backend: object) -> None:
    """One of two concurrent requests is rejected, and would be retried after a minute."""
    gate, model = Gate(), LetterModel()
    model.on_preprocess = gate
    retry = RetryPolicy(first_pause_s=60, max_pause_s=120)
    with anyio.fail_after(30):
        async with letters(model, engine=EngineConfig(max_requests=1)) as (url, served):
            async with asking(True, url, retry=retry, batch_items=1, concurrency=2) as ask:
                async with anyio.create_task_group() as tasks:

                    async def fail() -> None:
                        with pytest.raises(ModelFailed):
                            await ask("embed", ["NaN", "NaN"])

                    tasks.start_soon(fail)
                    await until(lambda: rejected(served) == 1)
                    gate.open()


async def test_no_more_requests_are_out_at_once_than_may_be(blocking: bool) -> None:
    gate, model = Gate(), LetterModel()
    model.on_preprocess = gate
    async with letters(model) as (url, served), asking(blocking, url, batch_items=1, concurrency=3) as ask:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "embed", [str(number) for number in range(12)])
            await until(lambda: served.in_flight == 3)
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
                assert served.in_flight <= 3
            gate.open()
    assert sum(map(len, model.preprocessed)) == 12


async def test_a_bar_is_drawn_on_standard_error(blocking: bool, capsys: pytest.CaptureFixture[str]) -> None:
    async with letters() as (url, _), asking(blocking, url, batch_items=1) as ask:
        await ask("embed", ["a", "b", "c"], progress=True)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert shown.out == ""


async def test_a_failed_batch_is_named_and_ends_the_call(blocking: bool) -> None:
    texts = ["fine"] * 7 + ["NaN"] + ["fine"] * 30
    async with letters() as (url, served), asking(blocking, url, batch_items=3, concurrency=2) as ask:
        with pytest.raises(ModelFailed) as raised:
            await ask("embed", texts)
        await until(lambda: served.in_flight == 0)
    assert raised.value.index == 7
    assert str(raised.value).startswith("Inputs 6 to 8 of 38: ")
    assert "HTTP 424" in raised.value.__notes__[0]


async def test_what_is_wrong_with_an_argument_is_said_before_anything_is_sent(blocking: bool) -> None:
    async with asking(blocking, "http://127.0.0.1:1", batch_items=4) as ask:
        wrong: list[tuple[str, tuple[Any, ...], Mapping[str, Any], str]] = [
            ("embed", (["a", 5],), {}, "Input 1 must be a text, a list of token ids"),
            ("embed", ("a",), {"outputs": "labels"}, "outputs must be"),
            ("embed", ("a",), {"dimensions": "3"}, "dimensions must be an int"),
            ("embed", ("a",), {"timeout_s": 0}, "timeout_s=0: must be a number of seconds above 0"),
            ("embed", ("a",), {"timeout_s": "1"}, "timeout_s='1': must be a number of seconds above 0"),
            ("classify", (5,), {}, "input must be a text, an Image, a Chat, or a list of these"),
            ("score", (["a", "b"], ["c", "d", "e"]), {}, "found 2 and 3"),
            ("rerank", ("a", ["b"]), {"top_n": -1}, "top_n must be at least 0"),
            ("rerank", (["a", "c"], ["b"]), {}, "query must be a single query, not 2"),
            ("rerank", (5, ["b"]), {}, "query must be a text"),
            ("embed", ([*["a"] * 3, Image("a path")],), {}, "bytes of a file, or a URL"),
            ("tokenize", (5,), {}, "text must be a text"),
        ]
        for method, args, options, message in wrong:
            with pytest.raises(InvalidInput, match=message):
                await ask(method, *args, **options)


async def test_what_is_wrong_with_a_later_batch_is_an_error_of_its_own_class(blocking: bool) -> None:
    async with letters() as (url, _), asking(blocking, url, batch_items=1, concurrency=2) as ask:
        with pytest.raises(InvalidInput, match="bytes of a file, or a URL"):
            await ask("embed", [*["a"] * 9, Image("a path")])


async def test_a_rejection_by_the_server_is_raised_as_the_engine_raises_it(blocking: bool) -> None:
    async with letters() as (url, _), asking(blocking, url) as ask:
        with pytest.raises(InvalidInput) as raised:
            await ask("embed", ["fine", ""])
        assert raised.value.index == 1
        with pytest.raises(InvalidInput):
            await ask("embed", [])
        with pytest.raises(Unsupported):
            await ask("classify", "a")
    async with letters() as (url, _), asking(blocking, url, model="other") as ask:
        with pytest.raises(UnknownModel):
            await ask("embed", "a")


async def test_a_rejection_for_overload_is_repeated_until_there_is_room(blocking: bool) -> None:
    gate, model = Gate(), LetterModel()
    model.on_preprocess = gate
    retry = RetryPolicy(retries=100, first_pause_s=0.01)
    async with letters(model, engine=EngineConfig(max_requests=1)) as (url, served):
        async with asking(blocking, url, retry=retry) as ask, asking(blocking, url, retry=NOT_AGAIN) as ask_once:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, "embed", "first")
                await gate.arrived()
                with pytest.raises(Overloaded) as raised:
                    await ask_once("embed", "impatient")
                assert raised.value.retry_after_s >= 1
                with pytest.raises(Overloaded):  # its time would be up before the server wants to see it again
                    await ask("embed", "in a hurry", timeout_s=0.9)
                results = []

                async def patient() -> None:
                    results.append(await ask("embed", "patient"))

                tasks.start_soon(patient)
                await until(lambda: rejected(served) >= 3)
                gate.open()
    assert_array_equal(results[0].embeddings, [expected("patient")])
    assert model.preprocessed == [["first"], ["patient"]]


def rejected(served: Any) -> int:
    """Number of requests that admission has rejected."""
    return sum(served.engine.statistics().admission.refused.values())


async def test_the_server_gives_up_when_its_client_does(blocking: bool) -> None:
    gate, model = Gate(), LetterModel()
    model.on_preprocess = gate
    async with letters(model) as (url, served), asking(blocking, url) as ask:
        with pytest.raises(DeadlineExceeded):
            await ask("embed", "a", timeout_s=0.2)
        await until(lambda: served.in_flight == 0)
        gate.open()


async def test_a_cancelled_call_leaves_nothing_on_the_server() -> None:
    gate, model = Gate(), LetterModel()
    model.on_preprocess = gate
    async with letters(model) as (url, served), AsyncClient(url, batch_items=1, concurrency=4) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.embed, ["a", "b", "c", "d", "e"])
            await gate.arrived()
            tasks.cancel_scope.cancel()
        await until(lambda: served.in_flight == 0)
        gate.open()
        assert_array_equal((await client.embed("after")).embeddings, [expected("after")])


async def test_a_server_that_was_started_again_is_found_again(blocking: bool, unused_port: int) -> None:
    async with asking(blocking, f"http://127.0.0.1:{unused_port}") as ask:
        for _ in range(2):
            async with serving(listener=bind("127.0.0.1", unused_port)):
                assert_array_equal((await ask("embed", "a")).embeddings, [expected("a")])


async def test_where_nobody_listens_that_is_said(blocking: bool, unused_port: int) -> None:
    async with asking(blocking, f"http://127.0.0.1:{unused_port}", retry=NOT_AGAIN) as ask:
        for method, args in (("embed", ("a",)), ("ready", ()), ("models", ())):
            with pytest.raises(ConnectionFailed, match="cannot be reached"):
                await ask(method, *args)


@pytest.fixture
def unused_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
    return port


async def test_a_key_opens_the_server(blocking: bool) -> None:
    async with letters(api_keys=("right" * 8,)) as (url, _):
        async with asking(blocking, url, api_key="right" * 8) as ask:
            assert (await ask("embed", "a")).model == "letters"
        for key in (None, "wrong" * 8):
            async with asking(blocking, url, api_key=key) as ask:
                with pytest.raises(Unauthorized):
                    await ask("embed", "a")


async def test_a_unix_socket_leads_to_the_server(blocking: bool, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with serving(unix_socket=path):
        async with asking(blocking, "http://pool", unix_socket=path) as ask:
            assert_array_equal((await ask("embed", ["a", "b"])).embeddings, [expected("a"), expected("b")])


async def test_a_server_that_drains_says_that_it_is_not_ready(blocking: bool) -> None:
    async with letters() as (url, served), asking(blocking, url, retry=NOT_AGAIN) as ask:
        served.server.registry.close("draining")
        ready = await ask("ready")
        assert (bool(ready), ready.reason) == (False, "draining")
        with pytest.raises(EngineStopped, match="draining"):
            await ask("embed", "a")


@pytest.mark.parametrize("answer", [b"{}", b"no json", b'{"data":[]}', b'{"data":[{"index":0,"embedding":"AAA="}]}'])
async def test_another_service_is_no_server_of_vectors(blocking: bool, answer: bytes) -> None:
    async with speaking(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer)) as url:
        async with asking(blocking, url) as ask:
            with pytest.raises(BadAnswer):
                await ask("embed", "a")


async def test_a_connection_that_ends_early_is_tried_once_more(blocking: bool) -> None:
    async with speaking(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{") as url, asking(blocking, url) as ask:
        with pytest.raises(ConnectionFailed, match="ended before"):
            await ask("embed", "a")


@asynccontextmanager
async def speaking(answer: bytes) -> AsyncIterator[str]:
    """Something that gives one answer to all who come, and hangs up."""

    async def answers(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answer)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, answers)
            yield f"http://127.0.0.1:{port}"
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_key_is_not_shown(client: type[Client | AsyncClient]) -> None:
    made = client(api_key="secret" * 8)
    assert "secret" not in f"{made!r} {vars(made)!r}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url: must be an http or https address"),
        ({"base_url": "http://[::"}, "base_url: must be an http or https address"),
        ({"api_key": "se\ncret"}, "api_key: must be printable ASCII"),
        ({"timeout_s": 0}, "timeout_s=0: must be above 0"),
        ({"attempt_timeout_s": math.nan}, "attempt_timeout_s=nan: must be above 0"),
        ({"batch_items": 0}, "batch_items=0: must be between 1"),
        ({"concurrency": True}, "concurrency=True: must be between 1"),
    ],
)
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_setting_that_makes_no_sense_is_rejected(
    client: type[Client | AsyncClient], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        client(**settings)
    assert "cret" not in str(raised.value)


def test_the_clients_are_part_of_the_library() -> None:
    assert staged_pool.Client is Client
    assert staged_pool.AsyncClient is AsyncClient
    with pytest.raises(AttributeError, match="no attribute 'Clientele'"):
        _ = staged_pool.Clientele  # type: ignore[attr-defined]


def test_both_clients_show_the_same_methods_with_all_that_they_take() -> None:
    methods = [name for name in vars(Client) if not name.startswith("_") and name != "close"]
    assert "embed" in methods
    for name in methods:
        given, given_async = inspect.signature(getattr(Client, name)), inspect.signature(getattr(AsyncClient, name))
        assert given.parameters == given_async.parameters
        assert "timeout_s" in given.parameters
        assert not any(each.kind is each.VAR_KEYWORD for each in given.parameters.values())
        assert getattr(Client, name).__doc__
