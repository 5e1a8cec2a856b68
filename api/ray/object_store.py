"""Ray's object store as the store of a line: arrays cross machines once, and processes of one machine never.

The end that puts a block owns it, and holds it until the peer says that it has it. Ray's public way to send a reference
is pickle, which pins the object for the life of its owner. So a reference travels as three plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from ray._private.worker import global_worker  # its public API has no reference without a pin; the version is pinned
from ray.core.generated.common_pb2 import Address

from staged_pool.runtime.remote.store import ArraysLost, joined
from staged_pool.stages.wire import Bytes, WireError

GET_S: Final = 60.0
"""Longest wait for a block, in seconds. One of another machine may come slowly."""

ID_BYTES: Final = 28
"""Length of the binary of a reference, and of the ids of its owner."""
MOST_OWNER_BYTES: Final = 1024
"""Longest address of the owner of a block, and longest state of the block. Both have about a hundred."""

_Reference: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Owner: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MOST_OWNER_BYTES)]

_names: Final = msgspec.msgpack.Decoder(tuple[_Reference, _Owner, _Owner])


@dataclass(slots=True)
class Received:
    """Count of the blocks that a replica has got."""

    blocks: int = 0
    bytes: int = 0


class ObjectStore:
    """See `ArrayStore`.

    Args:
        received: Counts the blocks that this end gets.
    """

    def __init__(self, received: Received | None = None) -> None:
        self._received = received or Received()
        self._held: dict[bytes, Any] = {}
        """References of the blocks that the peer has not freed, by name."""
        self._is_closed = False

    @property
    def held_blocks(self) -> int:
        """Blocks that this end has put, and the peer has not freed."""
        return len(self._held)

    async def put(self, parts: Sequence[Bytes]) -> bytes | None:
        """See `ArrayStore.put`."""
        try:
            name, reference = await anyio.to_thread.run_sync(_put, parts)
        except ray.exceptions.ObjectStoreFullError:
            return None
        if not self._is_closed:
            self._held[name] = reference
        return name

    async def get(self, name: bytes) -> NDArray[np.uint8]:
        """See `ArrayStore.get`."""
        try:
            binary, owner, status = _names.decode(name)
        except msgspec.MsgspecError as error:
            raise WireError(f"the peer refers to an object that cannot be read: {error}") from error
        _check_owner(owner)
        try:
            reference = ray.ObjectRef(binary, owner)
            global_worker.core_worker.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
        except (ValueError, TypeError, ray.exceptions.RayError) as error:
            raise WireError(f"the peer refers to an object that Ray does not take: {error}") from error
        try:
            with anyio.fail_after(GET_S):
                data = await reference
        except TimeoutError:
            raise ArraysLost(f"they have not come within {GET_S:g} s") from None
        except ray.exceptions.RayError as error:
            raise ArraysLost(f"{type(error).__name__} for an object of Ray's store") from None
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise WireError("the peer refers to an object that is no block of arrays")
        self._received.blocks += 1
        self._received.bytes += len(data)
        return data

    def free(self, name: bytes) -> None:
        """See `ArrayStore.free`."""
        if self._held.pop(name, None) is None:
            raise WireError("the peer gives back an object that this end does not hold")

    def close(self) -> None:
        """See `ArrayStore.close`."""
        self._is_closed = True
        self._held.clear()


def _check_owner(packed: bytes) -> None:
    """Check the address of a block's owner: Ray aborts a process that names one which it cannot read.

    Raises:
        WireError: It cannot be read, or its ids have another length.
    """
    try:
        owner = Address.FromString(packed)
    except Exception as error:  # that of protobuf, which comes with Ray
        raise WireError(f"the peer refers to an object whose owner cannot be read: {error}") from error
    if {len(owner.worker_id), len(owner.node_id)} != {ID_BYTES}:
        raise WireError("the peer refers to an object whose owner cannot be read: it has no ids")


def _put(parts: Sequence[Bytes]) -> tuple[bytes, Any]:
    reference = ray.put(joined(parts))
    _, owner, status = global_worker.core_worker.serialize_object_ref(reference)
    return msgspec.msgpack.encode((reference.binary(), owner, status)), reference
