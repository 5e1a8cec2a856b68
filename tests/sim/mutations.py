"""Bugs planted into the real classes, one at a time: what the simulator does not notice, it does not prove.

Each mutation is a function that returns what to put in place of what. Several are bugs that this engine really had.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from unittest import mock

import anyio
import anyio.lowlevel

from staged_pool.api.http.connections import Connection
from staged_pool.api.http.fast_path import FastPath
from staged_pool.api.limits.server_state import ServerState
from staged_pool.runtime.admission import accounting
from staged_pool.runtime.admission.accounting import Arriving, InFlight, Reservation
from staged_pool.runtime.admission.controller import Admission
from staged_pool.runtime.caching.fingerprints import Identities, SharingScopes
from staged_pool.runtime.caching.result_cache import ResultCache
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine import engine_stages
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.entrance import Entrance
from staged_pool.runtime.engine.followed_requests import FollowedRequests
from staged_pool.runtime.engine.lanes import LaneLimits
from staged_pool.runtime.engine.lifecycle import Lifecycle
from staged_pool.runtime.media.image_completer import ImageCompleter
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.statistics import Phase
from staged_pool.stages import batch as batch_module
from staged_pool.stages import isolate, preprocess, rows, supervise, ticket_check
from staged_pool.stages import parse as parse_module
from staged_pool.stages import postprocess as postprocess_module
from staged_pool.stages import user_code as user_code_module
from staged_pool.stages.batch import BatchStage
from staged_pool.stages.batch_results import BatchResults
from staged_pool.stages.channel import Receiver, Sender
from staged_pool.stages.device_slots import DeviceSlots
from staged_pool.stages.errors import Abandoned, DeviceLost, EngineStopped, OutOfMemory, StagedPoolError
from staged_pool.stages.feeding import FeedQueue
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.parse import ParseStage
from staged_pool.stages.postprocess import PostprocessStage
from staged_pool.stages.preprocess import PreprocessStage
from staged_pool.stages.rows import RowStream
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.coalescing import Coalescer
from staged_pool.stages.scheduling.fair_queue import FairQueue
from staged_pool.stages.stage import Stage
from staged_pool.stages.supervise import Custody, Supervisor
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.user_code import UserCode
from tests.sim.doubles import SimOffload

Plan: TypeAlias = list[tuple[object, str, Any]]
"""An object, the name of its attribute, and the value that replaces it."""

MUTATIONS: dict[str, Callable[[], Plan]] = {}


def mutation(plan: Callable[[], Plan]) -> Callable[[], Plan]:
    MUTATIONS[plan.__name__] = plan
    return plan


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug during the block."""
    with contextlib.ExitStack() as stack:
        for target, attribute, value in MUTATIONS[name]():
            stack.enter_context(mock.patch.object(target, attribute, value))
        yield


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


# ---- results ----


@mutation
def results_swapped_in_a_batch() -> Plan:
    original = BatchStage._call

    async def call(self: BatchStage[Any, Any], execution: Any, payloads: Sequence[Any]) -> Sequence[Any]:
        return list(await original(self, execution, payloads))[::-1]

    return [(BatchStage, "_call", call)]


@mutation
def rows_put_at_the_index_of_another_item() -> Plan:
    original = Ticket.deliver

    def deliver(self: Ticket, item: Item[object], numbers: int = 0) -> bool:
        index = item.index if self.settled else len(self._rows) - 1 - item.index
        return original(self, replace(item, index=index), numbers)

    return [(Ticket, "deliver", deliver)]


@mutation
def index_lost_between_stages() -> Plan:
    def carrying(self: Item[Any], payload: object, *, sent_at: float) -> Item[Any]:
        return Item(self.ticket, 0, payload, sent_at, self.tokens, self.batch_key)

    return [(Item, "carrying", carrying)]


