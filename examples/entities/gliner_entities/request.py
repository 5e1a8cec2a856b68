"""Request of entities.

    {"text": "Ada Lovelace lived in London.", "labels": ["person", "city"], "threshold": 0.5}

`texts` is a list of texts instead. `nested` allows entities inside others, `multi_label` several labels of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from staged_pool import InvalidInput

MAX_TEXTS: Final = 256
MAX_LABELS: Final = 100
MAX_LABEL_LENGTH: Final = 200
MAX_TEXT_LENGTH: Final = 20_000
"""Characters of a label, and of a text: longer ones are not tokenized at all."""

_FIELDS: Final = ("text", "texts", "labels", "threshold", "nested", "multi_label")


@dataclass(frozen=True, slots=True)
class EntitiesRequest:
    """A checked request."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    """Different labels, in the order of the request."""
    threshold: float
    nested: bool
    multi_label: bool
    is_list: bool
    """The request has `texts`, so that errors name the place in the list."""

    def place(self, number: int) -> str:
        """Return the field of a text, for errors."""
        return f"data.texts[{number}]" if self.is_list else "data.text"


def parse_request(data: object) -> EntitiesRequest:
    """Check the `data` of a request.

    Raises:
        InvalidInput: A field is unknown, missing, or of another type.
    """
    if not isinstance(data, Mapping):
        raise fault("data", 'must be an object, such as {"text": "Ada Lovelace", "labels": ["person"]}')
    if unknown := [str(name) for name in data if name not in _FIELDS]:
        raise fault("data", f"has the field {unknown[0][:40]!r}, but may have only {', '.join(_FIELDS)}")
    if ("text" in data) == ("texts" in data):
        raise fault("data", "must have either text or texts")
    is_list = "texts" in data
    texts = _texts(data["texts"] if is_list else [data["text"]], "data.texts" if is_list else "data.text", MAX_TEXTS)
    labels = _texts(data.get("labels"), "data.labels", MAX_LABELS)
    for number, text in enumerate(texts):
        if len(text) > MAX_TEXT_LENGTH:
            place = f"data.texts[{number}]" if is_list else "data.text"
            raise fault(place, f"has {len(text)} characters: at most {MAX_TEXT_LENGTH} are read")
    for number, label in enumerate(labels):
        if not label.strip() or len(label) > MAX_LABEL_LENGTH:
            raise fault(f"data.labels[{number}]", f"must have 1 to {MAX_LABEL_LENGTH} characters, not only blanks")
    threshold = data.get("threshold", 0.5)
    if type(threshold) not in (int, float) or not 0 <= threshold <= 1:
        raise fault("data.threshold", "must be a number from 0 to 1")
    flags = [data.get(name, False) for name in ("nested", "multi_label")]
    for name, flag in zip(("nested", "multi_label"), flags, strict=True):
        if not isinstance(flag, bool):
            raise fault(f"data.{name}", "must be true or false")
    return EntitiesRequest(texts, tuple(dict.fromkeys(labels)), float(threshold), flags[0], flags[1], is_list)


def _texts(given: object, place: str, most: int) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise fault(place, "must be a text" if place == "data.text" else "must be a list of texts")
    if not 1 <= len(given) <= most:
        raise fault(place, f"must have 1 to {most} entries, and has {len(given)}")
    return tuple(given)


def fault(place: str, message: str) -> InvalidInput:
    """Return an error about a field; the message follows its path."""
    return InvalidInput(f"{place} {message}", param=place)
