"""The source of the items of a request: code of its caller, from which they are taken one by one."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Final, TypeAlias

from staged_pool.stages.user_code import user_code

Items: TypeAlias = Iterable[object] | AsyncIterable[object]

END: Final = object()
"""Stands behind the last item of a source."""


class Source:
    """Items of a request, as its caller gives them.

    Args:
        items: The items. A plain iterator runs on the event loop.
    """

    def __init__(self, items: Items) -> None:
        self._items = items
        self._iterator: Iterator[object] | AsyncIterator[object] | None = None

    async def next(self) -> object:
        """Take the next item; `END` if there is none.

        Raises:
            Panic: The caller's code let out a cancellation that no scope has asked for, or another `BaseException`.
            Exception: The caller's code has raised it.
        """
        async with user_code():
            if self._iterator is None:
                items = self._items
                self._iterator = aiter(items) if isinstance(items, AsyncIterable) else iter(items)
            if isinstance(self._iterator, AsyncIterator):
                return await anext(self._iterator, END)
            return next(self._iterator, END)
