"""A world: settings, requests and faults as one plain JSON value.

Every field has a default, and a world of defaults is *plain*: one request of one short text to an engine with room for
everything. `to_json` writes only what deviates from that, so the JSON of a world is the list of its deviations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.supervise import RestartPolicy

ItemFault = Literal["invalid", "preprocess raises", "forward raises", "nan", "out of memory"]
CodecFault = Literal["raises", "rejects", "panics", "strays"]
"""`strays` raises the cancellation of another event loop, as `asyncio.run` in a thread does."""

BUGS: tuple[CodecFault, ...] = ("raises", "panics", "strays")
"""Faults of a codec that are no error for the caller."""

FetchFault = Literal["unusable", "unavailable", "raises"]
Task = Literal["embed", "sparse", "multi_vector", "several", "score", "rerank", "classify"]
"""Task of a client; `several` is all vectors of one forward."""
Phase = Literal["before", "after"]
Kind = Literal["dense", "all", "sparse", "late", "cross", "labels"]
"""Output of the model: dense vectors, all three kinds, one of the other two, a pair's score, labels."""
End = Literal["quiet", "leave", "raise", "cancel", "native cancel"]
"""The end of the engine's block. After everything is done; or at some moment by leaving it, by an error or a scope of
the host, or by asyncio's own cancellation of the host's task."""

TASKS: Mapping[Kind, tuple[Task, ...]] = {
    "dense": ("embed", "score", "rerank"),
    "all": ("embed", "sparse", "multi_vector", "several"),
    "sparse": ("sparse", "score"),
    "late": ("multi_vector", "rerank"),
    "cross": ("score", "rerank", "classify"),
    "labels": ("classify",),
}
"""Tasks of each kind of model."""

Name: TypeAlias = tuple[int, int]
"""Content of an item: the number of the client that sent it first, and its place there."""

TICK_S = 0.001

SHARED_CORES = 2

PLAIN: Mapping[str, Any] = {
    "preprocess_limit": 2,
    "image_preprocess_limit": 2,
    "max_batch_tokens": 100,
    "max_batch_items": 16,
    "chunk_items": 4,
    "waiting_tokens": 1000,
    "target_delay_s": 1000.0,
    "watchdog_s": 5.0,
    "preprocess_alarm_s": 20.0,
}
"""Settings of a plain world, where they are not the engine's own defaults."""


@dataclass(slots=True)
class FetchPlan:
    """One image, given as a URL."""

    place: int = 0
    """Place of the image in its item."""
    takes_s: float = 0.0
    fault: FetchFault | None = None


@dataclass(slots=True)
class ItemPlan:
    """One input of a request. All items of a world that say the same are alike: see `World`."""

    tokens: int = 1
    """Tokens."""
    key: str | None = None
    fault: ItemFault | None = None
    images: int = 0
    """Images of the item. None: a text. One: an image alone. Several: a conversation with images."""
    fetches: list[FetchPlan] = field(default_factory=list, metadata={"of": FetchPlan})
    parts: int = 1
    """Number of parts that preprocess cuts it into, if the model allows that."""
    says: Name | None = None
    """Content of the item. None: unique, made of its client's number and its place."""

    @property
    def lane(self) -> Lane:
        return "image" if self.images else "text"

    @property
    def urls(self) -> Mapping[int, FetchPlan]:
        """Fetches of it, by the place of the image."""
        return {fetch.place: fetch for fetch in self.fetches if fetch.place < self.images}


@dataclass(slots=True, kw_only=True)
class ClientPlan:
    """One caller. Times are virtual seconds since the start; `math.inf` is never."""

    number: int = 0
    arrives_at: float = 0.0
    items: list[ItemPlan] = field(default_factory=lambda: [ItemPlan()], metadata={"of": ItemPlan})
    task: Task = "embed"
    queries: int = 1
    """Number of items that are queries, where the task compares them with the others."""
    size: int | None = None
    """Bytes of its body. None: four for each token."""
    timeout_s: float = math.inf
    host_timeout_s: float = math.inf
    """Timeout of a scope around the call, in seconds."""
    leaves_at: float = math.inf
    native: bool = False
    """On asyncio, it is cancelled by `Task.cancel` rather than by a scope."""
    decode: CodecFault | None = None
    encode: CodecFault | None = None
    bulk: bool = False
    tenant: str | None = None
    salt: str | None = None
    """The request's `cache_salt`."""
    waits: bool = False
    """It waits for room instead of being rejected."""
    tokenizes: bool = False
    """It calls `tokenize` and not `submit`."""
    streams: bool = False
    """It calls `stream`, and takes `reads_s` for each of its results."""
    reads_s: float = 0.0
    gives: CodecFault | None = None
    """The error of its function that takes results, the first time."""
    phase: Phase | None = None
    """The group it belongs to, in a world that compares throughput before and after trouble."""

    @property
    def priority(self) -> Priority:
        return Priority.BULK if self.bulk else Priority.INTERACTIVE

    @property
    def body_bytes(self) -> int:
        return 4 * sum(item.tokens for item in self.items) if self.size is None else self.size

    @property
    def compares(self) -> bool:
        """True if its items are queries and documents."""
        return self.task in ("score", "rerank")


