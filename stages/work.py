"""The values that travel: what a caller wants, what an item carries, what a batch is. All frozen."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from staged_pool.stages.ticket import Ticket

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
Q = TypeVar("Q")

MODEL_MAX = -1
"""For `TextInput.max_tokens`: cut at the longest input that the model takes."""


@dataclass(frozen=True, slots=True)
class TextInput:
    """One text, or the token ids of one text, as the caller sent it."""

    source: str | tuple[int, ...]
    """A text, which is tokenized here; or token ids, which are taken as they are (no special tokens added)."""

    max_tokens: int | None = None
    """Cut to this many tokens, special tokens included. `MODEL_MAX`: as many as the model takes.
    None: never cut; an input longer than the model takes is refused."""

    truncate_side: Literal["left", "right"] = "right"
    """Which end is cut off when `max_tokens` cuts."""

    add_special_tokens: bool = True
    """Whether the tokenizer adds the tokens that the model was trained with (such as [CLS] and [SEP])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller wants: one output for each input, in their order."""

    inputs: tuple[TextInput, ...]

    model: str | None = None
    """The served name that the caller asked for; None and "" mean the one that is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(Request):
    """One vector for each input."""

    dimensions: int | None = None
    """Keep the first so many values of each vector, and normalise it again. None: all of them."""

    normalize: bool = True
    """False returns vectors as pooled, also where the model normalises them."""


@dataclass(frozen=True, slots=True)
class Prepared(Generic[P_co]):
    """What preprocess makes of one input."""

    payload: P_co
    cost: int
    """Tokens, at least 1."""
    batch_key: Hashable = None
    """Only items with equal keys may share a batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Item(Generic[P_co]):
    """One unit of work of a request, with what it carries now. Each stage makes a new one."""

    ticket: Ticket
    index: int
    """Which of the request's inputs it came from."""
    payload: P_co
    sent_at: float
    """When it was handed to the channel that it waits in, on the clock of the stages, in seconds."""
    cost: int = 0
    batch_key: Hashable = None

    def carrying(self, payload: Q, *, sent_at: float) -> Item[Q]:
        """The same unit of work with what the next stage is to work on."""
        return Item(self.ticket, self.index, payload, sent_at, self.cost, self.batch_key)


class BatchTrigger(enum.StrEnum):
    """Why a batch was cut where it was."""

    DEMAND = "demand"
    """Everything that waited fitted: the device was free, and nothing is waited for."""
    SIZE = "size"
    """The next item would have exceeded the item limit."""
    COST = "cost"
    """The next item would have exceeded the token budget."""
    SHARE = "share"
    """What would have been next is left to the other slots, which are free."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[P_co]):
    """Items that go through the device together."""

    items: Sequence[Item[P_co]]
    trigger: BatchTrigger
    cost: int
    """Tokens that the device works on: the items' own, and padding where the model pads."""
