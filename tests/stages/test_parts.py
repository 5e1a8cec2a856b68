"""Ticket, channel, custody, supervision and isolation, each by itself."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import anyio
import pytest

from staged_pool.stages.channel import Channel, WorkerNotifier
from staged_pool.stages.errors import Abandoned, DeviceLost, EngineStopped, ModelFailed, StagedPoolError, StageFailed
from staged_pool.stages.isolate import run_isolated
from staged_pool.stages.meter import BUCKETS_S, Histogram, StageMeter
from staged_pool.stages.offload import ThreadOffload
from staged_pool.stages.supervise import RestartPolicy, StageBroken, Supervisor, custody
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Parts, Plan, Request
from tests.doubles import Gate, NoLoad, until

pytestmark = pytest.mark.anyio

PLAN: Plan[object] = Plan(("a", "b"), lambda rows, tokens: (list(rows), tokens))


def a_ticket() -> Ticket:
    return Ticket(Request, lambda result: ("answer", result), NoLoad())


def a_row(ticket: Ticket, index: int, row: object, cost: int, part: int = 0) -> Item[object]:
    return Item(ticket, index, row, 0.0, cost, None, part)


async def test_the_first_writer_wins() -> None:
    ticket = a_ticket()
    assert ticket.fail(Abandoned("first"))
    assert not ticket.resolve("second")
    assert not ticket.fail(EngineStopped("third"))
    with pytest.raises(Abandoned, match="first"):
        await ticket.wait()


async def test_the_last_row_completes_the_answer() -> None:
    ticket = a_ticket()
    ticket.expect(PLAN)
    assert not ticket.deliver(a_row(ticket, 1, "row b", 2))
    assert ticket.deliver(a_row(ticket, 0, "row a", 3))
    assert ticket.answer()() == ("answer", (["row a", "row b"], 5))


async def test_the_parts_of_an_input_are_gathered_in_their_order() -> None:
    ticket = a_ticket()
    ticket.expect(PLAN)
    ticket.split(1, 3)
    assert not ticket.deliver(a_row(ticket, 1, "last", 1, part=2))
    assert not ticket.deliver(a_row(ticket, 0, "row a", 1))
    assert not ticket.deliver(a_row(ticket, 1, "first", 1, part=0))
    assert ticket.deliver(a_row(ticket, 1, "middle", 1, part=1))
    assert ticket.answer()() == ("answer", (["row a", Parts(["first", "middle", "last"])], 4))


async def test_an_answer_of_some_rows_cannot_be_made() -> None:
    ticket = a_ticket()
    ticket.expect(PLAN)
    ticket.deliver(a_row(ticket, 0, "row a", 3))
    with pytest.raises(RuntimeError, match="all rows"):
        ticket.answer()


async def test_a_settled_ticket_takes_no_more_rows() -> None:
    ticket = a_ticket()
    ticket.expect(PLAN)
    ticket.fail(Abandoned("left"))
    assert not ticket.deliver(a_row(ticket, 0, "row a", 1))
    assert ticket.timeline.tokens == 0


async def test_an_outcome_that_is_there_survives_a_cancellation() -> None:
    ticket = a_ticket()
    ticket.resolve("value")
    with anyio.CancelScope() as scope:
        scope.cancel()
        assert await ticket.wait() == "value"


async def test_the_stage_of_a_request_is_the_earliest_that_has_something_of_it() -> None:
    ticket = a_ticket()
    assert ticket.stage == "door"
    ticket.moved_to("parse")
    assert ticket.stage == "parse"
    ticket.moved_to("parse", 0)
    ticket.move(8, None, "preprocess_images")
    ticket.move(1, "preprocess_images", "batch_images")
    ticket.move(1, "batch_images", "postprocess")
    assert ticket.stage == "preprocess_images", "seven of eight are there"
    ticket.move(7, "preprocess_images", "batch_images")
    assert ticket.stage == "batch_images"
    ticket.move(7, "batch_images", "postprocess")
    assert ticket.stage == "postprocess"


async def test_a_block_is_told_when_its_ticket_is_settled() -> None:
    told: list[str] = []
    ticket, late, left = a_ticket(), a_ticket(), a_ticket()
    with ticket.on_settled(lambda: told.append("settled")):
        ticket.resolve("answer")
    late.fail(Abandoned("left"))
    with late.on_settled(lambda: told.append("was settled")):
        assert told == ["settled", "was settled"]
    with left.on_settled(lambda: told.append("never")):
        pass
    left.fail(Abandoned("left"))
    assert told == ["settled", "was settled"]


async def test_a_channel_ends_with_the_last_of_its_outlets() -> None:
    channel = Channel[int]("behind", 3)
    second = channel.outlet.clone()
    await channel.outlet.send(1)
    channel.outlet.close()
    await second.send(2)
    second.close()
    assert [number async for number in channel.inlet] == [1, 2]
    channel.inlet.close()


async def test_closing_an_inlet_returns_what_nobody_took_and_tells_those_who_wait_for_room() -> None:
    channel = Channel[int]("behind", 2)
    sent, refused = list[int](), list[int]()

    async def send(number: int) -> None:
        try:
            await channel.outlet.send(number)
        except anyio.BrokenResourceError:
            refused.append(number)
        else:
            sent.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(send, number)
        await until(lambda: channel.waiting == 4)
        assert channel.inlet.close() == sent
    assert len(sent) == len(refused) == 2
    assert channel.waiting == 0
    channel.outlet.close()
    gc.collect()


async def test_a_channel_has_room_for_so_much_and_gives_it_in_the_order_in_which_it_is_wanted() -> None:
    channel = Channel[str]("behind", 4, size=len)
    sent: list[str] = []

    async def send(message: str) -> None:
        await channel.outlet.send(message)
        sent.append(message)

    async def is_sent(*messages: str) -> None:
        await until(lambda: sent == list(messages))
        await anyio.wait_all_tasks_blocked()
        assert sent == list(messages)

    async with anyio.create_task_group() as tasks:
        for message in ("aa", "bb"):
            await send(message)
        for message in ("larger than it", "c"):
            tasks.start_soon(send, message)
            await anyio.wait_all_tasks_blocked()
        assert channel.inlet.receive_waiting() == "aa"
        await is_sent("aa", "bb")  # there would be room for `c`, but it is not its turn
        assert channel.inlet.receive_waiting() == "bb"
        await is_sent("aa", "bb", "larger than it")
        assert channel.inlet.receive_waiting() == "larger than it"
        await is_sent("aa", "bb", "larger than it", "c")
    assert channel.inlet.close() == ["c"]
    channel.outlet.close()


async def test_a_sender_that_leaves_holds_no_room_and_nobody_up() -> None:
    channel = Channel[str]("behind", 2, size=len)
    await channel.outlet.send("a")
    async with anyio.create_task_group() as tasks:
        leaves, told = anyio.CancelScope(), anyio.CancelScope()

        async def send(message: str, scope: anyio.CancelScope) -> None:
            with scope:
                await channel.outlet.send(message)

        tasks.start_soon(send, "two", leaves)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(send, "b", anyio.CancelScope())
        await anyio.wait_all_tasks_blocked()
        assert channel.waiting == 3
        leaves.cancel()  # `b` fits, where what was before it did not
        await until(lambda: channel.waiting == 2)
        tasks.start_soon(send, "c", told)
        await anyio.wait_all_tasks_blocked()
        assert channel.inlet.receive_waiting() == "a"
        told.cancel()  # it has room by now, and is to be there to use it, or to give it back
    if channel.waiting == 1:
        await channel.outlet.send("d")
    assert channel.inlet.close() in (["b", "c"], ["b", "d"])
    channel.outlet.close()


async def test_a_worker_for_what_comes_in_one_turn_and_another_for_what_it_leaves() -> None:
    channel = Channel[int]("behind", 8)
    took: dict[str, list[int]] = {}
    busy = anyio.Event()

    async def work(name: str) -> None:
        took[name] = []
        async for number in channel.inlet:
            took[name].append(number)
            if number == 2:
                await busy.wait()

    async with anyio.create_task_group() as tasks:
        for name in ("first", "second", "third"):
            tasks.start_soon(work, name)
        await anyio.wait_all_tasks_blocked()
        for number in range(4):
            await channel.outlet.send(number)
        await anyio.wait_all_tasks_blocked()
        assert sorted(number for numbers in took.values() for number in numbers) == [0, 1, 2, 3]
        assert [] in took.values()  # what two could do, a third was not asked for
        busy.set()
        channel.outlet.close()
    channel.inlet.close()


async def test_who_is_rung_for_and_leaves_has_another_come_instead() -> None:
    notifier = WorkerNotifier()
    came: list[int] = []
    scopes = [anyio.CancelScope() for _ in range(2)]

    async def wait(number: int) -> None:
        with scopes[number]:
            await notifier.wait()
            came.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
        notifier.notify()
        notifier.notify()  # one is on its way: for the same work no other is
        scopes[0].cancel()
        await anyio.wait_all_tasks_blocked()
        scopes[1].cancel()
    assert came in ([0], [1])  # it was there before it could be cancelled, or the other one came


async def test_what_is_in_the_channel_when_the_outlet_closes_still_arrives() -> None:
    channel = Channel[int]("behind", 3)
    for number in range(3):
        await channel.outlet.send(number)
    channel.outlet.close()
    assert [number async for number in channel.inlet] == [0, 1, 2]
    assert channel.inlet.receive_waiting() is None
    channel.inlet.close()


async def test_custody_settles_what_a_crash_leaves_behind() -> None:
    kept, handed_on = a_ticket(), a_ticket()

    def crash() -> None:
        with custody("here", [handed_on]) as held:
            held.handed_on()
            held.take([kept])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    assert isinstance(kept.error, StageFailed)
    assert not handed_on.settled


async def test_what_a_crash_leaves_behind_gets_an_error_each() -> None:
    """One object for all would lead each caller to the others' frames and bodies."""
    tickets = [a_ticket() for _ in range(3)]
    with pytest.raises(DeviceLost), custody("here", tickets):
        raise DeviceLost("it is gone")
    raised = []
    for ticket in tickets:
        with pytest.raises(DeviceLost) as caught:
            await ticket.wait()
        raised.append(caught.value)
    assert len(set(map(id, raised))) == 3
    assert all(ticket.error is not None and ticket.error.__traceback__ is None for ticket in tickets)


