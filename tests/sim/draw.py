"""The world of a seed, by swarm testing (Groce et al., 2012): each world has some of the features, and most have few.

A world with all of them hides one behind another. Each feature draws from numbers of its own, so that a new one leaves
the others as they were. Times lie on a grid, so that many things happen at the same moment and the scheduler decides
which is first. Most worlds are small: nearly every bug needs but a few requests that meet, and in the time of one large
world several small ones do. Sizes are log-uniform: each order of magnitude is as likely as the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from tests.sim.seams import CHANNELS, IMAGE_CHANNELS
from tests.sim.world import (
    BUGS,
    TASKS,
    TICK_S,
    Call,
    ClientPlan,
    CodecFault,
    Drain,
    FetchPlan,
    ItemFault,
    ItemPlan,
    Name,
    Trouble,
    World,
    alike,
)  # fmt: skip

T = TypeVar("T")

Feature = Callable[[random.Random, World], None]

FEATURES: dict[str, tuple[float, Feature]] = {}
"""By name: the part of the worlds that has it, and the function that adds it. Applied in this order."""

MOST_HANGING = 5
"""Fetches that hang: with one at a time, more of them would take a world longer than it may last."""

CROWD: Final = 100
"""Number of clients in a crowd."""

FAULTS: Final[tuple[ItemFault, ...]] = ("invalid", "preprocess raises", "forward raises", "nan", "out of memory")

STREAMABLE: Final = ("embed", "sparse", "multi_vector", "several", "score")


def draw(seed: int) -> World:
    """Return the world of a seed, always the same one."""
    rng = random.Random(seed)
    world = World(seed=seed)
    on = [name for name, (part, _) in FEATURES.items() if rng.random() < part]
    _draw_clients(random.Random(f"{seed} clients"), world)
    for name in on:
        FEATURES[name][1](random.Random(f"{seed} {name}"), world)
    world.__dict__.pop("config", None)
    return alike(world)


def feature(part: float) -> Callable[[Feature], Feature]:
    """Register a feature that a given part of the worlds has."""

    def register(function: Feature) -> Feature:
        FEATURES[function.__name__] = part, function
        return function

    return register


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Draw a whole number from `low` to `high`: each order of magnitude is equally likely."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


def some(rng: random.Random, *values: T) -> T:
    return rng.choice(values)


def ticks(rng: random.Random, most: int) -> float:
    return rng.randint(0, most) * TICK_S


def _draw_clients(rng: random.Random, world: World) -> None:
    """Draw the clients and their requests, and the settings that nearly every world has."""
    world.settings |= {
        "preprocess_limit": some(rng, 1, 1, 2, 4),
        "max_batch_tokens": log_uniform(rng, 4, 120),
        "max_batch_items": log_uniform(rng, 1, 16),
        "chunk_items": log_uniform(rng, 1, 8),
        "channel_capacity": log_uniform(rng, 1, 3),
        "waiting_tokens": log_uniform(rng, 1, 200),
        "drain_timeout_s": some(rng, 0.0, 0.003, 0.02, 1.0, 30.0),
        "preprocess_alarm_s": some(rng, 2.0, 20.0),
    }
    world.parse_workers = some(rng, 1, 1, 2, 3)
    world.postprocess_workers = some(rng, 1, 1, 2)
    world.preprocess_ticks = some(rng, 0, 1, 3, 8)
    world.device_ticks = some(rng, 0, 1, 3, 8)
    world.codec_ticks = some(rng, 0, 2, 5)
    world.slots = some(rng, 1, 1, 2, 2, 3)
    world.shares_cores = rng.random() < 0.7
    span = some(rng, 1, 3, 10, 30)
    largest = some(rng, 6, 6, 6, 40)
    most_items = log_uniform(rng, 1, 10)
    for number in range(log_uniform(rng, 2, 9)):
        items = [ItemPlan(log_uniform(rng, 1, largest)) for _ in range(rng.randint(1, most_items))]
        world.clients.append(ClientPlan(number=number, arrives_at=ticks(rng, span), items=items))


def span_of(world: World) -> int:
    """Ticks until the last client has come."""
    return round(max(client.arrives_at for client in world.clients) / TICK_S)


# ---- requests ----


@feature(0.03)
def crowd_of_many(rng: random.Random, world: World) -> None:
    """Many more clients than workers that parse."""
    large = rng.random() < 0.5
    world.clients = [
        ClientPlan(
            number=number,
            arrives_at=ticks(rng, 3),
            items=[ItemPlan(log_uniform(rng, 1, 6)) for _ in range(log_uniform(rng, 1, 12 if large else 2))],
        )
        for number in range(CROWD // 4 if large else CROWD)
    ]
    world.parse_workers = 3


@feature(0.25)
def other_tasks(rng: random.Random, world: World) -> None:
    world.model = some(rng, *TASKS)
    for client in world.clients:
        client.task = rng.choice(TASKS[world.model])
        if not client.compares or world.model == "cross":
            continue
        if len(client.items) < 2:
            client.items.append(ItemPlan(log_uniform(rng, 1, 6)))
        if len(client.items) % 2 == 0 and rng.random() < 0.3:
            client.queries = len(client.items) // 2


@feature(0.3)
def keys(rng: random.Random, world: World) -> None:
    for client in world.clients:
        for item in client.items:
            item.key = some(rng, "a", "b")


@feature(0.35)
def padding(_rng: random.Random, world: World) -> None:
    world.pads = True


@feature(0.1)
def parts(rng: random.Random, world: World) -> None:
    """Inputs that are cut into parts."""
    world.splits = True
    for client in world.clients:
        for item in client.items:
            item.parts = some(rng, 1, 1, 2, 3)


@feature(0.15)
def bodies(rng: random.Random, world: World) -> None:
    """Bodies of several sizes, in bytes; some are decoded in a thread."""
    for client in world.clients:
        client.size = some(rng, 0, 10, 40, 100, 40_000)
    if rng.random() < 0.4:  # one is decoded at a time, and callers wait in front of parse
        world.parse_workers, world.codec_ticks = 1, 20
        world.settings |= {"chunk_items": 1, "channel_capacity": 1}
        for client in world.clients:
            client.size = 40_000


@feature(0.07)
def tokenizers(rng: random.Random, world: World) -> None:
    for client in world.clients:
        client.tokenizes = rng.random() < 0.3


@feature(0.4)
def images(rng: random.Random, world: World) -> None:
    """Turn some texts into images."""
    if world.model in ("cross", "sparse"):  # these read texts
        return
    world.lanes = ["text", "image"] if rng.random() < 0.9 else ["image"]
    share = some(rng, 0.1, 0.5, 0.9) if "text" in world.lanes else 1.0
    mixed = rng.random() < 0.5
    for client in world.clients:
        shows = rng.random() < share
        for item in client.items:
            if rng.random() < share if mixed and "text" in world.lanes else shows or "text" not in world.lanes:
                item.images = some(rng, 1, 1, 1, 2, 3)
    world.settings["image_preprocess_limit"] = some(rng, 1, 1, 2)


@feature(0.6)
def urls(rng: random.Random, world: World) -> None:
    """Give some images as URLs."""
    share = some(rng, 0.3, 0.3, 1.0)
    slowest = some(rng, 0, 3, 20)
    for item in (item for client in world.clients for item in client.items):
        for place in range(item.images):
            if rng.random() < share:
                item.fetches.append(FetchPlan(place, ticks(rng, slowest)))
    world.settings["media_limit"] = some(rng, 1, 2, 16)


@feature(0.1)
def streams(rng: random.Random, world: World) -> None:
    """Callers that stream results and read them slowly."""
    reads_s = some(rng, 0.0, 0.001, 0.02)
    for client in world.clients:
        client.streams = client.task in STREAMABLE and rng.random() < 0.5
        client.reads_s = reads_s if client.streams else 0.0


@feature(0.5)
def repetitions(rng: random.Random, world: World) -> None:
    """Give some items the content of others."""
    share = some(rng, 0.1, 0.5, 0.9)
    originals: dict[str, list[Name]] = {"text": [], "image": []}
    for client in world.clients:
        for index, item in enumerate(client.items):
            said = originals[item.lane]
            if said and rng.random() < share:
                item.says = rng.choice(said[-4:])
            else:
                said.append((client.number, index))
    if rng.random() < 0.1:
        world.settings["coalesce"] = False
    if rng.random() < 0.6:
        world.settings["share_between_tenants"] = True


@feature(0.2)
def kept_rows(rng: random.Random, world: World) -> None:
    """A result cache; in some worlds its rows are so wide that old ones are evicted."""
    world.settings["result_cache_mb"] = 1
    world.width = some(rng, 4, 4, 60_000)


@feature(0.6)
def tenants(rng: random.Random, world: World) -> None:
    names = some(rng, ("a", "b"), ("a", "a", "a", "b"), (None, "a", "b", "c"))
    for client in world.clients:
        client.tenant = rng.choice(names)


@feature(0.4)
def bulk(rng: random.Random, world: World) -> None:
    share = some(rng, 0.2, 0.5, 1.0)
    for client in world.clients:
        client.bulk = rng.random() < share


@feature(0.15)
def salts(rng: random.Random, world: World) -> None:
    for client in world.clients:
        client.salt = some(rng, "salt", "pepper", None, None, None)


# ---- limits ----


@feature(0.2)
def tight_limits(rng: random.Random, world: World) -> None:
    for name, values in (
        ("max_requests", (3, 8)), ("max_items", (5, 20)), ("max_tokens", (20, 60)), ("max_bytes", (100, 400)),
        ("max_request_items", (6,)), ("target_delay_s", (0.005, 0.02, 0.1)),
    ):  # fmt: skip
        if rng.random() < 0.3:
            world.settings[name] = rng.choice(values)


@feature(0.06)
def target_batch_time(rng: random.Random, world: World) -> None:
    world.settings["target_batch_s"] = some(rng, 0.001, 0.003, 0.01)
    world.token_s = some(rng, 0.0, 0.0002)


@feature(0.3)
def timeouts(rng: random.Random, world: World) -> None:
    share = some(rng, 0.3, 0.7)
    for client in world.clients:
        if rng.random() < share:
            client.timeout_s = some(rng, 1, 2, 5, 10, 30, 200) * TICK_S


@feature(0.15)
def scopes_of_hosts(rng: random.Random, world: World) -> None:
    for client in world.clients:
        if rng.random() < 0.4:
            client.host_timeout_s = some(rng, 1, 2, 5, 10, 30) * TICK_S


@feature(0.35)
def leavers(rng: random.Random, world: World) -> None:
    share = some(rng, 0.3, 0.6)
    for client in world.clients:
        if rng.random() < share:
            client.leaves_at = client.arrives_at + some(rng, 0, 1, 2, 3, 5, 8, 15, 30) * TICK_S
            client.native = rng.random() < 0.5


# ---- what goes wrong ----


@feature(0.3)
def poison(rng: random.Random, world: World) -> None:
    share = some(rng, 0.03, 0.15)
    for client in world.clients:
        for item in client.items:
            if rng.random() < share:
                item.fault = rng.choice(FAULTS)


@feature(0.2)
def faulty_hosts(rng: random.Random, world: World) -> None:
    """Fetches that fail, or hang."""
    hanging = 0
    for fetch in (fetch for client in world.clients for item in client.items for fetch in item.fetches):
        if rng.random() < 0.1 and hanging < MOST_HANGING:
            hanging += 1
            fetch.takes_s, fetch.fault = 20.0, "unavailable"  # as every fetch that hangs, when its time is up
        elif rng.random() < 0.15:
            fetch.fault = rng.choice(("unusable", "unavailable", "raises"))


def _codec_fault(rng: random.Random, client: ClientPlan) -> CodecFault:
    fault: CodecFault = rng.choice(("raises", "rejects"))
    return fault if fault == "rejects" else BUGS[client.number % len(BUGS)]


@feature(0.1)
def codec_faults(rng: random.Random, world: World) -> None:
    for client in world.clients:
        if rng.random() < 0.15:
            client.decode = _codec_fault(rng, client)
        if rng.random() < 0.15:
            client.encode = _codec_fault(rng, client)


POINTS: Final = tuple(
    f"{channel}.{point}"
    for channel in (*CHANNELS, *IMAGE_CHANNELS)
    for point in ("receiving", "received", "sending", "sent")
    if not (channel.partition("_")[0] in ("parse", "preprocess") and point.startswith("sen"))  # no task waits there
)
CRASHES: Final = POINTS
DELAYS: Final = tuple(point for point in POINTS if not point.endswith(".received"))
RECEIVED: Final = tuple(point for point in POINTS if point.endswith(".received"))


def points(rng: random.Random, among: tuple[str, ...], world: World) -> tuple[str, ...]:
    """Draw one of these points, or all, in the lanes of the world."""
    known = tuple(point for point in among if "image" in world.lanes or "_images" not in point)
    return (rng.choice(known),) if rng.random() < 0.5 else known


@feature(0.3)
def crashes(rng: random.Random, world: World) -> None:
    among = points(rng, CRASHES, world)
    world.crashes = [Trouble(rng.choice(among), log_uniform(rng, 1, 9) - 1) for _ in range(log_uniform(rng, 1, 10))]
    if rng.random() < 0.3:
        world.crashes = [Trouble("clock", log_uniform(rng, 1, 300) - 1) for _ in range(log_uniform(rng, 1, 4))]
    world.max_crashes = some(rng, 0, 2, 8, 8, 8)
    world.first_delay_s = some(rng, 0.0, 0.001, 0.05)


@feature(0.25)
def delays(rng: random.Random, world: World) -> None:
    among = points(rng, DELAYS, world)
    world.delays = [
        Trouble(rng.choice(among), rng.randint(0, 9), some(rng, 1, 3, 10, 50) * TICK_S)
        for _ in range(log_uniform(rng, 1, 8))
    ]


@feature(0.15)
def leave_in_hand(rng: random.Random, world: World) -> None:
    """Callers that leave between a receive and the hand-over."""
    among = points(rng, RECEIVED, world)
    world.leaves = [Trouble(rng.choice(among), rng.randint(0, 9)) for _ in range(log_uniform(rng, 1, 5))]


@feature(0.1)
def handed_over_at_the_deadline(rng: random.Random, world: World) -> None:
    among = tuple(point for point in DELAYS if point.endswith(".sending"))
    world.lates = [Trouble(point, rng.randint(0, 5)) for point in points(rng, among, world)]
    for client in world.clients:
        if rng.random() < 0.5:
            client.timeout_s = min(client.timeout_s, some(rng, 5, 10, 30) * TICK_S)


@feature(0.2)
def yields(_rng: random.Random, world: World) -> None:
    world.yields = True


@feature(0.15)
def ends_in_one_iteration(rng: random.Random, world: World) -> None:
    world.align_ticks = some(rng, 2, 4, 10)


@feature(0.15)
def threads_told_late(rng: random.Random, world: World) -> None:
    world.posted_late = [Call(rng.randint(0, 7), some(rng, 1, 3, 10) * TICK_S) for _ in range(log_uniform(rng, 1, 8))]


@feature(0.15)
def slow_preprocess(rng: random.Random, world: World) -> None:
    world.slow_preprocess = [Call(rng.randint(0, 7), some(rng, 0.05, 1.0, 10.0)) for _ in range(some(rng, 1, 2, 4))]
    if rng.random() < 0.5:
        world.slow_preprocess.append(Call(rng.randint(0, 7), 100.0))  # hangs, until something lets go of it


@feature(0.15)
def slow_device(rng: random.Random, world: World) -> None:
    world.slow_device = [Call(rng.randint(0, 7), some(rng, 0.05, 1.0, 3.0))]


@feature(0.06)
def stuck_device(rng: random.Random, world: World) -> None:
    world.slow_device = [Call(rng.randint(0, 7), some(rng, 5.5, 50.0))]


@feature(0.06)
def lost_device(rng: random.Random, world: World) -> None:
    world.lost_at_call = rng.randint(0, 5)


@feature(0.15)
def little_memory(rng: random.Random, world: World) -> None:
    world.out_of_memory_above = some(rng, 1, 2, 3, 5)


@feature(0.25)
def early_end(rng: random.Random, world: World) -> None:
    world.end = some(rng, "leave", "leave", "raise", "cancel", "native cancel")
    world.ends_at = ticks(rng, span_of(world) * 3 + 8)


@feature(0.12)
def drains(rng: random.Random, world: World) -> None:
    most = span_of(world) * 3 + 8
    for _ in range(some(rng, 1, 1, 2, 3)):
        world.drains.append(Drain(ticks(rng, most), some(rng, 0.0, 0.002, 0.01, 0.5, 30.0)))


@feature(0.04)
def two_engines(rng: random.Random, world: World) -> None:
    """A second engine on the same device."""
    beside = World(seed=world.seed + 1_000_003)
    _draw_clients(rng, beside)
    for name in ("images", "repetitions", "leavers", "poison"):
        if rng.random() < 0.3:
            FEATURES[name][1](rng, beside)
    beside.slots = world.slots
    beside.__dict__.pop("config", None)
    world.neighbour = alike(beside)


@feature(0.025)
def crowd_with_few_questions(rng: random.Random, world: World) -> None:
    """A crowd asks a handful of questions of a slow device, and some clients leave.

    Of equal items one goes to the device for all; the others follow it, or inherit its place. The worlds above seldom
    reach the last of these steps, so nothing else goes wrong here.
    """
    settings = {**world.settings, "max_batch_items": 1, "max_batch_tokens": some(rng, 6, 12), "coalesce": True,
                "waiting_tokens": 100, "share_between_tenants": True}  # fmt: skip
    settings.pop("result_cache_mb", None)
    names = some(rng, (None, "a"), ("a", "b", "c", "d"))
    asked: dict[int, Name] = {}
    clients = []
    for number in range(rng.randint(3, 10)):
        arrives_at = ticks(rng, 4)
        leaves_at = arrives_at + rng.randint(5, 30) * TICK_S if rng.random() < 0.6 else float("inf")
        items = []
        for index in range(some(rng, 1, 1, 2)):
            question = rng.randint(1, 6)
            items.append(ItemPlan(question, says=asked.get(question)))
            asked.setdefault(question, (number, index))
        clients.append(
            ClientPlan(number=number, arrives_at=arrives_at, leaves_at=leaves_at, items=items, tenant=rng.choice(names))
        )
    calm: dict[str, Any] = {"seed": world.seed, "settings": settings, "clients": clients}
    if rng.random() < 0.3:
        calm["crashes"] = [Trouble(some(rng, "clock", "postprocess.sending"), log_uniform(rng, 1, 60) - 1)]
    world.__dict__.update(World(**calm, pads=True, device_ticks=8).__dict__)


@feature(0.15)
def nothing_goes_wrong(_rng: random.Random, world: World) -> None:
    """No trouble: waits are held to bounds that follow from service times."""
    calm = World()
    for name in ("crashes", "delays", "leaves", "lates", "slow_preprocess", "slow_device", "posted_late", "drains",
                 "lost_at_call", "out_of_memory_above", "end", "ends_at", "yields", "neighbour"):  # fmt: skip
        setattr(world, name, getattr(calm, name))
    for client in world.clients:
        client.decode = client.encode = None
        for item in client.items:
            item.fault = None
            for fetch in item.fetches:
                fetch.takes_s, fetch.fault = min(fetch.takes_s, 20 * TICK_S), None
    world.liveness = True


@feature(0.02)
def trouble_that_ends(rng: random.Random, world: World) -> None:
    """The same requests before and after trouble that ends, and a load in between.

    Only so can the two times be compared, so nothing else goes wrong here.
    """
    batch_items = rng.randint(2, 12)
    calm = World(
        seed=world.seed,
        settings={
            "max_batch_items": some(rng, batch_items, 64),
            "max_batch_tokens": 2 * batch_items,
            "chunk_items": some(rng, 1, 4, 64),
            "preprocess_limit": some(rng, 1, 2),
            "coalesce": rng.random() < 0.5,
        },
        forward_s=some(rng, 1, 5, 20) * TICK_S,
        token_s=some(rng, 0.0, 0.0005),
        slots=some(rng, 1, 1, 2),
        pads=rng.random() < 0.3,
    )
    token_counts = [rng.randint(1, 2) for _ in range(rng.randint(4, 10) * batch_items)]
    now = 0.0

    def ask(token_counts: Sequence[int], **plan: Any) -> list[ClientPlan]:
        """Requests for these items, a few each, all at once; and the time by which each could go alone."""
        nonlocal now
        asked = []
        for start in range(0, len(token_counts), 5):
            items = [ItemPlan(tokens) for tokens in token_counts[start : start + 5]]
            asked.append(ClientPlan(number=len(calm.clients), arrives_at=round(now, 6), items=items, **plan))
            calm.clients.append(asked[-1])
        now += sum(2 * calm.forward_s + 4 * calm.token_s for _ in token_counts) + 20 * TICK_S
        return asked

    ask(token_counts[: 2 * batch_items])
    ask(token_counts, phase="before")
    calm.memory_short_from = round(now, 6)
    for client in ask(token_counts * some(rng, 1, 3)):
        if rng.random() < 0.1:
            client.leaves_at = client.arrives_at + ticks(rng, 30)
        for item in client.items:
            if rng.random() < 0.05:
                item.fault = rng.choice(FAULTS)
    calm.memory_short_until = round(now, 6)
    if rng.random() < 0.7:
        calm.out_of_memory_above = rng.randint(1, batch_items)
    ask([2] * (40 * batch_items))
    ask(token_counts, phase="after")
    world.__dict__.update(calm.__dict__)


@feature(0.15)
def callers_who_wait(rng: random.Random, world: World) -> None:
    """Callers that wait for room, as a pipeline does, beside others."""
    if any(client.phase for client in world.clients):
        return  # both phases must be answered
    world.settings |= {"max_requests": some(rng, 1, 2, 4)} if rng.random() < 0.8 else {}
    if rng.random() < 0.4:
        world.settings["max_items"] = log_uniform(rng, 2, 20)
    if rng.random() < 0.4:
        world.settings["target_delay_s"] = some(rng, 0.005, 0.05)
    for client in world.clients:
        client.waits = rng.random() < 0.7 and not (client.streams or client.tokenizes)


@feature(0.5)
def bad_readers(rng: random.Random, world: World) -> None:
    """Callers that stream, and whose function that takes results fails."""
    for client in world.clients:
        if client.streams and not client.phase and rng.random() < 0.4:
            client.gives = rng.choice(BUGS)
