"""The stage behind the device in the engine process: it returns rows to the fronts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from staged_pool.runtime.payloads import Row
from staged_pool.runtime.remote.tickets import FrontTicket
from staged_pool.stages.channel import Receiver
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import custody
from staged_pool.stages.ticket import Item
from staged_pool.stages.ticket_check import drop_settled


class ReturnStage(Stage):
    """Stands in the engine process where postprocess stands in one process.

    Args:
        receiver: Lists of items with their rows, of any fronts. Closing its sender ends the stage.
        give: Sends the rows of one list, without waiting.
        options: See `StageOptions`.
    """

    def __init__(
        self,
        receiver: Receiver[Sequence[Item[Any]]],
        *,
        give: Callable[[Sequence[tuple[FrontTicket, Item[Row]]]], object],
        options: StageOptions,
    ) -> None:
        super().__init__("postprocess", workers=1, options=options)
        self._receiver = receiver
        self._give = give

    def close(self) -> None:
        """See `Stage.close`."""
        self._receiver.close()

    async def _work(self) -> None:
        async for items in self._receiver:
            with self.meter.working(), custody("postprocess", (item.ticket for item in items)) as held:
                wanted = drop_settled(items, self.meter, now=self._clock())
                self._give([(cast(FrontTicket, item.ticket), item) for item in wanted])
                self.meter.done += len(wanted)
                held.handed_on()
            del items, wanted  # their payloads may lie in memory of a front, and the next ones may be long in coming