@dataclass(slots=True)
class Trouble:
    """An event at the `count`-th visit of a channel's point, see `seams`."""

    point: str = "batch.sending"
    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Call:
    """The fate of one call of a thread, the `count`-th of its kind."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Drain:
    at: float = 0.0
    timeout_s: float = 0.0


@dataclass(kw_only=True)
class World:
    """One run. Items that say the same are made alike when a world is read, as the first of them is."""

    seed: int = 0
    """Seed of the order of tasks and of the times of calls."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the engine that differ from `PLAIN`."""
    max_crashes: int = 8
    first_delay_s: float = 0.001
    parse_workers: int = 2
    postprocess_workers: int = 2
    model: Kind = "dense"
    width: int = 4
    """Numbers of a dense vector; all but four are 0."""
    pads: bool = False
    splits: bool = False
    """The model cuts long inputs into parts."""
    lanes: list[Lane] = field(default_factory=lambda: ["text"])
    slots: int = 1
    """Batches on the device at once, of each lane."""
    shares_cores: bool = False
    """Forwards compute on the cores that preprocess uses, `SHARED_CORES` of them."""
    clients: list[ClientPlan] = field(default_factory=list, metadata={"of": ClientPlan})
    crashes: list[Trouble] = field(default_factory=list, metadata={"of": Trouble})
    delays: list[Trouble] = field(default_factory=list, metadata={"of": Trouble})
    leaves: list[Trouble] = field(default_factory=list, metadata={"of": Trouble})
    """Client of the message leaves at the moment that it is handed over."""
    lates: list[Trouble] = field(default_factory=list, metadata={"of": Trouble})
    """Messages that are held until the deadline of their client, if it is near."""
    yields: bool = False
    """Each point of a channel lets the other tasks run."""
    preprocess_ticks: int = 0
    device_ticks: int = 0
    codec_ticks: int = 0
    """Most ticks of a codec call; its contents decide how many it takes."""
    forward_s: float = 0.0
    """Seconds of each forward and of each of its tokens, beyond `device_ticks`."""
    token_s: float = 0.0
    align_ticks: int = 0
    """Calls end at multiples of these ticks alone. So several end in one iteration of the event loop."""
    slow_preprocess: list[Call] = field(default_factory=list, metadata={"of": Call})
    slow_device: list[Call] = field(default_factory=list, metadata={"of": Call})
    """Calls with a time of their own."""
    posted_late: list[Call] = field(default_factory=list, metadata={"of": Call})
    """Delays before the event loop learns of the end of a device or preprocess call."""
    lost_at_call: int | None = None
    """Number of the call at which the device raises `DeviceLost`."""
    out_of_memory_above: int | None = None
    """Maximum payloads of one forward while memory is short."""
    memory_short_from: float = 0.0
    memory_short_until: float = math.inf
    """Time until which the device has no room for more than `out_of_memory_above` payloads."""
    drains: list[Drain] = field(default_factory=list, metadata={"of": Drain})
    end: End = "quiet"
    ends_at: float = 0.0
    liveness: bool = False
    """Nothing goes wrong, so waits are held to bounds that follow from service times."""
    neighbour: World | None = None
    """Another engine, of which this one borrows the device and the threads. Its own settings of these do not count."""

    @functools.cached_property
    def config(self) -> EngineConfig:
        return EngineConfig(**{**PLAIN, **self.settings})

    @property
    def restarts(self) -> RestartPolicy:
        return RestartPolicy(max_crashes=self.max_crashes, window_s=60.0, first_delay_s=self.first_delay_s)

    @functools.cached_property
    def by_number(self) -> Mapping[int, ClientPlan]:
        return {client.number: client for client in self.clients}

    @functools.cached_property
    def contents(self) -> Mapping[Name, ItemPlan]:
        """Content of each name, made equal by `alike`."""
        contents: dict[Name, ItemPlan] = {}
        for client in self.clients:
            for index, item in enumerate(client.items):
                contents.setdefault(said(client, index), item)
        return contents

    @property
    def is_hostile(self) -> bool:
        """True if the world has a fault that no request causes."""
        return bool(
            self.crashes or self.slow_preprocess or self.slow_device or self.drains or self.end != "quiet"
            or self.lost_at_call is not None or self.out_of_memory_above is not None
        )  # fmt: skip


