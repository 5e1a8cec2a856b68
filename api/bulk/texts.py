"""Texts of a job: one text a line in, one vector or the scores of its labels out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from staged_pool.api.bulk.text_file import RawLine
from staged_pool.stages import foreign_text


@dataclass(frozen=True, slots=True)
class TextLine:
    """One text."""

    number: int
    text: str
    fault: str = ""
    """Set if the line is no text; `text` is then empty."""

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        return len(self.text) + 128


def read_text_line(raw: RawLine) -> TextLine:
    """Read one line of UTF-8. A line that is none has a `fault`, and never raises."""
    if raw.fault:
        return TextLine(raw.number, "", raw.fault)
    try:
        return TextLine(raw.number, foreign_text.decoded(raw.content, line=raw.number + 1))
    except foreign_text.BadText as error:
        return TextLine(raw.number, "", f"The text cannot be read: {error}")


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """Answer to one text: its row of numbers, or its error."""

    number: int
    row: NDArray[np.float32] | None = None
    """[width]: the vector, or a score for each label. None: the text has failed."""
    labels: Sequence[str] | None = None
    """Names of the labels, if the row has their scores; empty if the model names none."""
    error: Mapping[str, Any] | None = None
    """Error object of a text that has failed."""

    @property
    def failed(self) -> bool:
        """True if the text has failed."""
        return self.row is None

    def pieces(self) -> Sequence[bytes]:
        """Return the answer as a line of JSON. The index counts from 0."""
        return (self._encoded(),)

    def give_back(self) -> None:
        """Do nothing: an answer is one row, and the window bounds their number."""

    def _encoded(self) -> bytes:
        if self.row is None:
            return orjson.dumps({"index": self.number, "error": self.error})
        if self.labels is None:
            fields: dict[str, Any] = {"index": self.number, "embedding": self.row}
        else:
            label = self.labels[int(self.row.argmax())] if self.labels else None
            fields = {"index": self.number, "label": label, "probs": self.row}
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
