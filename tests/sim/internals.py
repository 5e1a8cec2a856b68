"""The only place that looks into the engine's private parts. A change of the core that moves one is followed here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from staged_pool.runtime.admission.accounting import LIMITS, RequestClass, Reservation
from staged_pool.runtime.admission.controller import LimitReached
from staged_pool.runtime.card import Lane
from staged_pool.runtime.engine import engine as engine_module
from staged_pool.runtime.engine import engine_stages
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.payloads import Payload
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.scheduling.entries import Batch
from staged_pool.stages.ticket import Item, Ticket
from tests.support.stages import batch_stages

if TYPE_CHECKING:
    from tests.sim.watch import Watch
    from tests.sim.world import World

EPSILON = 1e-6


@contextmanager
def engine_made_for(world: World, ticket: Callable[..., Ticket]) -> Iterator[None]:
    """Make the engine use watched tickets, and the world's number of workers."""
    module: Any
    new = (
        (engine_module, "Ticket", ticket),
        (engine_stages, "PARSE_WORKERS", world.parse_workers),
        (engine_stages, "POSTPROCESS_WORKERS", world.postprocess_workers),
    )
    was = [(module, name, getattr(module, name)) for module, name, _ in new]
    try:
        for module, name, value in new:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in was:
            setattr(module, name, value)


def tickets_of(engine: Engine) -> list[Ticket]:
    """Return the tickets of the requests in flight."""
    return list(engine._requests.tickets)


def tokens_of(ticket: Ticket) -> float:
    """Return the tokens that admission still counts for a request."""
    return ticket.load.tokens if isinstance(ticket.load, Reservation) else 0.0


def observe(engine: Engine, watch: Watch) -> None:
    """Observe admissions, and batches as they are cut."""
    admission = engine._admission
    enter, try_enter, count_items, leave = (
        admission.enter, admission.try_enter, admission.count_items, admission.leave,
    )  # fmt: skip

    def watched_enter(**kwargs: Any) -> Reservation:
        try:
            return enter(**kwargs)
        except StagedPoolError as error:
            watch.rejected(error, others=len(watch.reservations))
            raise

    def watched_try_enter(**kwargs: Any) -> Reservation | LimitReached:
        entered = try_enter(**kwargs)
        if isinstance(entered, Reservation):
            watch.reservations[id(entered)] = entered
        elif not watch.reservations:
            watch.fail(f"an empty engine lets nobody in: {entered.message}")
        return entered

    def watched_count_items(reservation: Reservation, inputs: Mapping[Lane, int]) -> None:
        try:
            count_items(reservation, inputs)
        except StagedPoolError as error:
            watch.rejected(error, others=len(watch.reservations) - 1)
            raise

    def watched_leave(reservation: Reservation, **kwargs: Any) -> None:
        leave(reservation, **kwargs)
        del watch.reservations[id(reservation)]

    for target, name, watched in (
        (admission, "enter", watched_enter),
        (admission, "try_enter", watched_try_enter),
        (admission, "count_items", watched_count_items),
        (admission, "leave", watched_leave),
    ):
        setattr(target, name, watched)
    for lane, stage in batch_stages(engine).items():
        _observe_batches(lane, stage, watch)


def _observe_batches(lane: Lane, stage: Any, watch: Watch) -> None:
    former = stage._former
    take = former.take

    def watched_take(should_keep: Callable[[Item[Payload]], bool], running: int = 0) -> Batch[Item[Payload]] | None:
        now = watch.now()
        waiting_tokens = sum(
            item.tokens for item in former.queue if not item.ticket.settled and item.ticket.deadline >= now
        )
        watch.unwanted_tokens(former.queue.waiting.tokens, waiting_tokens)
        batch: Batch[Item[Payload]] | None = take(should_keep, running)
        if batch is not None:
            watch.batch_formed(lane, batch, waiting_tokens, in_hand=stage._slots.running + stage._slots.ahead)
        if not former.queue and (remembered := former.queue.tenants):
            watch.fail(f"nothing waits, and {remembered} tenants are remembered")
        return batch

    former.take = watched_take


