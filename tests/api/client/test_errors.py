"""Errors of the client: the engine's own errors, over HTTP and back."""

from __future__ import annotations

import json

import pytest

from staged_pool.api import status
from staged_pool.client import Client, RetryPolicy
from staged_pool.client.errors import ConnectionFailed, ServerFailed, Unauthorized, error_of
from staged_pool.runtime.input_ranges import InputRange, with_input_range
from staged_pool.stages import errors

SENT: list[errors.StagedPoolError] = [
    errors.InvalidInput("wrong", param="input", index=3),
    errors.UnknownModel("no such model"),
    errors.TooLarge("too many", param="input"),
    errors.UnsupportedMedia("a format", index=1),
    errors.UnusableMedia("no image", index=1),
    errors.ModelFailed("NaN", index=2),
    errors.Overloaded("full", retry_after_s=2.0),
    errors.Unsupported("cannot"),
    errors.MediaUnavailable("host failed", index=4),
    errors.EngineStopped("draining", retry_after_s=5.0),
    errors.DeadlineExceeded("late", stage="batch"),
]


@pytest.mark.parametrize("error", SENT, ids=lambda error: type(error).__name__)
def test_an_error_of_the_engine_is_the_same_on_the_other_side(error: errors.StagedPoolError) -> None:
    problem = status.problem(error)
    after_s = next((float(value) for name, value in problem.headers() if name == b"retry-after"), None)
    found = error_of(problem.status, problem.body(), after_s)
    assert type(found) is type(error)
    assert str(found) == str(error)
    for name in ("param", "index", "retry_after_s"):
        assert getattr(found, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("body", [b'{"error":{"message":"a key is needed"}}', b'{"error":"a key is needed"}'])
def test_a_wrong_key_is_an_error_of_its_own(status: int, body: bytes) -> None:
    found = error_of(status, body)
    assert type(found) is Unauthorized
    assert str(found) == "a key is needed"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (502, b"<html>Bad Gateway</html>"),
        (500, b""),
        (418, b"[1]"),
        (500, b'{"error":{"message":5}}'),
        (302, b"\xff"),
        (500, b"[" * 100_000),
    ],
)
def test_what_a_proxy_says_is_a_failure_with_its_status(status: int, body: bytes) -> None:
    found = error_of(status, body)
    assert isinstance(found, ServerFailed)
    assert found.status == status


def test_a_redirect_names_the_address_that_it_leads_to() -> None:
    found = error_of(307, b"<html>", location="https://other.example/v1/embeddings")
    assert isinstance(found, ServerFailed)
    assert str(found) == (
        "The server answered with a redirect to https://other.example/v1/embeddings (status 307), "
        "which is not followed; ask that address"
    )


@pytest.mark.parametrize(
    ("variables", "url", "note"),
    [
        (
            {"HTTP_PROXY": "http://127.0.0.1:9"},
            "http://127.0.0.1:1",
            "HTTP_PROXY names a proxy: without one, put 127.0",
        ),
        ({"ALL_PROXY": "http://127.0.0.1:9"}, "http://127.0.0.1:1", "ALL_PROXY names a proxy"),
        ({"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}, "http://127.0.0.1:1", None),
        ({"HTTPS_PROXY": "http://127.0.0.1:9"}, "http://127.0.0.1:1", None),
        ({}, "http://127.0.0.1:1", None),
    ],
)
def test_a_proxy_of_the_environment_is_named_where_no_server_can_be_reached(
    variables: dict[str, str], url: str, note: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Client(url, retry=RetryPolicy(retries=0)) as client, pytest.raises(ConnectionFailed) as raised:
        client.embed("a")
    assert str(raised.value).startswith("The server cannot be reached: ")
    assert (note in str(raised.value)) if note else ("PROXY" not in str(raised.value))


def test_a_route_that_is_not_there_is_not_an_unknown_model() -> None:
    assert type(error_of(404, b'{"detail":"Not Found"}')) is errors.Unsupported
    found = error_of(
        404, b'{"error":{"message":"No served model gives labels","param":null,"code":404},"detail":"Not Found"}'
    )
    assert (type(found), str(found)) == (errors.Unsupported, "No served model gives labels")
    assert type(error_of(404, b'{"error":{"message":"m","param":"model"}}')) is errors.UnknownModel


def test_a_failed_batch_is_named_and_its_index_counts_over_the_whole_call() -> None:
    found = with_input_range(errors.InvalidInput("Input 3 is wrong", index=3), InputRange(128, 64), 200)
    assert isinstance(found, errors.InvalidInput)
    assert found.index == 131
    assert str(found) == "Inputs 128 to 191 of 200: Input 3 is wrong (input 131 of the call)"


def test_a_deadline_that_passed_is_named_too() -> None:
    found = with_input_range(errors.DeadlineExceeded("late", stage="client"), InputRange(0, 64), 200)
    assert str(found) == "Inputs 0 to 63 of 200: late"


def test_an_error_of_a_call_of_one_batch_is_left_as_it_is() -> None:
    found = with_input_range(errors.InvalidInput("Input 3 is wrong", index=3), InputRange(0, 64), 64)
    assert (str(found), getattr(found, "index", None)) == ("Input 3 is wrong", 3)


def test_every_status_that_the_server_gives_has_a_class() -> None:
    body = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": 1}}).encode()
    for cls, kind in status.TABLE.items():
        found = error_of(kind.status, body)
        if kind.status not in (499, 500) and cls not in (errors.DeviceLost, errors.OutOfMemory, errors.MediaTimedOut):
            assert issubclass(cls, type(found))
            assert type(found) is not errors.StagedPoolError
