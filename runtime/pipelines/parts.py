"""Parts: the values of the items that an expanding stage makes of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Mapping, Set
from contextlib import aclosing, closing, nullcontext
from itertools import islice
from typing import Any, Final, TypeAlias

from staged_pool.runtime.pipelines.declaration import PipelineStage
from staged_pool.stages.errors import StageFailed, TooLarge
from staged_pool.stages.offload import Offload

Parts: TypeAlias = tuple[object, ...]
"""Values of the items that a stage makes of one, at most `max_items`."""

NO_LISTS: Final = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Types whose iteration gives no parts, or gives them in any order."""


class Expansion:
    """Takes the parts of the values of a stage: at most `max_items`, and one more to know that there are too many.

    An iterator is code of a user, which may block: it runs in a thread. An asynchronous one is awaited. All methods
    raise `TooLarge` if there are too many parts, `StageFailed` if the value is no list, and the error of an iterator.

    Args:
        stage: A stage with `expand`.
        offload: Runs iterators.
    """

    def __init__(self, stage: PipelineStage, offload: Offload) -> None:
        self._stage = stage
        self._offload = offload

    async def of(self, value: object) -> Parts:
        """Return the parts of a value that is known to the event loop."""
        found = self._list_in(value)
        if isinstance(found, AsyncIterable):
            return await self._awaited(found)
        return self._taken(found) if isinstance(found, list | tuple) else await self._offload(self._taken, found)

    def in_thread(self, value: object) -> Parts | AsyncIterable[object]:
        """Return the parts of a value in the thread of its function; what must be awaited is for `rest`."""
        found = self._list_in(value)
        return found if isinstance(found, AsyncIterable) else self._taken(found)

    async def rest(self, found: Parts | AsyncIterable[object]) -> Parts:
        """Return the parts that `in_thread` has found."""
        return await self._awaited(found) if isinstance(found, AsyncIterable) else found

    def _list_in(self, value: Any) -> Iterable[object] | AsyncIterable[object]:
        name = self._stage.expand
        if isinstance(name, str):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if isinstance(value, Iterable | AsyncIterable) and not isinstance(value, NO_LISTS):
            return value
        what = f"in `{name}`, " if isinstance(name, str) else ""
        message = f"The stage expands its value, which must be a list, {what}not of type {type(value).__name__}."
        raise StageFailed(message, stage=self._stage.name)

    def _taken(self, found: Iterable[object]) -> Parts:
        values = iter(found)
        with closing(values) if isinstance(values, Generator) else nullcontext():
            return self._checked(tuple(islice(values, self._stage.max_items + 1)))

    async def _awaited(self, found: AsyncIterable[object]) -> Parts:
        parts: list[object] = []
        async with aclosing(found) if isinstance(found, AsyncGenerator) else nullcontext():
            async for part in found:
                parts.append(part)
                if len(parts) > self._stage.max_items:
                    break
        return self._checked(tuple(parts))

    def _checked(self, parts: Parts) -> Parts:
        if len(parts) > (most := self._stage.max_items):
            raise TooLarge(f"The stage made more than {most} items of one (`max_items`).")
        return parts
