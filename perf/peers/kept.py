"""Stored rounds, so that a comparison of hours can be split into several runs."""

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
    """The stored rounds are of another comparison; the message names the difference."""


@dataclass(frozen=True, slots=True)
class Round:
    """Visits of one round, with the commit of our own version."""

    settings: Mapping[str, str]
    """Settings that are the same in all rounds of a comparison."""
    commit: str
    visits: Sequence[tuple[str, str, Visit | None]]
    """Name of the server, data type of its weights, and its visit; None: it was not measured.

    They are in the order of the comparison.
    """


class KeptRounds:
    """Folder with a file for each completed round.

    Args:
        settings: Settings of the comparison.
        folder: The folder; it is made if it is missing.
    """

    def __init__(self, settings: Mapping[str, str], *, folder: Path = ROUNDS) -> None:
        self._settings = settings
        self._folder = folder

    def load(self) -> list[Round]:
        """Return the stored rounds, the oldest first.

        Raises:
            OtherSettings: A round has other settings, or cannot be decoded.
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
        """Store one more round."""
        self._folder.mkdir(parents=True, exist_ok=True)
        place = len(self._files())
        kept = Round(self._settings, commit, visits)
        (self._folder / f"{place:03}.msgpack").write_bytes(msgspec.msgpack.encode(kept))

    def clear(self) -> None:
        """Delete all stored rounds."""
        for path in self._files():
            path.unlink()

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.msgpack"))
