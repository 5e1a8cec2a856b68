"""Tickets settle once, and keep the rows of their request."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.stages.errors import Abandoned, EngineStopped
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Parts, Plan, Request
from tests.support.tickets import NoLoad

pytestmark = pytest.mark.anyio

PLAN: Plan[object] = Plan(("a", "b"), lambda rows, tokens: (list(rows), tokens))


pytestmark = pytest.mark.anyio


def a_ticket() -> Ticket:
    return Ticket(Request, lambda result: ("answer", result), NoLoad())


def a_row(ticket: Ticket, index: int, row: object, tokens: int, part: int = 0) -> Item[object]:
    return Item(ticket, index, row, 0.0, tokens, None, part)


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
    assert ticket.stage == "door", "metrics have it as a label"
    ticket.moved_to("parse", now=0.0)
    assert ticket.stage == "parse"
    ticket.moved_to("parse", 0, now=0.0)
    ticket.move(8, None, "preprocess_images", now=0.0)
    ticket.move(1, "preprocess_images", "batch_images", now=0.0)
    ticket.move(1, "batch_images", "postprocess", now=0.0)
    assert ticket.stage == "preprocess_images", "seven of eight are there"
    ticket.move(7, "preprocess_images", "batch_images", now=0.0)
    assert ticket.stage == "batch_images"
    ticket.move(7, "batch_images", "postprocess", now=0.0)
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
