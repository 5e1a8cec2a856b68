"""Requests of a trace with made-up inputs of its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any, Final

import numpy as np

from staged_pool.api.bench.connection import with_body
from staged_pool.api.bench.images import ImageMaker
from staged_pool.api.bench.sizes import ImageSize, Kind
from staged_pool.api.bench.texts import TextMaker, TokenRate
from staged_pool.api.bench.trace import Row, Trace
from staged_pool.api.bench.workload import QUERY_WORDS, Made, Target, image_body, rerank_body, texts_body

_BULK: Final = "X-Priority: bulk"
_BASE64_BYTES: Final = 4 / 3
"""Bytes of a body for each byte of an image in it."""


class TraceMaker:
    """Makes the requests of a trace in turn.

    Args:
        trace: Their sizes.
        target: Server side of the requests.
        rates: Tokens of a word, by kind.
        rng: Source of randomness.
    """

    def __init__(self, trace: Trace, target: Target, rates: Mapping[Kind, TokenRate], rng: np.random.Generator) -> None:
        self._trace = trace
        self._target = target
        texts = TextMaker(rng, rates.get("texts", TokenRate()))
        rankings = TextMaker(rng, rates.get("rerank", TokenRate()))
        self._texts: Mapping[Kind, TextMaker] = {"texts": texts, "images": texts, "rerank": rankings}
        self._queries = TextMaker(rng, TokenRate())
        self._images = ImageMaker(rng)
        self._rows = cycle(trace.rows)

    def draw_images(self) -> None:
        """Draw images of all sizes, which takes up to a second for each."""
        drawn: set[ImageSize] = set()
        for row in self._trace.rows:
            if row.images and (size := self._image_size(row)) not in drawn:
                drawn.add(size)
                self._images.draw(size)

    def __call__(self) -> Made:
        """Make the next request; see `Maker`."""
        row = next(self._rows)
        kind = row.kind
        head = self._target.head(kind, *([_BULK] if row.bulk else []))
        return Made(with_body(head, self._target.body(kind, self._inputs(row))), kind, row.items)

    def _inputs(self, row: Row) -> Mapping[str, Any]:
        texts = max(row.items - row.images, 0)
        make = self._texts[row.kind]
        each = [make(share) for share in _shares(row.tokens, row.items)[:texts]]
        if row.kind == "rerank":
            return rerank_body(self._queries(QUERY_WORDS), each or [make(1)])
        if not row.images:
            return texts_body(each)
        urls = [self._images(self._image_size(row)) for _ in range(row.images)]
        if len(urls) == 1 and not each:
            return image_body(urls[0])
        return {"input": [*({"image": url} for url in urls), *({"text": text} for text in each)]}

    def _image_size(self, row: Row) -> ImageSize:
        return self._images.size_of_bytes(round(row.body_bytes / _BASE64_BYTES / row.images))


def _shares(total: int, parts: int) -> list[int]:
    """Divide tokens among inputs as evenly as whole numbers allow."""
    return [total // parts + (place < total % parts) for place in range(parts)]
