"""Inputs of the comparison: the same texts and images for every server, in its own dialect."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Final, Literal

from perf.contenders.bare import BareLoad, Groups
from perf.peers.dialects import Dialect, Vectors, least_cosine, scores
from perf.tools.jpegs import Size, jpeg
from perf.tools.servers import Server
from perf.tools.texts import SHAPES, TextSource

Scenario = Literal["s1", "m8", "x64", "rank", "images", "photos", "captions"]

SCENARIOS: Final[dict[Scenario, str]] = {
    "s1": SHAPES["s1"],
    "m8": SHAPES["m8"],
    "x64": SHAPES["x64"],
    "rank": "1 query of 12 tokens and 100 documents of 64",
    "images": "1 JPEG of 640 x 480",
    "photos": "1 JPEG of 1920 x 1080",
    "captions": "1 text of 12 tokens, to the model of images",
}
UNITS: Final[dict[Scenario, int]] = {"s1": 1, "m8": 8, "x64": 64, "rank": 100, "images": 1, "photos": 1, "captions": 1}
"""Texts, documents or images of one request; rates count these units."""

BARE_TEXTS: Final = 64
BARE_IMAGES: Final = 8
"""Minimum batch sizes of a forward without a server; larger ones are not faster."""

TEXTS: Final[tuple[Scenario, ...]] = ("s1", "m8", "x64", "rank")
"""Scenarios of the text model."""

IMAGES: Final[tuple[Scenario, ...]] = ("images", "photos", "captions")
"""Scenarios of the image model."""

AGREED: Final = 0.99
"""Minimum cosine of a vector with ours in float32 for a server to be timed.

A score may differ by one minus this value.
"""

_SIZES: Final[Mapping[Scenario, Size]] = {"images": "vga", "photos": "1080p"}
_IMAGES: Final = 16
_SAMPLE: Final = 32
"""Number of texts whose vectors are compared, of all lengths."""


class Disagreement(ValueError):
    """The answers of a server are not those of the model."""


def some_of(listed: str | None) -> tuple[Scenario, ...]:
    """Return the scenarios of a comma-separated list; None: all.

    Raises:
        ValueError: A name is unknown.
    """
    if listed is None:
        return tuple(SCENARIOS)
    names = {name.strip() for name in listed.split(",")}
    if unknown := sorted(names - set(SCENARIOS)):
        raise ValueError(f"{unknown[0]!r} is none of the scenarios: {', '.join(SCENARIOS)}")
    return tuple(name for name in SCENARIOS if name in names)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one server for the inputs that are compared."""

    vectors: Vectors
    scores: tuple[float, ...] | None
    """Scores of the documents. None: it does not rank."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Folder of one model, and its inputs."""

    folder: Path
    lists: Mapping[Scenario, Sequence[Sequence[str]]]
    """Texts of each request; for a ranking, the query and then the documents."""
    encoded_images: Mapping[Scenario, Sequence[bytes]]
    """Image of each request; empty for a text model."""

    @classmethod
    def texts(cls, source: TextSource) -> Inputs:
        """Make the inputs of the text model."""
        rng = random.Random(0)
        rankings = [[source.text(12, rng), *(source.text(64, rng) for _ in range(100))] for _ in range(8)]
        lists: dict[Scenario, list[list[str]]] = {
            "s1": source.lists("s1"), "m8": source.lists("m8"), "x64": source.lists("x64"), "rank": rankings,
        }  # fmt: skip
        return cls(source.folder, lists, {})

    @classmethod
    def images(cls, folder: Path) -> Inputs:
        """Make the inputs of the image model."""
        captions = TextSource(str(folder)).lists("s1")
        images = {scenario: [jpeg(size, seed) for seed in range(_IMAGES)] for scenario, size in _SIZES.items()}
        return cls(folder, {"captions": captions}, images)

    def requests(self, dialect: Dialect, scenario: Scenario) -> tuple[bytes, ...]:
        """Return complete requests, which are sent repeatedly in this order; none if the server has no such task."""
        if scenario in self.encoded_images:
            return tuple(dialect.see([image]) for image in self.encoded_images[scenario]) if dialect.see else ()
        if scenario == "rank":
            return tuple(dialect.rank(query, docs) for query, *docs in self.lists["rank"]) if dialect.rank else ()
        if scenario == "captions" and dialect.see is None:
            return ()
        return tuple(dialect.embed(texts) for texts in self.lists[scenario])

    def bare_load(self, scenario: Scenario, seconds: float, at_once: int | None = None) -> BareLoad:
        """Return the same work for the loop without a server.

        Args:
            at_once: Number of requests in one forward. None: that of the best rate.
        """
        images = self.encoded_images.get(scenario)
        groups: Groups = [[image] for image in images] if images else self.lists[scenario]
        if at_once is None:
            at_once = max(1, (BARE_IMAGES if images else BARE_TEXTS) // UNITS[scenario])
        return BareLoad(groups, seconds, min(at_once, len(groups)))

    def first(self, dialect: Dialect) -> bytes:
        """Return the request whose vectors are compared; it also shows that a server is up."""
        if self.encoded_images:
            if dialect.see is None:
                raise ValueError("the server takes no images")
            return dialect.see(self.encoded_images["images"][:4])
        return dialect.embed(list(islice(chain.from_iterable(self.lists["x64"]), _SAMPLE)))

    def answers(self, server: Server, dialect: Dialect) -> Answers:
        """Get the answers of a server that are compared, once it is up.

        Raises:
            Disagreement: Its answers cannot be decoded.
        """
        rankings = () if self.encoded_images else self.requests(dialect, "rank")
        vectors = server.wait_answer(self.first(dialect)).body
        ranked = server.wait_answer(rankings[0]).body if rankings else None
        try:
            return Answers(dialect.vectors(vectors), None if ranked is None else tuple(scores(ranked)))
        except (KeyError, TypeError, ValueError) as error:
            raise Disagreement(f"its answers cannot be decoded: {error!r}") from None


def agreement(ours: Answers, theirs: Answers) -> float:
    """Return the lowest cosine of their vectors with ours.

    Raises:
        Disagreement: It is below `AGREED`, or a score is missing or too different.
    """
    try:
        cosine = least_cosine(ours.vectors, theirs.vectors)
    except ValueError as error:
        raise Disagreement(str(error)) from None
    if cosine < AGREED:
        raise Disagreement(f"least cosine of its vectors with ours: {cosine:.4f}, expected at least {AGREED}")
    if theirs.scores is not None and ours.scores is not None:
        if len(theirs.scores) != len(ours.scores):
            raise Disagreement(f"{len(theirs.scores)} scores, expected {len(ours.scores)}")
        off = max(abs(a - b) for a, b in zip(ours.scores, theirs.scores, strict=True))
        if off > 1 - AGREED:
            raise Disagreement(f"a score is off by {off:.3f}, expected at most {1 - AGREED:.3f}")
    return cosine