async def test_custody_settles_what_a_worker_forgot() -> None:
    ticket = a_ticket()
    with custody("here", [ticket]):
        pass
    assert isinstance(ticket.error, StageFailed)


async def test_custody_of_a_cancelled_worker_says_that_the_engine_stopped() -> None:
    ticket = a_ticket()
    with anyio.CancelScope() as scope:
        scope.cancel()
        with custody("here", [ticket]):
            await anyio.sleep_forever()
    assert isinstance(ticket.error, EngineStopped)


async def test_a_worker_is_restarted_until_it_has_crashed_too_often() -> None:
    runs = 0

    async def worker() -> None:
        nonlocal runs
        runs += 1
        raise ZeroDivisionError

    meter = StageMeter("here", 1)
    supervisor = Supervisor(meter, RestartPolicy(max_crashes=3, first_delay_s=0.0))
    with pytest.raises(StageBroken, match="here stage crashed 4 times"):
        await supervisor.run(worker)
    assert runs == meter.crashes == 4


async def test_a_lost_device_is_not_answered_by_a_restart() -> None:
    async def worker() -> None:
        raise DeviceLost("gone")

    meter = StageMeter("here", 1)
    with pytest.raises(DeviceLost):
        await Supervisor(meter, RestartPolicy()).run(worker)
    assert meter.crashes == 0


