"""Request of page regions.

    {"pages": ["https://example.org/page.png", "data:application/pdf;base64,JVBERi0…"], "gap": 0.02}

Each entry of `pages` is an image, or a PDF with any number of pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from page_regions.regions import GAP
from staged_pool import InvalidInput

MAX_SOURCES: Final = 64
LEAST_GAP: Final = 0.002
GREATEST_GAP: Final = 0.5

_FIELDS: Final = frozenset({"pages", "gap"})


@dataclass(frozen=True, slots=True)
class PagesRequest:
    """A checked request."""

    sources: tuple[str, ...]
    """URLs, `data:` URLs among them."""
    gap: float
    """See `regions.GAP`."""


def parse_request(data: object) -> PagesRequest:
    """Check the `data` of a request.

    Raises:
        InvalidInput: A field is unknown, missing, or of another type.
    """
    if not isinstance(data, Mapping):
        raise _fault("data", 'must be an object, such as {"pages": ["https://example.org/page.png"]}')
    if not data.keys() <= _FIELDS:
        raise _fault("data", "may have the fields pages and gap, and no other")
    sources = data.get("pages")
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise _fault("data.pages", "must be a list of URLs, of which data: URLs hold the page itself")
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise _fault("data.pages", f"must have 1 to {MAX_SOURCES} entries, and has {len(sources)}")
    gap = data.get("gap", GAP)
    if type(gap) not in (int, float) or not LEAST_GAP <= gap <= GREATEST_GAP:
        raise _fault("data.gap", f"must be a number from {LEAST_GAP} to {GREATEST_GAP}: a share of the longer edge")
    return PagesRequest(tuple(sources), float(gap))


def _fault(place: str, message: str) -> InvalidInput:
    return InvalidInput(f"{place} {message}", param=place)
