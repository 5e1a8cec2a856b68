"""The server reads the inputs that the client writes, of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from staged_pool.api.wire.dialects.classify import read_classify
from staged_pool.api.wire.dialects.openai import read_embeddings
from staged_pool.api.wire.dialects.score import read_score
from staged_pool.client import embedding_calls, scoring_calls
from staged_pool.client.plans import CallDefaults, CallPlan
from staged_pool.runtime import arguments
from staged_pool.runtime.requests import Chat, Image
from staged_pool.stages.errors import InvalidInput
from tests.support.cards import CARD

OPTIONS = CallDefaults(model=None, batch_items=3)
FILE = Image(b"\x89PNG\r\n\x1a\n and the rest of it")
LINK = Image("https://example.org/a%20image.png?size=2#part")
SMALL = Image(FILE.source, {"size": {"height": 4, "width": 4}})
SAID = Chat(({"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}))
SHOWN = Chat(({"role": "user", "content": ("what is", FILE, "and", LINK, "?")},))
OPENED = Chat(({"role": "user", "content": "go"},), add_generation_prompt=True, template_arguments={"mood": "brief"})
QUESTION = Chat(({"role": "user", "content": ("like this one", FILE)},))


def bodies(call: CallPlan[Any, Any]) -> list[bytes]:
    return [msgspec.json.encode(batch.request.fields) for batch in call.batches()]


def embedding(inputs: Any, max_tokens: int | None = None) -> list[bytes]:
    return bodies(embedding_calls.embed(OPTIONS, inputs, max_tokens=max_tokens))


@pytest.mark.parametrize(
    "inputs",
    [
        "one text",
        ["a", "b", "c", "d"],
        [[1, 2], [3]],
        FILE,
        [FILE, LINK],
        ["a", FILE, "b", LINK],
        [SMALL, SMALL, FILE],
        SAID,
        [SAID, SHOWN, OPENED, OPENED],
        ["a", [1, 2], FILE, SAID, "b"],
    ],
    ids=repr,
)
def test_inputs_arrive_as_they_were_given(inputs: Any) -> None:
    arrived = [given for body in embedding(inputs, 9) for given in read_embeddings(body, CARD)[0].inputs]
    assert arrived == list(arguments.inputs(inputs, 9))


def test_a_salt_goes_with_every_request_of_a_call() -> None:
    asked: list[CallPlan[Any, Any]] = [
        embedding_calls.embed(OPTIONS, ["a", "b", "c", "d"], cache_salt="pepper"),
        embedding_calls.embed(OPTIONS, ["a"], outputs="sparse", cache_salt="pepper"),
        scoring_calls.classify(OPTIONS, ["a", "b", "c", "d"], cache_salt="pepper"),
        scoring_calls.classify_tokens(OPTIONS, ["a"], cache_salt="pepper"),
        scoring_calls.score(OPTIONS, "a", ["b", "c", "d", "e"], cache_salt="pepper"),
        scoring_calls.rerank(OPTIONS, "a", ["b"], cache_salt="pepper"),
    ]
    batches = [batch for call in asked for batch in call.batches()]
    batches += embedding_calls.embed_stream(OPTIONS, ["a"], cache_salt="pepper").batches
    assert [dict(batch.request.fields or {}).get("cache_salt") for batch in batches] == ["pepper"] * 10
    assert b"cache_salt" not in b"".join(bodies(embedding_calls.embed(OPTIONS, ["a"])))
    with pytest.raises(InvalidInput, match="cache_salt must be a text"):
        embedding_calls.embed(OPTIONS, ["a"], cache_salt="")


def test_pairs_arrive_among_texts() -> None:
    inputs: Any = [("a", "b"), ("c", "d"), "e"]
    call = scoring_calls.classify(OPTIONS, inputs)
    arrived = [given for body in bodies(call) for given in read_classify(body, CARD)[0].inputs]
    assert arrived == list(arguments.inputs_or_pairs(inputs, None))


@pytest.mark.parametrize(
    ("queries", "documents"),
    [
        ("a", ["b", "c", "d", "e", "f"]),
        (FILE, ["b", LINK, QUESTION]),
        (QUESTION, "b"),
        (["a", FILE, QUESTION, "b"], [QUESTION, "c", LINK, FILE]),
    ],
    ids=["texts", "images", "both", "pairs"],
)
def test_queries_and_documents_arrive_as_they_were_given(queries: Any, documents: Any) -> None:
    call = scoring_calls.score(OPTIONS, queries, documents)
    requests = [read_score(body, CARD)[0] for body in bodies(call)]
    wanted = arguments.contents("queries", queries)
    arrived = [query for request in requests for query in request.queries]
    assert arrived == list(wanted) if len(wanted) > 1 else set(map(repr, arrived)) == {repr(wanted[0])}
    assert [one for request in requests for one in request.documents] == list(
        arguments.contents("documents", documents)
    )


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([Chat(({"role": "user", "content": (FILE, SMALL)},))], "the same options"),
        ([Image("a/path.png")], "bytes of a file, or a URL"),
    ],
)
def test_contents_that_a_request_cannot_hold_are_rejected(contents: Sequence[Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        embedding(contents)


def test_a_document_is_one_message() -> None:
    call = scoring_calls.score(OPTIONS, "a", [SAID])
    with pytest.raises(InvalidInput, match="one message"):
        bodies(call)
