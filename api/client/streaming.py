"""Decoding of vectors from the lines of a streamed answer. Pure."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.client import answers
from staged_pool.client.answers import decode, floats
from staged_pool.client.errors import BadAnswer, error_of_object
from staged_pool.client.exchange import NDJSON, ServerAnswer
from staged_pool.runtime.input_ranges import InputRange, with_input_range
from staged_pool.stages.errors import StagedPoolError

Vector: TypeAlias = tuple[int, NDArray[np.float32]]
"""Index of an input in the whole call, and its vector: float32 [width]."""


class VectorLines:
    """Decoder of one streamed answer: takes its bytes, and returns the vectors that are complete.

    A server that does not stream sends one JSON object, which is decoded at the end.

    Args:
        answer: Status and headers of the answer.
        input_range: Inputs of the request.
        total: Number of inputs of the call.
    """

    def __init__(self, answer: ServerAnswer, input_range: InputRange, total: int) -> None:
        self._in_lines = answer.headers.get("content-type", "").startswith(NDJSON)
        self._input_range = input_range
        self._total = total
        self._left = bytearray()
        self._missing = set(range(input_range.count))
        self._error: StagedPoolError | None = None
        self.prompt_tokens: int | None = None
        """Prompt tokens of the request; None until the answer is complete."""

    def feed(self, data: bytes) -> list[Vector]:
        """Return the vectors that `data` completes.

        Raises:
            BadAnswer: A line is not valid.
        """
        self._left += data
        if not self._in_lines or b"\n" not in data:  # so that a long line is not split again for each chunk
            return []
        *lines, rest = self._left.split(b"\n")
        self._left = rest
        return [vector for line in lines if line.strip() for vector in self._line(bytes(line))]

    def end(self) -> list[Vector]:
        """Return the vectors that the end of the answer completes.

        Raises:
            BadAnswer: The answer ended early.
            StagedPoolError: The request failed, as its last line says.
        """
        vectors = []
        if not self._in_lines:
            body = decode(answers.VECTORS, bytes(self._left))
            vectors = [self._vector(entry.index, entry.embedding) for entry in body.data]
            self.prompt_tokens = body.usage.prompt_tokens
        elif self._left.strip():
            vectors = self._line(bytes(self._left))
        if self._error is not None:
            raise with_input_range(self._error, self._input_range, self._total)
        if self._missing or self.prompt_tokens is None:
            missing, count = len(self._missing), self._input_range.count
            raise BadAnswer(f"The answer ended before {missing} of {count} vectors arrived")
        return vectors

    def _line(self, line: bytes) -> list[Vector]:
        found = decode(answers.LINE, line)
        if found.error is not None:
            # Raised at the end of the answer: a connection can be reused once its answer is read.
            self._error = error_of_object(found.error)
        if found.usage is not None:
            self.prompt_tokens = found.usage.prompt_tokens
        if found.embedding is None or found.index is None:
            return []
        return [self._vector(found.index, found.embedding)]

    def _vector(self, index: int, value: bytes) -> Vector:
        if index not in self._missing:
            raise BadAnswer(f"The answer has an unexpected vector, for input {index}")
        self._missing.remove(index)
        return self._input_range.first + index, floats(value)