@mutation
def rows_given_to_the_ticket_of_another_item() -> Plan:
    original = PostprocessStage._deliver

    def deliver(self: PostprocessStage[Any], items: Sequence[Item[Any]]) -> list[tuple[Ticket, float]]:
        turned = [
            Item(other.ticket, other.index, item.payload, other.sent_at, other.tokens, other.batch_key)
            for item, other in zip(items, [*items[1:], items[0]], strict=True)
        ]
        return original(self, turned)

    return [(PostprocessStage, "_deliver", deliver)]


@mutation
def answer_made_before_the_last_row() -> Plan:
    def deliver(self: Ticket, item: Item[object], numbers: int = 0) -> bool:
        if self.settled:
            return False
        self._rows[item.index] = item.payload
        self.timeline.tokens += item.tokens
        self._left = max(0, self._left - 1)
        if self._left == 1:
            self._left = 0
        return self._left == 0

    return [(Ticket, "deliver", deliver)]


@mutation
def tokens_of_the_usage_not_counted() -> Plan:
    original = Ticket.deliver

    def deliver(self: Ticket, item: Item[object], numbers: int = 0) -> bool:
        return original(self, replace(item, tokens=min(item.tokens, 5)), numbers)

    return [(Ticket, "deliver", deliver)]


# ---- custody and supervision ----


@mutation
def custody_settles_nothing() -> Plan:
    return [(Custody, "settle", lambda self, error: 0)]


@contextlib.contextmanager
def _custody_of_the_first(stage: str, tickets: Iterable[Ticket]) -> Iterator[Custody]:
    with supervise.custody(stage, list(tickets)[:1]) as held:
        yield held


@contextlib.contextmanager
def _custody_without_the_first(stage: str, tickets: Iterable[Ticket]) -> Iterator[Custody]:
    with supervise.custody(stage, list(tickets)[1:]) as held:
        yield held


@mutation
def custody_of_a_batch_covers_only_the_first_item() -> Plan:
    return [(batch_module, "custody", _custody_of_the_first)]


@mutation
def first_item_of_a_batch_not_in_custody() -> Plan:
    return [(batch_module, "custody", _custody_without_the_first)]


@mutation
def lists_that_are_taken_as_well_not_in_custody() -> Plan:
    return [(Custody, "take", _nothing)]


@mutation
def custody_never_lets_go() -> Plan:
    return [(Custody, "handed_on", _nothing)]


@mutation
def worker_not_restarted() -> Plan:
    async def run(self: Supervisor, worker: Callable[[], Awaitable[None]]) -> None:
        try:
            await worker()
        except Exception:  # noqa: BLE001  # the planted bug
            self._meter.crashes += 1

    return [(Supervisor, "run", run)]


@mutation
def crashes_never_counted_against_the_limit() -> Plan:
    def next_delay_s(self: Supervisor) -> float:
        self._meter.crashes += 1
        return 0.01

    return [(Supervisor, "_next_delay_s", next_delay_s)]


@mutation
def busy_workers_not_counted_down_after_a_crash() -> Plan:
    @contextlib.contextmanager
    def working(self: StageMeter) -> Iterator[None]:
        self.began(self.now())
        yield
        self.ended(self.now())

    return [(StageMeter, "working", working)]


@mutation
def broken_engine_says_so_only_when_all_calls_have_ended() -> Plan:
    async def supervised(self: Stage, worker: Callable[[], Awaitable[None]]) -> None:
        await self._supervisor.run(worker)

    return [(Stage, "_supervise", supervised)]


@mutation
def stage_behind_a_broken_one_counts_a_crash() -> Plan:
    original = Supervisor.run

    async def run(self: Supervisor, worker: Callable[[], Awaitable[None]]) -> None:
        async def wrapped() -> None:
            try:
                await worker()
            except anyio.BrokenResourceError as error:
                raise RuntimeError from error

        await original(self, wrapped)

    return [(Supervisor, "run", run)]


# ---- settling ----


