from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from staged_pool.api import status
from staged_pool.api.status import HttpError, problem
from staged_pool.stages import errors


def subclasses(of: type[Exception]) -> Iterator[type[Exception]]:
    for cls in of.__subclasses__():
        yield cls
        yield from subclasses(cls)


def test_every_error_of_the_stages_has_a_kind_of_its_own() -> None:
    ours = {cls for cls in subclasses(errors.StagedPoolError) if cls.__module__ == errors.__name__}
    assert ours | {errors.StagedPoolError} == set(status.TABLE)


@pytest.mark.parametrize(
    ("error", "code", "type_", "retry_after"),
    [
        (errors.InvalidInput("x"), 400, "BadRequestError", None),
        (errors.UnknownModel("x"), 404, "NotFoundError", None),
        (errors.TooLarge("x"), 413, "RequestTooLargeError", None),
        (errors.ModelFailed("x"), 424, "ModelFailedError", None),
        (errors.Unsupported("x"), 501, "NotImplementedError", None),
        (errors.Overloaded("x", retry_after_s=2.1), 429, "RateLimitError", b"3"),
        (errors.Overloaded("x", retry_after_s=0.001), 429, "RateLimitError", b"1"),
        (errors.EngineStopped("x", retry_after_s=4), 503, "ServiceUnavailableError", b"4"),
        (errors.DeviceLost("x"), 503, "ServiceUnavailableError", b"10"),
        (errors.OutOfMemory("x"), 503, "ServiceUnavailableError", b"1"),
        (errors.DeadlineExceeded("x", stage="batch"), 504, "TimeoutError", None),
        (errors.StageFailed("x", stage="batch"), 500, "InternalServerError", None),
    ],
)
def test_an_error_becomes_its_status_its_body_and_its_retry_hint(
    error: Exception, code: int, type_: str, retry_after: bytes | None
) -> None:
    answer = problem(error)
    assert answer.status == code
    assert json.loads(answer.body()) == {"error": {"message": "x", "type": type_, "param": None, "code": code}}
    assert dict(answer.headers()).get(b"retry-after") == retry_after


@pytest.mark.parametrize(
    ("error", "param"),
    [(errors.InvalidInput("x", param="input", index=3), "input"), (errors.ModelFailed("x", index=3), None)],
)
def test_the_field_and_the_input_at_fault_are_named(error: Exception, param: str | None) -> None:
    said = json.loads(problem(error).body())["error"]
    assert (said["param"], said["index"]) == (param, 3)


def test_a_subclass_made_elsewhere_takes_the_kind_of_its_parent() -> None:
    class Special(errors.ModelFailed):
        pass

    assert problem(Special("x")).status == 424


def test_a_bug_tells_the_caller_nothing_about_itself() -> None:
    answer = problem(FileNotFoundError("/secret/path"))
    assert answer.status == 500
    assert b"secret" not in answer.body()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread"), OSError(12, "no memory")])
def test_an_allocation_that_failed_may_come_again(error: Exception) -> None:
    answer = problem(error)
    assert (answer.status, answer.retry_after_s) == (503, 1.0)


def test_a_rejection_by_http_brings_its_own_problem() -> None:
    rejection = HttpError(status.SLOW_BODY, "too slow")
    assert problem(rejection) is rejection.problem
