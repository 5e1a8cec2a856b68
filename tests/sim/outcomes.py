"""The reasons for outcomes of clients: an outcome that the world does not explain is a bug."""

from __future__ import annotations

import math
from collections import Counter

from staged_pool.runtime.results import ClassifyResult, EmbedResult, RerankResult, ScoreResult
from staged_pool.stages.errors import (
    ADMISSION,
    Abandoned,
    DeadlineExceeded,
    DeviceLost,
    EngineStopped,
    InvalidInput,
    MediaUnavailable,
    ModelFailed,
    OutOfMemory,
    Overloaded,
    ScopeEnds,
    StageFailed,
    TooLarge,
    UnusableMedia,
)
from tests.sim.answers import wrong_answer
from tests.sim.internals import EPSILON
from tests.sim.watch import Left, Outcome, Watch
from tests.sim.world import BUGS, TICK_S, ClientPlan, ItemPlan, said

RESULTS = (EmbedResult, ScoreResult, RerankResult, ClassifyResult)


def settle(watch: Watch, client: ClientPlan, outcome: Outcome) -> None:
    """Check a client's outcome: the only one, in time, and explained by the world."""
    number = client.number
    watch.note("client {}: {}", number, Named(outcome))
    watch.active()
    if number in watch.outcomes:
        watch.fail(f"client {number} has two outcomes")
    watch.outcomes[number] = outcome
    watch.settled_at[number] = watch.now()
    if not client.tokenizes:
        _in_time(watch, client)
    if wrong := _unexplained(watch, client, outcome):
        watch.fail(f"client {number}: {Named(outcome)}: {wrong}")
    watch.admission_adds_up()
    if len(watch.outcomes) == len(watch.world.clients):
        watch.all_done.set()


def _in_time(watch: Watch, client: ClientPlan) -> None:
    now, number, began = watch.now(), client.number, client.arrives_at
    reads_s, write_s = _streaming_s(watch, client)
    leaves_at = min(began + client.host_timeout_s, client.leaves_at, watch.left_at.get(number, math.inf))
    latest = min(began + client.timeout_s + reads_s, leaves_at + write_s)
    if now > latest + EPSILON:
        watch.fail(f"client {number} had to wait until after {latest * 1000:.0f} ms")
    if (ticket := watch.tickets.get(number)) is None:
        return
    if not ticket.settled:
        watch.fail(f"client {number} has its outcome, and its ticket is open")
    elif now > ticket.times[0] + reads_s + EPSILON and not isinstance(ticket.error, ScopeEnds):  # the scope tells it
        watch.fail(f"client {number} heard of its outcome after {now - ticket.times[0]:g} s")


def _streaming_s(watch: Watch, client: ClientPlan) -> tuple[float, float]:
    """Return the longest streaming time behind a request's last row, and one write's, in seconds.

    All callers share the threads that write.
    """
    if not client.streams:
        return 0.0, 0.0
    world = watch.world
    write_s = world.codec_ticks * TICK_S + world.align_ticks * TICK_S
    writes = sum(len(other.items) + 2 for other in world.clients)
    return client.reads_s * (len(client.items) + 1) + writes * write_s, write_s


def _unexplained(watch: Watch, client: ClientPlan, outcome: Outcome) -> str | None:
    """Explain a wrong outcome; None if it is right."""
    match outcome:
        case EmbedResult() | ScoreResult() | RerankResult() | ClassifyResult():
            return _wrong_result(watch, client, outcome)
        case Left():
            leaves_at = min(client.leaves_at, watch.left_at.get(client.number, client.leaves_at))
            return None if watch.past(leaves_at) else "it has not left"
        case DeadlineExceeded():
            return _wrong_deadline(watch, client, outcome)
        case TimeoutError():
            return None if watch.past(client.arrives_at + client.host_timeout_s) else "too early"
        case TooLarge():
            config = watch.world.config
            most = max(len(client.items), sum(item.images for item in client.items))
            large = most > config.max_request_items or client.body_bytes > config.max_bytes
            return None if large else "it is small"
        case InvalidInput(index=None):
            return None if "rejects" in (client.decode, client.encode) else "it is valid"
        case InvalidInput(index=index) | ModelFailed(index=index) | MediaUnavailable(index=index):
            return _wrong_culprit(watch, client, index, outcome)
        case OutOfMemory():
            faults = [watch.world.contents[said(client, index)].fault for index in range(len(client.items))]
            return None if "out of memory" in faults else "a smaller batch fits"
        case Overloaded():
            return "it waits for room" if client.waits else None  # see `Watch.rejected`
        case StageFailed(stage=stage):
            return _wrong_crash(watch, client, stage)
        case DeviceLost():
            return None if watch.past(watch.device_lost_at) else "the device is well"
        case EngineStopped():
            return _wrong_stop(watch, client, outcome)
        case Abandoned():
            return "it is for nobody's eyes"
        case ValueError():
            is_own = client.streams and "raises" in (client.encode, client.gives)
            return None if is_own else "the caller's functions are well"
        case str() if client.tokenizes:
            return None if outcome == f"tokens {client.number}" else "of another text"
        case _:
            return "never expected"