@mutation
def leaving_does_not_settle() -> Plan:
    original = Ticket.fail

    def fail(self: Ticket, error: StagedPoolError) -> bool:
        return False if isinstance(error, Abandoned) else original(self, error)

    return [(Ticket, "fail", fail)]


@mutation
def last_writer_wins() -> Plan:
    def fail(self: Ticket, error: StagedPoolError) -> bool:
        self._error = error
        self._settle()
        return True

    return [(Ticket, "fail", fail)]


@mutation
def drain_without_a_sweep() -> Plan:
    original = FollowedRequests.fail_all

    def fail_all(self: FollowedRequests, message: str) -> None:
        if "before this request was done" not in message:
            original(self, message)

    return [(FollowedRequests, "fail_all", fail_all)]


@mutation
def no_sweep_of_what_closed_channels_still_held() -> Plan:
    original = FollowedRequests.fail_all

    def fail_all(self: FollowedRequests, message: str) -> None:
        if message != "The engine is stopped.":
            original(self, message)

    return [(FollowedRequests, "fail_all", fail_all), (Receiver, "close", lambda self: self._stream.close())]


@mutation
def broken_engine_sweeps_nothing() -> Plan:
    original = Lifecycle._break

    def break_(self: Lifecycle, error: Exception) -> None:
        if self.phase is not Phase.STOPPED:
            self._requests.fail_all = _nothing  # type: ignore[method-assign]
        original(self, error)

    return [(Lifecycle, "_break", break_)]


@mutation
def caller_waiting_to_enter_not_woken() -> Plan:
    original = FollowedRequests.fail_all

    def fail_all(self: FollowedRequests, message: str) -> None:
        with mock.patch.object(self, "_scopes", {}):
            original(self, message)

    return [(FollowedRequests, "fail_all", fail_all)]


@mutation
def closed_sender_not_understood() -> Plan:
    original = Sender._put

    def put(self: Sender[Any], message: Any, size: int) -> None:
        try:
            original(self, message, size)
        except anyio.ClosedResourceError as error:
            raise RuntimeError from error

    return [(Sender, "_put", put)]


@mutation
def two_drains_and_one_is_forgotten() -> Plan:
    async def wait_until_empty(self: FollowedRequests) -> None:
        self._empty = anyio.Event()  # even while another drain waits for the old one
        await original(self)

    original = FollowedRequests.wait_until_empty
    return [(FollowedRequests, "wait_until_empty", wait_until_empty)]


@mutation
def request_that_was_just_let_in_is_forgotten() -> Plan:
    async def admit(self: FollowedRequests, arriving: Any, *, waits: bool = False) -> Any:
        return await self._entrance.admit(arriving, waits=waits)

    return [(FollowedRequests, "_admit", admit)]


# ---- admission and deadlines ----


@mutation
def requests_admitted_while_draining() -> Plan:
    original = Lifecycle.check_open

    def check_open(self: Lifecycle) -> None:
        phase = self.phase
        if phase is Phase.DRAINING:
            self.phase = Phase.READY
        try:
            original(self)
        finally:
            self.phase = phase

    return [(Lifecycle, "check_open", check_open)]


@mutation
def callers_who_wait_are_rejected() -> Plan:
    def enter(self: Entrance, arriving: Arriving) -> Any:
        async def at_once() -> Reservation:
            return self.enter_nowait(arriving)

        return at_once()

    return [(Entrance, "enter", enter)]


@mutation
def a_departure_lets_nobody_in_who_waits() -> Plan:
    def leave(self: Entrance, reservation: Reservation, *, rejected: bool = False, **how: Any) -> None:
        self._admission.leave(reservation, **how)

    return [(Entrance, "leave", leave)]


@mutation
def callers_who_wait_are_forgotten_when_the_engine_stops() -> Plan:
    original = Entrance.grant

    def grant(self: Entrance) -> None:
        with contextlib.suppress(EngineStopped):
            self.check_open()
            original(self)

    return [(Entrance, "grant", grant)]


