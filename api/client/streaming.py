"""Vectors out of the lines of an answer, as they come: pure."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.client import answers
from staged_pool.client.answers import decode, floats
from staged_pool.client.batches import Stretch
from staged_pool.client.errors import BadAnswer, located, problem_error
from staged_pool.client.exchange import NDJSON, Answer
from staged_pool.stages.errors import StagedPoolError

Vector: TypeAlias = tuple[int, NDArray[np.float32]]
"""Which input, counted over the whole call, and its vector."""


class VectorLines:
    """Takes the bytes of one answer, and gives the vectors that are complete.

    A server that does not answer in lines has answered in one piece, which is read as such.

    Args:
        answer: Its head.
        stretch: The inputs that it is about.
        total: Inputs of the call.
    """

    def __init__(self, answer: Answer, stretch: Stretch, total: int) -> None:
        self._in_lines = answer.headers.get("content-type", "").startswith(NDJSON)
        self._stretch = stretch
        self._total = total
        self._left = bytearray()
        self._missing = set(range(stretch.count))
        self._error: StagedPoolError | None = None
        self.prompt_tokens: int | None = None
        """What the request cost; None until the answer is complete."""

    def feed(self, data: bytes) -> list[Vector]:
        """The vectors that `data` completes.

        Raises:
            BadAnswer: It is not what is expected.
        """
        self._left += data
        if not self._in_lines or b"\n" not in data:  # a long line is not looked through with each of its pieces
            return []
        *lines, rest = self._left.split(b"\n")
        self._left = rest
        return [vector for line in lines if line.strip() for vector in self._line(bytes(line))]

    def end(self) -> list[Vector]:
        """The vectors that were not complete before the end of the answer.

        Raises:
            BadAnswer: The answer ended early.
            StagedPoolError: Its last line says that the request failed.
        """
        vectors = []
        if not self._in_lines:
            body = decode(answers.VECTORS, bytes(self._left))
            vectors = [self._vector(one.index, one.embedding) for one in body.data]
            self.prompt_tokens = body.usage.prompt_tokens
        elif self._left.strip():
            vectors = self._line(bytes(self._left))
        if self._error is not None:
            raise located(self._error, self._stretch, self._total)
        if self._missing or self.prompt_tokens is None:
            raise BadAnswer(f"The answer ended before {len(self._missing)} of {self._stretch.count} vectors came")
        return vectors

    def _line(self, line: bytes) -> list[Vector]:
        found = decode(answers.LINE, line)
        if found.error is not None:
            self._error = problem_error(
                found.error
            )  # raised at the end: a connection that is read out can be used again
        if found.usage is not None:
            self.prompt_tokens = found.usage.prompt_tokens
        if found.embedding is None or found.index is None:
            return []
        return [self._vector(found.index, found.embedding)]

    def _vector(self, index: int, value: bytes) -> Vector:
        if index not in self._missing:
            raise BadAnswer(f"The answer has a vector too many, for input {index}")
        self._missing.remove(index)
        return self._stretch.first + index, floats(value)
