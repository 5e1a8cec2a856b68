"""The decision to send a request again, without input, output or time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.client.errors import ConnectionFailed, ServerFailed
from staged_pool.client.exchange import Attempt, NoAnswer, Pause, ServerAnswer, ServerRequest, StepOutcome, exchange
from staged_pool.client.retry import RetryPolicy, retry_after_s
from staged_pool.stages.errors import ConfigError, DeadlineExceeded, EngineStopped, InvalidInput, Overloaded

REQUEST = ServerRequest(path="/v1/embeddings", fields={"input": "a"})
DONE = ServerAnswer(200, {}, b"{}")
UNREACHABLE, CUT_OFF = NoAnswer("unreachable", "no one there"), NoAnswer("cut off", "gone")


def rejection(status: int = 429, **headers: str) -> ServerAnswer:
    return ServerAnswer(status, {name.replace("_", "-"): value for name, value in headers.items()}, b"")


class Drive:
    """Drives an exchange in virtual time, in which each try takes `try_s`."""

    def __init__(
        self,
        outcomes: Sequence[StepOutcome],
        *,
        policy: RetryPolicy | None = None,
        timeout_s: float = math.inf,
        luck: float = 0.0,
        try_s: float = 0.0,
        request: ServerRequest = REQUEST,
        attempt_timeout_s: float = math.inf,
    ) -> None:
        self.now = 100.0
        self.asks: list[Attempt] = []
        self.pauses: list[float] = []
        self._outcomes = list(outcomes)
        self._try_s = try_s
        self._steps = exchange(
            request,
            policy=policy or RetryPolicy(),
            clock=lambda: self.now,
            deadline=self.now + timeout_s,
            attempt_timeout_s=attempt_timeout_s,
            luck=lambda: luck,
        )

    def run(self) -> ServerAnswer:
        outcome: StepOutcome = None
        while True:
            try:
                step = self._steps.send(outcome)
            except StopIteration as end:
                answer: ServerAnswer = end.value
                return answer
            if isinstance(step, Pause):
                self.pauses.append(step.seconds)
                self.now += step.seconds
                outcome = None
            else:
                self.asks.append(step)
                self.now += self._try_s
                outcome = self._outcomes.pop(0)


def test_a_result_is_returned_at_once() -> None:
    drive = Drive([DONE])
    assert drive.run() == DONE
    assert (len(drive.asks), drive.pauses) == (1, [])


@pytest.mark.parametrize("status", [429, 503])
def test_a_rejection_is_repeated_when_the_server_says(status: int) -> None:
    drive = Drive([rejection(status, retry_after="3"), rejection(status, retry_after="2"), DONE])
    assert drive.run() == DONE
    assert drive.pauses == [3.0, 2.0]


def test_without_a_word_of_the_server_pauses_grow_up_to_their_limit() -> None:
    policy = RetryPolicy(retries=5, first_pause_s=1, max_pause_s=4)
    drive = Drive([*[rejection()] * 5, DONE], policy=policy, luck=1.0)
    drive.run()
    assert drive.pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


@given(
    retry=st.integers(0, 10_000),
    after_s=st.none() | st.floats(0, 100),
    luck=st.floats(0, 1),
    first_pause_s=st.floats(0.001, 100),
    max_pause_s=st.floats(0.001, 100),
)
def test_no_pause_is_too_long_or_ends_before_the_server_wants_it(
    retry: int, after_s: float | None, luck: float, first_pause_s: float, max_pause_s: float
) -> None:
    policy = RetryPolicy(retries=1000, first_pause_s=first_pause_s, max_pause_s=max_pause_s)
    pause_s = policy.pause_s(retry, retry_after_s=after_s, luck=luck)
    if retry >= 1000 or (after_s or 0) > max_pause_s:
        assert pause_s is None
    else:
        assert pause_s is not None
        assert (after_s or 0) <= pause_s <= max_pause_s


def test_clients_that_were_rejected_together_do_not_come_back_together() -> None:
    pauses = {RetryPolicy().pause_s(0, retry_after_s=1.0, luck=luck / 10) for luck in range(11)}
    assert len(pauses) == 11


def test_a_server_that_wants_to_be_left_alone_for_long_is_not_waited_for() -> None:
    drive = Drive([rejection(retry_after="31")])
    with pytest.raises(Overloaded) as raised:
        drive.run()
    assert raised.value.retry_after_s == 31
    assert drive.pauses == []


def test_a_retry_that_would_come_after_the_deadline_is_not_waited_for() -> None:
    drive = Drive([rejection(503, retry_after="2"), rejection(503, retry_after="2"), DONE], timeout_s=4)
    with pytest.raises(EngineStopped):
        drive.run()
    assert (drive.pauses, drive.now) == ([2.0], 102.0)


def test_the_server_is_told_how_much_time_is_left() -> None:
    drive = Drive([rejection(retry_after="2"), DONE], timeout_s=10, try_s=0.5)
    drive.run()
    assert [ask.headers["x-request-timeout"] for ask in drive.asks] == ["10.000", "7.500"]
    assert [ask.timeout_s for ask in drive.asks] == [10.0, 7.5]


def test_one_try_may_take_less_than_the_call() -> None:
    drive = Drive([DONE], timeout_s=100, attempt_timeout_s=7)
    drive.run()
    assert drive.asks[0].headers["x-request-timeout"] == "7.000"


def test_without_a_limit_the_server_is_told_none() -> None:
    drive = Drive([DONE])
    drive.run()
    assert "x-request-timeout" not in drive.asks[0].headers
    assert drive.asks[0].timeout_s == math.inf


def test_when_the_time_is_up_the_server_is_not_asked_again() -> None:
    drive = Drive([CUT_OFF], timeout_s=1, try_s=2)
    with pytest.raises(ConnectionFailed):
        drive.run()
    assert len(drive.asks) == 1


def test_a_try_without_an_answer_in_time_is_not_repeated() -> None:
    drive = Drive([NoAnswer("timeout")], timeout_s=5)
    with pytest.raises(DeadlineExceeded, match="within 5 s"):
        drive.run()
    assert drive.pauses == []


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    drive = Drive([UNREACHABLE, UNREACHABLE, DONE])
    assert drive.run() == DONE
    assert len(drive.pauses) == 2


def test_a_server_that_does_not_come_is_an_error_that_says_so() -> None:
    drive = Drive([UNREACHABLE] * 3, policy=RetryPolicy(retries=2))
    with pytest.raises(ConnectionFailed, match="cannot be reached: no one there"):
        drive.run()


def test_a_connection_that_ends_early_is_repeated_once_and_not_twice() -> None:
    assert Drive([CUT_OFF, DONE]).run() == DONE
    drive = Drive([CUT_OFF, CUT_OFF, DONE])
    with pytest.raises(ConnectionFailed, match="ended before"):
        drive.run()
    assert len(drive.asks) == 2


@pytest.mark.parametrize("status", [400, 404, 413, 424, 500, 501, 502, 504])
def test_what_fails_again_is_not_sent_again(status: int) -> None:
    drive = Drive([rejection(status), DONE])
    with pytest.raises(Exception, match="server"):
        drive.run()
    assert len(drive.asks) == 1


def test_an_error_carries_what_an_operator_looks_for() -> None:
    with pytest.raises(ServerFailed) as raised:
        Drive([rejection(500, x_request_id="abc")]).run()
    assert raised.value.__notes__ == ["POST /v1/embeddings: HTTP 500, request id abc"]
    assert raised.value.status == 500


def test_an_invalid_text_is_rejected_before_it_is_sent() -> None:
    drive = Drive([], request=ServerRequest(path="/", fields={"input": "\ud800"}))
    with pytest.raises(InvalidInput, match="surrogate"):
        drive.run()
    assert drive.asks == []


def test_texts_of_other_classes_are_sent_as_texts() -> None:
    fields = {"input": list(np.array(["a", "é"])), "prompt": np.str_("p")}
    drive = Drive([DONE], request=ServerRequest(path="/", fields=fields))
    drive.run()
    assert [json.loads(ask.body or b"") for ask in drive.asks] == [{"input": ["a", "é"], "prompt": "p"}]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "5"}, 5.0),
        ({"retry-after": " 0.5 "}, 0.5),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        (
            {"retry-after": "Wed, 21 Oct 2015 07:28:10 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"},
            10.0,
        ),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:10 GMT"}, 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(
    ("setting", "value"), [("retries", -1), ("first_pause_s", 0), ("max_pause_s", math.nan), ("max_pause_s", 1e9)]
)
def test_a_policy_that_makes_no_sense_is_rejected(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setting):
        RetryPolicy(**{setting: value})  # type: ignore[arg-type]