@mutation
def callers_who_leave_keep_their_place_in_the_queue() -> Plan:
    original = FairQueue.drop

    def drop(self: FairQueue[Any], entries: Iterable[Any]) -> None:
        if self._name != "entrance":
            original(self, entries)

    return [(FairQueue, "drop", drop)]


@mutation
def a_place_given_to_a_caller_who_leaves_is_kept() -> Plan:
    original = Entrance._withdraw

    def withdraw(self: Entrance, waiting: Any) -> None:
        if waiting.outcome is None:
            original(self, waiting)

    return [(Entrance, "_withdraw", withdraw)]


@mutation
def timeout_of_a_request_not_kept() -> Plan:
    original = Engine.submit

    async def submit(self: Engine, *args: Any, **kwargs: Any) -> Any:
        return await original(self, *args, **kwargs | {"timeout_s": math.inf})

    return [(Engine, "submit", submit)]


@mutation
def abandoned_items_not_dropped_when_a_batch_is_cut() -> Plan:
    original = ticket_check.should_process

    def should_process(ticket: Ticket, *args: Any, **kwargs: Any) -> bool:
        return isinstance(ticket.error, Abandoned) or original(ticket, *args, **kwargs)

    return [(batch_module, "should_process", should_process)]


@mutation
def expired_items_not_dropped_before_preprocess() -> Plan:
    def drop_settled(items: Sequence[Item[Any]], *_: object, **__: object) -> list[Item[Any]]:
        return [item for item in items if not isinstance(item.ticket.error, Abandoned)]

    return [(preprocess, "drop_settled", drop_settled)]


# ---- isolation ----


@mutation
def bisecting_fails_all() -> Plan:
    return [(batch_module, "run_isolated", _all_or_nothing)]


@mutation
def one_bad_input_fails_the_whole_preprocess_call() -> Plan:
    return [(preprocess, "run_isolated", _all_or_nothing)]


async def _all_or_nothing(
    run: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], payloads: Sequence[Any], *, stage: str, **options: Any
) -> list[Any]:
    try:
        return list(await run(payloads))
    except (OutOfMemory, DeviceLost):
        return await isolate.run_isolated(run, payloads, stage=stage, **options)
    except Exception as error:  # noqa: BLE001  # the planted bug
        return [isolate.failure(error, stage) for _ in payloads]


@mutation
def budget_never_lowered() -> Plan:
    return [(Budget, "out_of_memory", _nothing)]


@mutation
def budget_below_every_item_stays_there() -> Plan:
    original = Budget.observe

    def observe(self: Budget, tokens: int, seconds: float, *, was_limit: bool) -> None:
        if tokens <= self.tokens:
            original(self, tokens, seconds, was_limit=was_limit)

    return [(Budget, "observe", observe)]


@mutation
def budget_that_never_grows_back() -> Plan:
    return [(Budget, "observe", _nothing)]


@mutation
def budget_lowered_for_an_item_that_fails_alone() -> Plan:
    original = BatchStage._run

    async def run(self: BatchStage[Any, Any], batch: Any, execution: Any) -> Any:
        results = await original(self, batch, execution)
        if execution.out_of_memory:
            self._budget.out_of_memory(1)
            self._former.max_batch_tokens = self._budget.tokens
        return results

    return [(BatchStage, "_run", run)]


@mutation
def out_of_memory_tried_again_for_ever() -> Plan:
    original = isolate.run_isolated

    async def run_isolated(
        run: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], payloads: Sequence[Any], **options: Any
    ) -> list[Any]:
        async def stubborn(some: Sequence[Any]) -> Sequence[Any]:
            while True:
                try:
                    return await run(some)
                except OutOfMemory:
                    await anyio.sleep(0.1)

        return await original(stubborn, payloads, **options)

    return [(batch_module, "run_isolated", run_isolated)]


@mutation
def stop_waits_for_a_whole_bisection() -> Plan:
    return [(anyio.lowlevel, "checkpoint_if_cancelled", mock.AsyncMock())]


# ---- waiting work and the slot ----


