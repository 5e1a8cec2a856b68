"""Credit: the bound of a channel whose receiving end is in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from staged_pool.stages.channel import Contents, Sender, SendStream
from staged_pool.stages.wire import WireError

T = TypeVar("T")


class CreditChannel(Generic[T]):
    """The sending half of a bounded channel that spans two processes.

    Its sender has the contract of any other: it waits for room, in order, behind earlier senders. The peer returns a
    credit for each message that leaves the receiving end, and a credit is room for one message. So senders wait for the
    receiving stage, and never for a socket.

    Args:
        name: Name of the receiving stage.
        capacity: Most messages that have left no receiving end yet.
        post: Sends a message to the peer, without waiting. Raises `anyio.BrokenResourceError` if the peer is gone; no
            credit is taken then.
    """

    def __init__(self, name: str, capacity: int, post: Callable[[T], object]) -> None:
        self._contents = Contents[T](name, capacity, lambda _: 1)
        self.sender = Sender[T](_Way(post), self._contents)

    @property
    def waiting(self) -> int:
        """Messages without a credit for them, and senders that wait for room."""
        return self._contents.waiting

    def give_back(self, credits: int) -> None:
        """Take credits from the peer.

        Raises:
            WireError: The peer returns more of them than it has.
        """
        if credits > (out := self._contents.messages):
            raise WireError(f"the peer returns {credits} credits of the {self._contents.name} stage, and has {out}")
        for _ in range(credits):
            self._contents.left(1)

    def reset(self) -> None:
        """Take all credits back: the peer is gone, and with it the receiving end."""
        self.give_back(self._contents.messages)


class _Way(SendStream[T]):
    """The way to the peer, for all clones of a sender."""

    def __init__(self, post: Callable[[T], object]) -> None:
        self._post = post

    def send_nowait(self, item: T) -> None:
        self._post(item)

    def clone(self) -> SendStream[T]:
        return self

    def close(self) -> None:
        """Do nothing: the owner of the link ends it."""