def _wrong_result(watch: Watch, client: ClientPlan, result: object) -> str | None:
    faults = [fetch.fault for item in client.items for fetch in item.urls.values()]
    if any(faults) or any(item.fault for item in client.items) or client.decode or client.encode or client.gives:
        return "it must fail"
    if client.arrives_at > watch.stopping_at + EPSILON:
        return "it came too late to be taken"
    names = [said(client, index) for index in range(len(client.items))]
    if any((watch.scope(client), name) not in watch.worked_on for name in names):
        return "a row was made for another tenant, or for another salt"
    return wrong_answer(watch.world, client, result)


def _wrong_deadline(watch: Watch, client: ClientPlan, error: DeadlineExceeded) -> str | None:
    deadline = client.arrives_at + client.timeout_s
    if client.timeout_s == math.inf:
        return "it has none: a host's own scope cancels and raises nothing"
    if not watch.past(deadline) and error.stage not in (ADMISSION, "preprocess", "preprocess_images"):
        return f"{error.stage} was not asked to predict"
    return None


def _wrong_culprit(watch: Watch, client: ClientPlan, index: int | None, error: Exception) -> str | None:
    if index is None:
        return "names no item"
    items = _meant(watch, client, index)
    fetch_faults = [fetch.fault for item in items for fetch in item.urls.values()]
    faults = [item.fault for item in items]
    match error:
        case UnusableMedia():
            explained = "unusable" in fetch_faults
        case MediaUnavailable():
            explained = "unavailable" in fetch_faults
        case InvalidInput():
            explained = "invalid" in faults
        case _:
            explained = any(fault in ("preprocess raises", "forward raises", "nan") for fault in faults)
    return None if explained else f"item {index} is healthy"


def _meant(watch: Watch, client: ClientPlan, index: int) -> list[ItemPlan]:
    """Return the items that the index of an error may mean: it counts queries or documents."""
    if not client.compares or watch.world.model == "cross":
        return [client.items[index]]
    of_documents = client.items[client.queries + index : client.queries + index + 1]
    return [*client.items[index : index + 1], *of_documents] if index < client.queries else list(of_documents)


def _wrong_crash(watch: Watch, client: ClientPlan, stage: str) -> str | None:
    if stage == "stream":
        ends = {client.encode, client.gives} if client.streams else set()
        return None if ends & {"panics", "strays"} else "the caller's functions are well"
    if stage == "fetch":
        faults = [fetch.fault for item in client.items for fetch in item.urls.values()]
        return None if "raises" in faults else "every fetch was well"
    if (client.decode if stage == "parse" else client.encode if stage == "postprocess" else None) in BUGS:
        return None
    ticket = watch.tickets.get(client.number)
    if ticket is None or not any(abs(t - ticket.times[0]) < EPSILON for t in watch.crashed_at.get(stage, ())):
        return f"{stage} has not crashed"
    return None


def _wrong_stop(watch: Watch, client: ClientPlan, error: EngineStopped) -> str | None:
    engine = watch.engine
    if "of this kind" in str(error) and len(watch.world.lanes) > 1 and watch.world.slow_preprocess:
        return None  # one lane is held up
    patient = not watch.ended and not watch.past(min(watch.drains_until, watch.cancelled_at))
    if patient and watch.tickets.get(client.number) is not None and engine is not None and engine.fault is None:
        return "it was in flight, and there was time"
    if engine is None or watch.ended or watch.past(watch.stopping_at) or engine.fault is not None:
        return None
    return None if watch.may_be_broken() else "the engine runs"


def tally(watch: Watch) -> Counter[str]:
    """Count each kind of outcome."""
    return Counter(_kind(outcome) for outcome in watch.outcomes.values())


def _kind(outcome: Outcome) -> str:
    if isinstance(outcome, (str, *RESULTS)):
        return "answered"
    return "left" if isinstance(outcome, Left) else type(outcome).__name__


class Named:
    """Describes an outcome lazily, when it is printed."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def __str__(self) -> str:
        outcome = self._outcome
        return f"{_kind(outcome)}: {outcome}" if isinstance(outcome, Exception) else _kind(outcome)