async def test_a_poisoned_payload_fails_alone_in_few_runs() -> None:
    runs: list[Sequence[int]] = []

    async def run(payloads: Sequence[int]) -> Sequence[int | StagedPoolError]:
        runs.append(payloads)
        if 13 in payloads:
            raise ValueError("unlucky")
        return [p * 2 for p in payloads]

    results = await run_isolated(run, range(32), stage="here")
    assert [r for r in results if not isinstance(r, ModelFailed)] == [p * 2 for p in range(32) if p != 13]
    assert isinstance(results[13], ModelFailed)
    assert len(runs) == 1 + 2 * 5


async def test_too_few_results_are_a_failure_not_a_mix_up() -> None:
    async def run(payloads: Sequence[int]) -> Sequence[int | StagedPoolError]:
        return list(payloads)[: len(payloads) - 1]

    results = await run_isolated(run, [1, 2], stage="here")
    assert all(isinstance(result, ModelFailed) for result in results)


async def test_a_call_that_was_abandoned_is_not_repeated_in_halves() -> None:
    calls = 0

    async def run(payloads: Sequence[int]) -> Sequence[int | StagedPoolError]:
        nonlocal calls
        calls += 1
        raise Abandoned("a call that does not end")

    results = await run_isolated(run, range(4), stage="here")
    assert calls == 1
    assert [type(result) for result in results] == [Abandoned] * 4


async def test_after_a_half_that_was_abandoned_the_other_one_is_not_run() -> None:
    runs: list[Sequence[int]] = []

    async def run(payloads: Sequence[int]) -> Sequence[int | StagedPoolError]:
        runs.append(payloads)
        if len(payloads) == 4:
            raise ValueError("one of them is bad")
        raise Abandoned("a call that does not end")

    results = await run_isolated(run, range(4), stage="here")
    assert runs == [range(4), range(2)]
    assert [type(result) for result in results] == [Abandoned] * 4


async def test_who_waits_for_a_thread_that_another_offload_holds_is_let_go() -> None:
    gate, first, second = Gate(), ThreadOffload(1), ThreadOffload(1)
    second.limiter = first.limiter
    ended: list[str] = []

    async def call(offload: ThreadOffload, name: str) -> None:
        try:
            await offload(gate, name)
        except Abandoned:
            ended.append(f"{name} let go")
        else:
            ended.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, first, "holds")
        await gate.arrived()
        tasks.start_soon(call, second, "waits")
        await until(lambda: first.limiter.statistics().tasks_waiting == 1)
        second.abandon()
        await until(lambda: bool(ended))
        assert ended == ["waits let go"], "what hangs belongs to another"
        gate.open()
    assert ended == ["waits let go", "holds"]


def test_durations_fall_into_their_buckets() -> None:
    histogram = Histogram()
    for seconds in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, 1000.0):
        histogram.observe(seconds)
    snapshot = histogram.snapshot()
    assert (snapshot.counts[0], snapshot.counts[1], snapshot.counts[-1]) == (2, 1, 1)
    assert snapshot.count == 4
