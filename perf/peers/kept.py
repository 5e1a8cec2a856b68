"""Rounds that were measured before, so that hours of measuring can be several sittings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from perf.peers.environments import ENVIRONMENTS
from perf.peers.visits import Visit

ROUNDS: Final = ENVIRONMENTS / "rounds"


class OtherSettings(ValueError):
    """The rounds that are kept are of another comparison; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Round:
    """What was seen in one round, and of which version of ours it was."""

    settings: Mapping[str, str]
    """What has to be the same in all rounds of a comparison."""
    commit: str
    visits: Sequence[tuple[str, str, Visit | None]]
    """Each with the name of the server and the dtype of its weights, in the order of the comparison; None: it was not
    measured."""


class KeptRounds:
    """A folder with a file for each round that was measured to its end.

    Args:
        settings: Of the comparison.
        folder: Made where it is missing.
    """

    def __init__(self, settings: Mapping[str, str], *, folder: Path = ROUNDS) -> None:
        self._settings = settings
        self._folder = folder

    def load(self) -> list[Round]:
        """Those of before, the oldest first.

        Raises:
            OtherSettings: They, or some of them, cannot be compared with what is to come.
        """
        rounds = []
        for path in self._files():
            try:
                kept = msgspec.msgpack.decode(path.read_bytes(), type=Round)
            except msgspec.DecodeError as error:
                raise OtherSettings(f"{path.name} cannot be read: {error}") from None
            names = sorted({*kept.settings, *self._settings})
            if other := [name for name in names if kept.settings.get(name) != self._settings.get(name)]:
                name = other[0]
                was, now = kept.settings.get(name), self._settings.get(name)
                raise OtherSettings(f"the rounds that are kept are of another {name}: {was}, and now it is {now}")
            rounds.append(kept)
        return rounds

    def add(self, commit: str, visits: Sequence[tuple[str, str, Visit | None]]) -> None:
        """Keep one more."""
        self._folder.mkdir(parents=True, exist_ok=True)
        place = len(self._files())
        kept = Round(self._settings, commit, visits)
        (self._folder / f"{place:03}.msgpack").write_bytes(msgspec.msgpack.encode(kept))

    def clear(self) -> None:
        """Forget all of them."""
        for path in self._files():
            path.unlink()

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.msgpack"))
