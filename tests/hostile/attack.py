"""Attacks: functions that misuse a server for some seconds."""

from __future__ import annotations

import importlib
import math
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from staged_pool.runtime.settings import read_bytes
from tests.hostile import attacks

BYSTANDER_KEY: Final = "key-of-the-bystander"
ATTACKER_KEY: Final = "key-of-the-attacker"
"""Key of the attacker, a tenant of its own, for attacks that need a key."""
ELSEWHERE: Final = "127.0.0.2"
"""Address of the attacker, where the server tells clients apart by address. Linux answers on all of 127.0.0.0/8."""


@dataclass(frozen=True)
class Target:
    """The server that is attacked."""

    port: int
    seconds: float
    """Duration of the attack."""
    quic_port: int | None = None
    unix_time_s: float = field(default_factory=time.time)

    @property
    def left_s(self) -> float:
        """Seconds until the end of the attack."""
        return self.seconds - (time.time() - self.unix_time_s)

    @property
    def time_is_up(self) -> bool:
        return self.left_s <= 0

    def rounds(self) -> Iterator[None]:
        """Repeat an attack until its time is up, but at least once: a busy machine may begin late."""
        yield
        while not self.time_is_up:
            yield

    def headers(self, *more: str, path: str = "/v1/embeddings", method: str = "POST", key: str = ATTACKER_KEY) -> bytes:
        """The head of an HTTP/1.1 request with the attacker's key."""
        lines = [f"{method} {path} HTTP/1.1", "host: test", f"authorization: Bearer {key}", *more]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"


@dataclass(frozen=True)
class Setting:
    """Settings of the server of an attack."""

    flags: tuple[str, ...] = ()
    model: str | None = None
    """A kind of tiny model, see `tests.models.tiny`. None: the embedding model that is installed."""
    quic: bool = False
    """It has a certificate, and serves HTTP/3 too."""
    address_space_bytes: int | None = None
    """Limit of its address space (RLIMIT_AS). None: no limit."""

    @property
    def starts_anew(self) -> bool:
        """True if the memory of imports counts: a copy of a process that has them has more than a server needs."""
        return self.address_space_bytes is not None or self.memory_limit_bytes < 2e9

    @property
    def memory_limit_bytes(self) -> float:
        """The limit of memory that its flags give it."""
        if "--memory-limit" not in self.flags:
            return math.inf
        return read_bytes("memory_limit_bytes", self.flags[self.flags.index("--memory-limit") + 1])


BOUNDED: Final = Setting(("--memory-limit", "3G", "--max-connections", "200"))
"""Limits that a short attack can reach. One server serves many attacks."""

Counts: TypeAlias = Mapping[str, int]
"""Counts of an attack's actions and answers. An attack that counts nothing has failed."""


@dataclass(frozen=True)
class Attack:
    """One attack.

    `run` is called in a process of its own, with any number of threads or with an event loop, and comes back after
    `target.rounds`.
    """

    name: str
    run: Callable[[Target], Counts]
    setting: Setting
    work_s: float
    """Seconds of honest work, such as a forward, that may be ahead of the bystander."""
    may_lose: bool
    """The server may reject the bystander meanwhile, clearly and at once: only where nothing better is possible."""
    prepare: Callable[[], object]
    """Makes what `run` sends, in the same process, before the time of the attack begins."""


_REGISTRY: Final[dict[str, Attack]] = {}


def _nothing() -> None:
    """Prepare nothing."""


def attack(
    name: str,
    setting: Setting = BOUNDED,
    *,
    work_s: float = 0.0,
    may_lose: bool = False,
    prepare: Callable[[], object] = _nothing,
) -> Callable[[Callable[[Target], Counts]], Callable[[Target], Counts]]:
    """Register an attack under a name."""

    def register(run: Callable[[Target], Counts]) -> Callable[[Target], Counts]:
        if name in _REGISTRY:
            raise ValueError(f"two attacks have the name {name!r}")
        _REGISTRY[name] = Attack(name, run, setting, work_s, may_lose, prepare)
        return run

    return register


def all_attacks() -> Iterator[Attack]:
    """Every attack of the modules in `attacks`, those of one setting together."""
    for module in pkgutil.iter_modules(attacks.__path__):
        importlib.import_module(f"{attacks.__name__}.{module.name}")
    yield from sorted(_REGISTRY.values(), key=lambda each: (repr(each.setting), each.name))
