"""Request of a segmentation, with the fields of TerraTorch's plugin for vLLM.

    {"data": "https://example.org/scene.tif", "data_format": "url", "indices": [1, 2, 3, 8, 11, 12]}

`data` may also be a list: the tiles of one scene, each a GeoTIFF on the same grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from geo_segmentation.faults import fault

BANDS: Final = ("blue", "green", "red", "near infrared", "short-wave infrared 1", "short-wave infrared 2")
"""Bands that the model reads, in this order."""

MAX_FILES: Final = 16
"""Most GeoTIFFs of one request."""

MAX_BANDS: Final = 2**16 - 1
"""Most bands of a TIFF."""

Format: TypeAlias = Literal["url", "path", "b64_json"]
FORMATS: Final = ("url", "path", "b64_json")

_FIELDS: Final = frozenset({"data", "data_format", "out_data_format", "indices"})


@dataclass(frozen=True, slots=True)
class SegmentationRequest:
    """A checked request."""

    sources: tuple[str, ...]
    """URLs, absolute paths, or GeoTIFFs in base64, as `format` says."""
    format: Format
    indices: tuple[int, ...] | None
    """Place of each of `BANDS` in the files, from 0. None: the files have these bands alone."""
    is_list: bool
    """The request has a list, so that errors name the place in it."""

    def place(self, index: int) -> str:
        """Return the field of a source, for errors."""
        return f"data.data[{index}]" if self.is_list else "data.data"


def parse_request(data: object) -> SegmentationRequest:
    """Check the `data` of a request.

    Raises:
        InvalidInput: A field is unknown, missing, or of another type.
    """
    if not isinstance(data, Mapping):
        raise fault("data", 'must be an object, such as {"data": "https://example.org/scene.tif"}')
    if not data.keys() <= _FIELDS:
        raise fault("data", f"may have the fields {', '.join(sorted(_FIELDS))}, and no other")
    format = data.get("data_format", "url")
    if format not in FORMATS:
        raise fault("data.data_format", f"must be one of {', '.join(FORMATS)}")
    if data.get("out_data_format", "b64_json") != "b64_json":
        raise fault("data.out_data_format", "must be b64_json: this server writes no files")
    given = data.get("data")
    sources = _sources(given, cast(Format, format))
    return SegmentationRequest(sources, cast(Format, format), _indices(data.get("indices")), isinstance(given, list))


def _sources(given: object, format: Format) -> tuple[str, ...]:
    sources = tuple(given) if isinstance(given, list) else (given,)
    if not 1 <= len(sources) <= MAX_FILES:
        raise fault("data.data", f"must have 1 to {MAX_FILES} GeoTIFFs, and has {len(sources)}")
    texts = tuple(source for source in sources if isinstance(source, str) and source)
    if len(texts) < len(sources):
        raise fault("data.data", "must be a text, or a list of texts: each a GeoTIFF as data_format says")
    if format == "path" and not all(text.startswith("/") for text in texts):
        raise fault("data.data", "must be an absolute path with data_format path")
    return texts


def _indices(given: object) -> tuple[int, ...] | None:
    if given is None:
        return None
    places = tuple(given) if isinstance(given, list) else ()
    if len(places) != len(BANDS) or not all(type(place) is int and 0 <= place < MAX_BANDS for place in places):
        raise fault(
            "data.indices", f"must be {len(BANDS)} integers from 0: the places of {', '.join(BANDS)} in the file"
        )
    return places