def work_of(world: World, phase: Phase) -> list[tuple[float, list[int]]]:
    """Return the clients' arrivals in a phase, from the first on, and their items' tokens."""
    clients = [client for client in world.clients if client.phase == phase]
    first_at = min((client.arrives_at for client in clients), default=0.0)
    return [(round(client.arrives_at - first_at, 6), [item.tokens for item in client.items]) for client in clients]


def said(client: ClientPlan, index: int) -> Name:
    """Return the content of an item."""
    says = client.items[index].says
    return (client.number, index) if says is None else says


def alike(world: World) -> World:
    """The world, with items alike that say the same: they are the same work, and the model knows them by it."""
    for client in world.clients:
        for index, item in enumerate(client.items):
            first = world.contents[said(client, index)]
            item.tokens, item.key, item.fault, item.images, item.parts = (
                first.tokens, first.key, first.fault, first.images, first.parts,
            )  # fmt: skip
    return world


# ---- JSON ----


def to_json(value: Any) -> dict[str, Any]:
    """Return the parts of a world that differ from a plain one."""
    made: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        has, default = getattr(value, each.name), _default(each)
        if has == default or (each.name == "neighbour" and has is None):
            continue
        made[each.name] = _plain(has)
    return made


def _plain(has: Any) -> Any:
    if dataclasses.is_dataclass(has):
        return to_json(has)
    if isinstance(has, list | tuple):
        return [_plain(one) for one in has]
    return dict(has) if isinstance(has, Mapping) else has


def _default(each: dataclasses.Field[Any]) -> Any:
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    return each.default


def from_json(given: Mapping[str, Any]) -> World:
    """The world that a JSON value describes.

    Raises:
        ValueError: It does not describe one; the message says why.
    """
    world = alike(read_part(World, given))
    numbers = [client.number for client in world.clients]
    if len(set(numbers)) < len(numbers):
        raise ValueError("two clients have the same number")
    if any(not client.items or client.arrives_at < 0 for client in world.clients):
        raise ValueError("a client has no items, or comes before the start")
    if any(item.tokens < 1 or item.parts < 1 for item in world.contents.values()):
        raise ValueError("an item has no tokens, or no parts")
    if any(item.says is not None and len(item.says) != 2 for client in world.clients for item in client.items):
        raise ValueError("an item says what a client has said at a place")
    if any(item.lane not in world.lanes for client in world.clients for item in client.items):
        raise ValueError("the model reads no items of this lane")
    for client in world.clients:
        if client.task not in TASKS[world.model]:
            raise ValueError(f"a model of kind {world.model} does not {client.task}")
        if client.compares and world.model != "cross" and client.queries not in (1, len(client.items) / 2):
            raise ValueError("a client has one query, or as many as documents")
        if client.compares and world.model != "cross" and len(client.items) < 2:
            raise ValueError("a client has no documents")
    if work_of(world, "before") != work_of(world, "after"):
        raise ValueError("the same must be asked for before and after the trouble")
    if world.out_of_memory_above == 0:
        raise ValueError("the device has room for a payload at least")
    if min(world.parse_workers, world.postprocess_workers, world.slots, world.width // 4) < 1 or not world.lanes:
        raise ValueError("there must be workers, slots, lanes, and four numbers in a vector")
    return world


def read_part(of: type[Any], given: Mapping[str, Any]) -> Any:
    """Read a part of a world from its JSON."""
    known = {each.name: each for each in dataclasses.fields(of)}
    if unknown := given.keys() - known.keys():
        raise ValueError(f"{of.__name__} has no {', '.join(sorted(unknown))}")
    made = {}
    for name, value in given.items():
        part = known[name].metadata.get("of", World if name == "neighbour" else None)
        if part is not None:
            made[name] = read_part(part, value) if name == "neighbour" else [read_part(part, one) for one in value]
        else:
            made[name] = tuple(value) if name == "says" and value is not None else value
    return of(**made)


def shown(world: World) -> str:
    """The JSON of a world, for a reader and for `--world`."""
    return json.dumps(to_json(world), ensure_ascii=False)
