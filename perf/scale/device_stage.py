"""The batch stage in virtual time: it decides with the product's own batch former, batch delay and service times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

from perf.scale.devices import Device
from perf.scale.events import Events, Station
from perf.scale.linear import Work
from staged_pool.stages.scheduling.batch_delay import BatchDelay
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import DeviceShare, ServiceTimeModel


@dataclass(slots=True, eq=False)
class Request:
    """A request in flight: a claim of the fair queue."""

    number: int
    front: int
    arrived_at: float
    left: int
    """Texts without a row."""
    priority: Priority = Priority.INTERACTIVE
    tenant: Hashable = None
    start_tags: dict[Hashable, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Text:
    """A text on its way: an entry of the fair queue."""

    ticket: Request
    tokens: int
    batch_key: Hashable = None


def work_of(texts: Sequence[Text]) -> Work:
    """Return the work of one batch, or of one call of preprocess."""
    return Work(0.0, len(texts), sum(text.tokens for text in texts), 1.0)


class DeviceStage:
    """The queue in front of a device, and the device.

    `BatchStage` is followed step by step: a batch starts when a slot is free, and takes what waits up to its budget; it
    waits for texts in preprocess where that is worth it; one full batch is handed over ahead. The event loop decides
    all that when it comes to it. So a busy loop finds more texts, and makes larger batches.

    Args:
        events: Virtual time.
        device: Slots, budgets and seconds of forwards.
        loop: Event loop that decides and hears of the ends of forwards.
        batch_s: Seconds of that loop for each batch.
        preparing: Returns the texts that preprocess works on.
        ready_s: Returns the seconds of a recent preprocess call.
        done: Takes the texts of a batch when the loop has heard of the end of its forward.
    """

    def __init__(
        self,
        events: Events,
        device: Device,
        *,
        loop: Station,
        batch_s: float,
        preparing: Callable[[], int],
        ready_s: Callable[[], float],
        done: Callable[[Sequence[Text]], object],
    ) -> None:
        self._events = events
        self._device = device
        self._loop = loop
        self._batch_s = batch_s
        self._preparing = preparing
        self._done = done
        self._former = BatchFormer[Text](
            max_items=device.most_items,
            max_batch_tokens=device.most_tokens,
            min_batch_tokens=device.least_tokens,
            pads=False,
            slots=device.slots,
        )
        self._service_time = ServiceTimeModel()
        self._delay = BatchDelay(self._service_time, ready_s, lambda: events.now)
        self._share = DeviceShare()
        self._looks = False
        """True while a decision waits for the loop."""
        self._handed_over: deque[tuple[Sequence[Text], float]] = deque()
        """Batches that the device has not begun, with their seconds."""
        self._running = self._ahead = self._running_tokens = 0
        """Batches that have a slot, and batches ahead, as far as the loop knows; tokens of all of them."""
        self.batches = 0
        self.texts = 0
        self.busy_s = 0.0
        """Seconds of all forwards so far; those of several slots add up."""

    def add(self, texts: Sequence[Text]) -> None:
        """Queue texts."""
        for text in texts:
            self._former.queue.add(text)
        self.look()

    def look(self) -> None:
        """Decide about the next batch, as soon as the loop is free."""
        if not self._looks:
            self._looks = True
            self._loop.submit(0.0, self._look)

    def _look(self) -> None:
        self._looks = False
        while (texts := self._cut()) is not None:
            work = work_of(texts)
            alone = not (self._running or self._ahead or self._former.queue or self._preparing())
            if self._running < self._device.slots:
                self._running += 1
            else:
                self._ahead += 1
            self._running_tokens += round(work.tokens)
            self._handed_over.append((texts, self._device.seconds(work, alone=alone)))
            self._begin()

    def _cut(self) -> Sequence[Text] | None:
        free = self._device.slots - self._running
        waiting = self._former.queue.waiting
        if not waiting.items or (free <= 0 and (self._ahead or not self._former.has_full_batch)):
            return None
        if free == 1 and (delay_s := self._delay.delay_s(waiting.items, waiting.tokens, self._preparing())):
            self._events.after(delay_s, self._delay_ends)
            return None
        self._delay.started()
        batch = self._former.take(lambda _: True, self._running_tokens)
        return None if batch is None else batch.items

    def _delay_ends(self) -> None:
        self._delay.over()
        self.look()

    def _begin(self) -> None:
        """Begin the forwards that the device has room for."""
        while self._handed_over and self._share.running < self._device.slots:
            texts, seconds = self._handed_over.popleft()
            self._events.after(seconds, partial(self._end, texts, self._share.begin(self._events.now)))
            self.batches += 1
            self.texts += len(texts)
            self.busy_s += seconds

    def _end(self, texts: Sequence[Text], began: tuple[float, float]) -> None:
        """End a forward: the device goes on at once, and the loop hears of it when it comes to it."""
        seconds = self._share.end(self._events.now, began)
        self._begin()
        self._loop.submit(self._batch_s, lambda: self._heard(texts, seconds))

    def _heard(self, texts: Sequence[Text], seconds: float) -> None:
        tokens = round(work_of(texts).tokens)
        self._service_time.observe(tokens, seconds)
        self._running_tokens -= tokens
        if self._ahead:
            self._ahead -= 1  # it has the slot now
        else:
            self._running -= 1
        self.look()
        self._done(texts)
