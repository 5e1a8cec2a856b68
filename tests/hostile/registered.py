"""All attacks, imported: what a process of an attacker begins with."""

from __future__ import annotations

from typing import Final

from tests.hostile.attack import Attack, all_attacks

ATTACKS: Final[tuple[Attack, ...]] = tuple(all_attacks())
