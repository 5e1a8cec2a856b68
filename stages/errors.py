"""Errors of requests, in the engine's words; `api/status.py` maps each class to an HTTP status."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

ECHO_LIMIT = 40
"""Characters of a value of the caller's that a message may repeat."""

SETTINGS: Final = frozenset({
    "aggregation", "dimensions", "instruction", "max_document_tokens", "max_query_tokens", "max_tokens", "outputs",
    "prompt", "prompt_name", "top_n",
})  # fmt: skip
"""Fields of a request that say how it is done, as the engine calls them. A message names one of them as `$field`."""

_FIELD: Final = re.compile(rf"\$({'|'.join(sorted(SETTINGS, key=len, reverse=True))})\b")


@dataclass(frozen=True, slots=True)
class Words:
    """The caller's own names for the fields of one request, for errors."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """By the engine's names; a field that is not named here is called as the engine calls it."""
    place: Callable[[str, int], str] | None = None
    """Path of one input, such as `documents[2].text`, from the field that holds it and its place there. None: errors
    name the field alone."""


ENGINE_WORDS: Final = Words()


def shortened(value: str) -> str:
    """Cut a value that the caller wrote to the few characters, in one line, that a message may repeat."""
    cut = value if len(value) <= ECHO_LIMIT else f"{value[: ECHO_LIMIT - 1]}…"
    return "".join(character if character.isprintable() else " " for character in cut)


class StagedPoolError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(StagedPoolError):
    """A setting, a model folder or the machine does not allow the engine to start."""


class InvalidInput(StagedPoolError):
    """The caller's request is wrong; sending it again unchanged fails again.

    Args:
        message: What is wrong and what would be right; never the input itself. `$field` stands for one of `SETTINGS`.
        param: The field of the request that is at fault, as the engine or else the caller calls it.
        index: Which of the request's inputs is at fault, where it is one of them.
    """

    def __init__(self, message: str, *, param: str | None = None, index: int | None = None) -> None:
        super().__init__(_FIELD.sub(r"\1", message))
        self._template = message
        self.param = param
        self.index = index

    def said_in(self, words: Words) -> tuple[str, str | None]:
        """The message and the field at fault in the words of the caller."""
        message = _FIELD.sub(lambda named: words.fields.get(named[1], named[1]), self._template)
        if self.param is None:
            return message, None
        param = words.fields.get(self.param, self.param)
        if self.index is None or self.param in SETTINGS or words.place is None:
            return message, param
        place = words.place(param, self.index)
        return (message if message.startswith(place) else f"{place}: {message}"), param

    def after(self, beginning: str, *, param: str | None = None) -> InvalidInput:
        """The same error with a message that begins with more.

        Args:
            beginning: Goes before the message.
            param: The field at fault, where the error names none.
        """
        return type(self)(f"{beginning}{self._template}", param=self.param or param, index=self.index)


class InvalidSetting(InvalidInput):
    """A field that holds for all inputs of a request is wrong, so the error has no `index`, whichever input met it."""


class NoInputs(InvalidInput):
    """The request asks for nothing: it has no input."""


class TooLarge(InvalidInput):
    """The request exceeds a limit of this server on bytes or items, whatever the load."""


class UrlNotAllowed(InvalidInput):
    """An image's URL leads to where this server does not go: to a host, an address, a port or a file of which nobody
    said that it may be asked."""


class UnusableMedia(InvalidInput):
    """An image cannot be decoded, or is not where its URL says."""


class UnsupportedMedia(InvalidInput):
    """An image is in a format that is not read here."""


class UnknownModel(InvalidInput):
    """The request names a model that is not served here."""


class Unsupported(StagedPoolError):
    """The served model cannot do what the request asks for, whatever its inputs."""


class Overloaded(StagedPoolError):
    """Admission refused the request before any work was done on it; nothing of it was kept.

    Args:
        message: Which limit is reached.
        retry_after_s: When a retry has a chance, in seconds from now.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStopped(StagedPoolError):
    """The engine is starting, draining, stopped or broken, so that it takes or finishes no request.

    Args:
        message: The phase and the reason.
        retry_after_s: When a retry has a chance, in seconds from now.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(StagedPoolError, TimeoutError):
    """The request's own time limit (`timeout_s`) passed, or could not be met, while it was in `stage`.

    It is a `TimeoutError`, as what `anyio.fail_after` raises is. A deadline of the caller's own scope never raises it.

    Args:
        message: What took too long.
        stage: Where the request was.
        retry_after_s: When a retry has a chance, in seconds from now, where that is foreseen at the door.
    """

    def __init__(self, message: str, *, stage: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.retry_after_s = retry_after_s


class Abandoned(StagedPoolError):
    """The caller left. Nobody reads this outcome; it is what a ticket says and what a metric counts."""


class ScopeEnds(StagedPoolError):
    """The caller's own cancel scope ends before the request can be done, so a stage dropped it in `stage`.

    No caller sees this outcome: its scope cancels it. `Engine.submit` waits for that.
    """

    def __init__(self, message: str, *, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class ModelFailed(StagedPoolError):
    """The model gave no usable result for one input: it raised, or a row holds NaN or Inf.

    Args:
        message: What the model did.
        index: Which of the request's inputs it failed on, where known.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class MediaUnavailable(StagedPoolError):
    """The host of an image's URL failed; the same request may succeed later.

    Args:
        message: What the host did.
        index: Which of the request's inputs the image is in, where known.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class MediaTimedOut(MediaUnavailable):
    """It did not answer in time."""


class StageFailed(StagedPoolError):
    """A worker of `stage` crashed with this request in its hand: a bug of ours, logged with its traceback."""

    def __init__(self, message: str, *, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class OutOfMemory(StagedPoolError):
    """The device had no memory for a batch of this size; a smaller one may fit."""


class DeviceLost(StagedPoolError):
    """The device no longer answers, or can no longer be trusted; only a new process helps."""


def detached(error: StagedPoolError) -> StagedPoolError:
    """A copy of an error without a traceback, for one more caller, or to be kept.

    A traceback leads to frames, and these to requests: whoever keeps an error with one keeps all of them. Each caller
    is raised a copy of its own, which notes an index and a traceback of its own.
    """
    twin = type(error).__new__(type(error), *error.args)
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    return twin