def admission_differs(engine: Engine, reservations: Mapping[int, Any]) -> list[str]:
    """List differences between admission's counts and the sums over the requests in flight."""
    counted = engine._admission.in_flight
    in_flight: defaultdict[str, float] = defaultdict(float)
    for reservation in reservations.values():
        priority = reservation.request_class.priority
        in_flight["requests"] += 1
        in_flight["items"] += reservation.items
        in_flight["bytes"] += reservation.body_bytes
        in_flight["tokens"] += reservation.tokens
        in_flight[f"requests of {priority} work"] += 1
        in_flight[f"tokens of {priority} work"] += reservation.tokens
        for lane, usage in reservation.lanes.items():
            in_flight[f"unprepared inputs of the {lane} lane"] += usage.unprepared
            in_flight[f"fed tokens of the {lane} lane"] += usage.fed
    totals: dict[str, float] = {
        **dict(zip(LIMITS, counted.total.limited, strict=True)),
        "tenants": sum(map(len, counted.tenants.values())),
    }
    classes: set[RequestClass] = {reservation.request_class for reservation in reservations.values()}
    in_flight["tenants"] = len(classes)
    for lane, unprepared in counted.unprepared.items():
        totals[f"unprepared inputs of the {lane} lane"] = unprepared
        totals[f"fed tokens of the {lane} lane"] = counted.fed[lane]
    for of_priority, of_tenants in counted.tenants.items():
        totals[f"requests of {of_priority} work"] = sum([one.requests for one in of_tenants.values()])
        totals[f"tokens of {of_priority} work"] = sum([sum(one.tokens.values()) for one in of_tenants.values()])
    wrong = [
        f"admission counts {total:g} {what}, and {in_flight[what]:g} are in flight"
        for what, total in totals.items()
        if abs(total - in_flight[what]) > EPSILON
    ]
    if unknown := in_flight.keys() - totals:
        wrong.append(f"admission does not count {sorted(unknown)}, which are in flight")
    return wrong


def left_in_admission(engine: Engine) -> bool:
    """True if admission counts anything."""
    in_flight = engine._admission.in_flight
    counts = (*in_flight.total.limited, *in_flight.unprepared.values(), *in_flight.fed.values())
    return any(abs(each) > EPSILON for each in counts)


def left_in_front(engine: Engine) -> int:
    """Count the requests that wait for room in front of the engine."""
    return engine._entrance.waiting


def left_in_channels(engine: Engine) -> list[str]:
    """List messages and open ends that an ended engine left in its channels."""
    wrong: list[str] = []
    for channel in engine._stages.channels:
        statistics = channel.receiver._stream.statistics()
        if statistics.current_buffer_used or channel.waiting:
            wrong.append(f"something is left in front of {channel.name}")
        if statistics.open_send_streams or statistics.open_receive_streams:
            wrong.append(f"the channel in front of {channel.name} is open")
    return wrong


def left_on_device(engine: Engine) -> list[str]:
    """List work that an ended engine still counts on the device."""
    wrong: list[str] = []
    if running := sum(stage.running for stage in batch_stages(engine).values()):
        wrong.append(f"{running} batches are thought to be on the device")
    if tokens := sum(stage._slots.tokens for stage in batch_stages(engine).values()):
        wrong.append(f"{tokens} tokens are thought to be on the device")
    return wrong


def left_waiting(engine: Engine) -> list[str]:
    """Stages that hold something for the device."""
    return [
        batch.meter.name
        for batch in batch_stages(engine).values()
        if batch.waiting or batch._coalescer._groups or batch._coalescer._joined or batch._former.queue.waiting.tokens
    ]


def budgets(engine: Engine) -> list[int]:
    """Tokens that a batch of each lane may have."""
    return [stage.budget_tokens for stage in batch_stages(engine).values()]


def fetches_left(engine: Engine) -> bool:
    completer: Any = engine._stages.parse._completer
    return bool(completer.fetching)


def crashes(engine: Engine) -> Counter[str]:
    """Crashes that each stage has counted."""
    return Counter({stage.meter.name: stage.meter.crashes for stage in engine._stages.stages})


def busy_workers(engine: Engine) -> Counter[str]:
    """Workers that each stage counts as busy."""
    return Counter({stage.meter.name: stage.meter.busy for stage in engine._stages.stages})