@mutation
def room_in_the_channel_not_announced_to_those_who_are_fed() -> Plan:
    return [(Sender, "on_room", _nothing)]


@mutation
def freed_tokens_not_announced_to_those_who_are_fed() -> Plan:
    original = Engine.__init__

    def init(self: Engine, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._admission.in_flight.fed_tokens_freed = _nothing

    return [(Engine, "__init__", init)]


@mutation
def rounding_errors_look_like_something_that_is_fed() -> Plan:
    return [(accounting, "NEGLIGIBLE", -1.0)]


@mutation
def waiting_work_not_announced() -> Plan:
    async def fill(self: BatchStage[Any, Any]) -> None:
        async for items in self._receiver:
            with supervise.custody("batch", [item.ticket for item in items]) as held:
                if cached_items := self._take_in(items):  # and nobody is told
                    await self._sender.send(cached_items)
                held.handed_on()
        self._ended = True
        self._work_waits.notify_all()

    return [(BatchStage, "_fill_queue", fill)]


@mutation
def any_number_of_tokens_fed() -> Plan:
    return [(Reservation, "may_feed", lambda self, lane, inputs: True)]


@mutation
def batches_cut_ahead_without_end() -> Plan:
    original = BatchStage.__init__

    def init(self: BatchStage[Any, Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._tasks += 4

    return [
        (BatchStage, "__init__", init),
        (DeviceSlots, "may_go_ahead", True),
        (BatchFormer, "has_full_batch", True),
    ]


@mutation
def failed_forwards_count_as_running_for_ever() -> Plan:
    original = DeviceSlots.end

    def end(self: DeviceSlots, execution: Any, now: float) -> float:
        self.tokens += sys.exc_info()[0] is not None
        return original(self, execution, now)

    return [(DeviceSlots, "end", end)]


@mutation
def batch_that_went_ahead_takes_no_slot() -> Plan:
    original = DeviceSlots._begin

    def begin(self: DeviceSlots, execution: Any, now: float) -> None:
        original(self, execution, now)
        if execution.forwards:
            self._meter.ended(now)
            execution.mark = None

    return [(DeviceSlots, "_begin", begin)]


@mutation
def batch_keys_ignored() -> Plan:
    original = FairQueue.first

    def first(self: FairQueue[Any], should_keep: Any, like: Any = None) -> Any:
        return original(self, should_keep)

    return [(FairQueue, "first", first)]


@mutation
def tokens_not_given_back_to_the_tenant() -> Plan:
    def count(self: InFlight, reservation: Reservation, lane: Lane, tokens: float) -> None:
        for usage in reservation.counted_in if tokens > 0 else (self.total,):
            usage.tokens[lane] += tokens

    return [(InFlight, "_count", count)]


@mutation
def room_of_a_request_never_freed() -> Plan:
    original = InFlight.feed

    def feed(self: InFlight, usage: Any, lane: Lane, tokens: float) -> None:
        original(self, usage, lane, max(0, tokens))

    return [(InFlight, "feed", feed)]


@mutation
def token_budget_ignored() -> Plan:
    original: property = vars(BatchFormer)["budget"]
    return [(BatchFormer, "budget", property(lambda self: 2 * original.__get__(self)))]


# ---- the ends of streams ----


@mutation
def end_of_the_stream_not_passed_on_by_parse() -> Plan:
    return [(ParseStage, "close", lambda self: self._receiver.close())]


@mutation
def end_of_the_stream_not_passed_on_by_preprocess() -> Plan:
    return [(PreprocessStage, "close", lambda self: self._receiver.close())]


@mutation
def stray_cancellation_of_a_reader_ends_its_stream_in_silence() -> Plan:
    return [
        (rows, "user_code", lambda: _OpenForStrays(is_own_task=True)),
        (RowStream, "is_exhausted", property(lambda _: True, _nothing)),
    ]


class _OpenForStrays(UserCode):
    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not isinstance(error, anyio.get_cancelled_exc_class()):
            await super().__aexit__(kind, error, trace)


# ---- counting ----


@mutation
def limiter_token_leaked_when_a_call_fails() -> Plan:
    original = SimOffload._call

    async def call(self: SimOffload, *args: Any, **kwargs: Any) -> Any:
        try:
            return await original(self, *args, **kwargs)
        except Exception:
            self.limiter.acquire_on_behalf_of_nowait(object())
            raise

    return [(SimOffload, "_call", call)]


@mutation
def reservation_leaked_when_a_request_fails() -> Plan:
    original = Admission.leave

    def leave(self: Admission, reservation: Reservation, *, answered: bool = False, elsewhere_s: float = 0.0) -> None:
        if answered:
            original(self, reservation, answered=answered, elsewhere_s=elsewhere_s)

    return [(Admission, "leave", leave)]


@mutation
def estimates_not_corrected() -> Plan:
    return [(Reservation, "tokenized", _nothing)]


@mutation
def computed_tokens_still_count_as_in_flight() -> Plan:
    return [(Reservation, "computed", _nothing)]


@mutation
def callers_who_left_change_the_count() -> Plan:
    def computed(self: Reservation, lane: Lane, tokens: int) -> None:
        self._in_flight.total.tokens[lane] -= tokens

    return [(Reservation, "computed", computed)]


@mutation
def items_counted_twice() -> Plan:
    original = Admission.count_items

    def count_items(self: Admission, reservation: Reservation, inputs: Mapping[Lane, int]) -> None:
        original(self, reservation, inputs)
        self.in_flight.total.items += 1

    return [(Admission, "count_items", count_items)]


# ---- lanes and feeders ----


@mutation
def lists_of_both_lanes() -> Plan:
    return [(engine_stages, "_lane_of", lambda given: "text")]


@mutation
def several_images_in_one_call() -> Plan:
    original = LaneLimits.of

    def of(lane: Lane, config: EngineConfig, batch_tokens: int) -> LaneLimits:
        return replace(original(lane, config, batch_tokens), chunk_items=8)

    return [(LaneLimits, "of", staticmethod(of))]


@mutation
def tokens_of_images_counted_as_those_of_texts() -> Plan:
    original = Reservation.computed

    def computed(self: Reservation, lane: Lane, tokens: int) -> None:
        original(self, "text", tokens)

    return [(Reservation, "computed", computed)]


@mutation
def input_that_is_to_be_fetched_lost() -> Plan:
    original = ParseStage._run_feeder

    async def run_feeder(self: ParseStage[Any], ticket: Ticket, lanes: Any, elsewhere: Sequence[Any]) -> None:
        await original(self, ticket, lanes, elsewhere[1:])

    return [(ParseStage, "_run_feeder", run_feeder)]


@mutation
def inputs_fed_twice() -> Plan:
    original = FeedQueue.feed

    async def feed(self: FeedQueue[Any], ticket: Ticket, inputs: Sequence[Any]) -> None:
        await original(self, ticket, [*inputs, inputs[0]])

    return [(FeedQueue, "feed", feed)]


@mutation
def rest_of_a_large_request_not_fed() -> Plan:
    original = FeedQueue.feed

    async def feed(self: FeedQueue[Any], ticket: Ticket, inputs: Sequence[Any]) -> None:
        await original(self, ticket, inputs[: self._chunk_items])

    return [(FeedQueue, "feed", feed)]


@mutation
def feeders_of_settled_requests_go_on() -> Plan:
    return [(Ticket, "on_settled", lambda self, call: contextlib.nullcontext())]


@mutation
def feeder_that_crashes_not_in_custody() -> Plan:
    return [(parse_module, "custody", _custody_of_nobody)]


@contextlib.contextmanager
def _custody_of_nobody(stage: str, tickets: Iterable[Ticket]) -> Iterator[Custody]:
    with supervise.custody(stage, ()) as held:
        yield held


@mutation
def fetch_runs_on_after_the_caller_has_left() -> Plan:
    original = ImageCompleter._fetch_one

    async def fetch_one(self: ImageCompleter, *args: Any) -> None:
        with anyio.CancelScope(shield=True):
            await original(self, *args)

    return [(ImageCompleter, "_fetch_one", fetch_one)]


@mutation
def failure_of_a_fetch_not_told() -> Plan:
    async def fetch_one(self: ImageCompleter, item: Item[Any], images: list[Any], place: int, *_: Any) -> None:
        try:
            images[place] = await self._fetch(images[place])
        except Exception:  # noqa: BLE001  # the planted bug
            await anyio.sleep_forever()

    return [(ImageCompleter, "_fetch_one", fetch_one)]


@mutation
def fetched_images_put_in_each_others_places() -> Plan:
    original = ModelInput.with_images

    def with_images(self: ModelInput, images: Sequence[Any]) -> ModelInput:
        return original(self, list(images)[::-1])

    return [(ModelInput, "with_images", with_images)]


@mutation
def fetches_without_a_limit() -> Plan:
    original = ImageCompleter.__init__

    def init(self: ImageCompleter, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs | {"limit": 1000})

    return [(ImageCompleter, "__init__", init)]


@mutation
def settled_ticket_wakes_its_caller_late() -> Plan:
    original = Ticket.wait_settled

    async def wait_settled(self: Ticket) -> None:
        await original(self)
        await anyio.sleep(0.05)

    return [(Ticket, "wait_settled", wait_settled)]


@mutation
def first_lane_to_end_closes_postprocess() -> Plan:
    return [(Sender, "clone", lambda self: self)]


@mutation
def ends_for_the_lanes_not_closed() -> Plan:
    return [(BatchStage, "close", lambda self: self._receiver.close())]


# ---- items that are the same work ----


@mutation
def followers_lost_when_the_leader_leaves() -> Plan:
    return [(Coalescer, "requeue_followers", _nothing)]


@mutation
def followers_lost_when_the_worker_of_the_leader_crashes() -> Plan:
    def custody_of(self: BatchStage[Any, Any], batch: Any) -> Any:
        return supervise.custody(self.meter.name, [item.ticket for item in batch.items])

    return [(BatchStage, "_custody", custody_of)]


@mutation
def row_of_another_key() -> Plan:
    original = Identities.of

    def of(self: Identities, payload: Any) -> bytes:
        return original(self, replace(payload, ids=payload.ids[:1]) if isinstance(payload, TokenSequence) else payload)

    return [(Identities, "of", of)]


@mutation
def kept_row_of_another_key() -> Plan:
    original = ResultCache.get

    def get(self: ResultCache, identity: bytes, payload: Any) -> Any:
        return original(self, next(iter(self._kept), identity), payload)

    return [(ResultCache, "get", get)]


@mutation
def rows_shared_between_tenants() -> Plan:
    original = SharingScopes.scope

    def scope(self: SharingScopes, tenant: Any, salt: str | None) -> Any:
        return original(self, None, salt)

    return [(SharingScopes, "scope", scope)]


@mutation
def rows_shared_between_salts() -> Plan:
    original = SharingScopes.scope

    def scope(self: SharingScopes, tenant: Any, salt: str | None) -> Any:
        return original(self, tenant, None)

    return [(SharingScopes, "scope", scope)]


@mutation
def followers_still_count_as_in_flight() -> Plan:
    return [(Reservation, "adjust_tokens", _nothing)]


@mutation
def tokens_of_an_heir_not_counted_again() -> Plan:
    original = Reservation.adjust_tokens

    def adjust_tokens(self: Reservation, lane: Lane, tokens: int) -> None:
        original(self, lane, max(tokens, 0))

    return [(Reservation, "adjust_tokens", adjust_tokens)]


@mutation
def row_given_to_the_leader_only() -> Plan:
    original = Coalescer.end_group

    def end_group(self: Coalescer[Any], item: Item[Any]) -> Sequence[Item[Any]]:
        original(self, item)
        return ()

    return [(Coalescer, "end_group", end_group)]


@mutation
def group_of_a_lost_leader_still_joined() -> Plan:
    def end_group(self: Coalescer[Any], item: Item[Any]) -> Sequence[Item[Any]]:
        if (group := self._groups.pop(item, None)) is None:
            return ()
        self.following -= len(group.followers)
        return group.followers

    return [(Coalescer, "end_group", end_group)]


@mutation
def followers_not_in_custody() -> Plan:
    original = BatchResults.settle

    def settle(self: BatchResults[Any, Any], batch: Any, results: Any, execution: Any, held: Custody) -> Any:
        tickets = set(held._tickets)
        done = original(self, batch, results, execution, held)
        held._tickets &= tickets
        return done

    return [(BatchResults, "settle", settle)]


@mutation
def calls_that_hang_hold_the_end_of_the_engine() -> Plan:
    async def leave_hanging_calls(self: Lifecycle) -> None:
        await anyio.lowlevel.checkpoint()

    return [(Lifecycle, "_leave_hanging_calls", leave_hanging_calls)]


# ---- connections of HTTP ----


@mutation
def what_arrives_at_the_deadline_of_a_connection_is_dropped() -> Plan:
    original = Connection._receive_next

    async def next_(self: Connection) -> bytes | None:
        given = await original(self)
        late = self._service.time() >= self._deadline
        return b"" if given and late and not self._has_request else given

    return [(Connection, "_receive_next", next_)]


@mutation
def iteration_held_while_one_waits_for_its_client() -> Plan:
    async def receive_body(self: Connection, fast_path: Any, request: Any) -> bool:
        async with self._server_state._iterations:
            return bool(await original(self, fast_path, request))

    original = Connection._receive_body
    return [
        (Connection, "_receive_body", receive_body),
        (ServerState, "wait_for_iteration", lambda self: anyio.lowlevel.checkpoint()),
    ]


@mutation
def client_that_leaves_not_noticed_before_its_answer() -> Plan:
    original = Connection._receive_next

    async def next_(self: Connection) -> bytes | None:
        if self._has_request:
            await anyio.sleep(1.0)
        return await original(self)

    return [(Connection, "_receive_next", next_)]


@mutation
def what_comes_behind_a_request_is_lost() -> Plan:
    original = FastPath.read

    def read(self: FastPath, data: bytes, client: Any = None) -> Any:
        request = original(self, data, client)
        if request is not None:
            request.rest = b""
        return request

    return [(FastPath, "read", read)]


@mutation
def client_that_does_not_read_is_waited_for_for_ever() -> Plan:
    original = ServerState.timeout

    def timeout(self: ServerState, seconds: float) -> Any:
        return original(self, 10**6)

    return [(ServerState, "timeout", timeout)]


OF_CONNECTIONS = frozenset(list(MUTATIONS)[-5:])
"""Mutations that worlds of connections notice."""


# ---- code of users and its boundary ----


@mutation
def panic_of_a_worker_is_no_crash() -> Plan:
    return [(supervise, "user_code", contextlib.nullcontext)]


@mutation
def panic_of_a_worker_leaves_its_items_in_custody() -> Plan:
    original = Custody.__exit__

    def leave(self: Custody, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, Exception | anyio.get_cancelled_exc_class()):
            original(self, kind, error, trace)

    return [(Custody, "__exit__", leave)]


@mutation
def decoders_of_callers_have_no_boundary() -> Plan:
    return [(parse_module, "user_code", contextlib.nullcontext)]


@mutation
def encoders_of_callers_have_no_boundary() -> Plan:
    return [(postprocess_module, "user_code", contextlib.nullcontext)]


@mutation
def stopped_workers_count_as_crashed() -> Plan:
    return [(user_code_module, "was_asked_for", lambda _: False), (supervise, "was_asked_for", lambda _: False)]
