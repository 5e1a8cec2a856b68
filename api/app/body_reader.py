"""Reading of request bodies by handlers: on the event loop, or in a thread if large."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from staged_pool.api.app.call import Call
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.wire import extract_images, inputs
from staged_pool.api.wire.exchange import Body
from staged_pool.api.wire.forms import read_form
from staged_pool.api.wire.json_bounds import check_bounds, is_small
from staged_pool.stages.offload import ThreadOffload

R = TypeVar("R")

INLINE_BYTES: Final = 32_768
"""Maximum bytes of a body decoded on the event loop, as in the parse stage."""


class BodyReader:
    """Reads bodies of one server, one large body at a time.

    Args:
        registry: The engines, for their limits.
        readers: Runs the reading of large bodies.
    """

    def __init__(self, registry: EngineRegistry, readers: ThreadOffload) -> None:
        self._registry = registry
        self._readers = readers

    async def json(self, call: Call, *, any_type: bool = False) -> Body:
        """Return the JSON body of a call, see `Call.json_body`.

        A body with more values than any model allows is rejected before it is decoded.
        """
        body = await call.json_body(any_type=any_type)
        await self.check_bounds(body, None)
        return body

    async def check_bounds(self, body: Body, boundary: bytes | None) -> None:
        """Reject a JSON body with too many values; the parts of a form are checked later, one by one."""
        limits = self._registry.limits
        if boundary is None and not is_small(body, limits):
            await self._readers(partial(check_bounds, limits=limits), body)

    async def read(self, decode: Callable[[Body], R], body: Body) -> R:
        """Decode a body, in a thread if it is large."""
        if len(body) <= INLINE_BYTES:
            return decode(body)
        return await self._readers(decode, body)

    async def peek(self, decode: Callable[[Body], R], body: Body) -> R:
        """Decode the short fields of a body; long texts and images are cut out first."""
        return await self.read(partial(extract_images.peek, decode), body)

    async def model_of(self, body: Body, boundary: bytes | None) -> str | None:
        """Return the model that a body names; None if it names none."""
        if boundary is None:
            return await self.peek(inputs.model_of, body)
        return await self.read(
            lambda form: inputs.model_of(read_form(form, boundary, self._registry.limits).json), body
        )
