"""Error classes of requests; `api/status.py` maps each to an HTTP status."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

ECHO_LIMIT = 40
"""Most characters of a caller's value that a message repeats."""

REQUEST_SETTINGS: Final = frozenset({
    "aggregation", "candidate_labels", "chunk_tokens", "dimensions", "hypothesis_template", "instruction",
    "late_chunking",
    "max_active_dims", "max_document_tokens", "max_query_tokens", "max_tokens", "multi_label", "offsets", "outputs",
    "prompt", "prompt_name", "top_n",
})  # fmt: skip
"""Fields that hold for a whole request, by the engine's names. A message refers to one as `$field`."""

ADMISSION: Final = "door"
"""Stage of a request that has not reached the first stage yet.

The value is a label of `staged_pool_cancelled_total` and `staged_pool_expired_total`: a change breaks dashboards.
"""

_FIELD: Final = re.compile(rf"\$({'|'.join(sorted(REQUEST_SETTINGS, key=len, reverse=True))})\b")


@dataclass(frozen=True, slots=True)
class Words:
    """The caller's names for the fields of a request, for errors."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """The caller's names by the engine's names. A missing field keeps the engine's name."""
    place: Callable[[str, int], str] | None = None
    """Returns the path of an input, such as `documents[2].text`, from field and index.

    None: errors name the field alone.
    """


ENGINE_WORDS: Final = Words()


def shortened(value: str) -> str:
    """Shorten a caller's value to one line of at most `ECHO_LIMIT` characters, for a message."""
    cut = value if len(value) <= ECHO_LIMIT else f"{value[: ECHO_LIMIT - 1]}…"
    return "".join(character if character.isprintable() else " " for character in cut)


class StagedPoolError(Exception):
    """Base of every error that this package raises on purpose.

    Errors survive `pickle` and `copy`, with their fields: other processes and pools of workers pass them on.
    """

    def __reduce__(self) -> tuple[Callable[..., StagedPoolError], tuple[object, ...]]:
        # An exception is otherwise made again from its message alone, which the arguments of these classes forbid.
        return _made_again, (type(self), self.args, self.__dict__)


class ConfigError(StagedPoolError):
    """The engine cannot start with this setting, model folder or machine."""


class InvalidInput(StagedPoolError):
    """The request is wrong: the same request will fail again.

    Args:
        message: The fault and its remedy, but never the input itself. `$field` stands for one of `REQUEST_SETTINGS`.
        param: The field at fault, by the engine's name or, for other fields, the caller's.
        index: Index of the input at fault, if it is one of the inputs.
    """

    def __init__(self, message: str, *, param: str | None = None, index: int | None = None) -> None:
        super().__init__(_FIELD.sub(r"\1", message))
        self._template = message
        self.param = param
        self.index = index

    def in_words(self, words: Words) -> tuple[str, str | None]:
        """Return the message and the field at fault in the words of the caller."""
        message = _FIELD.sub(lambda named: words.fields.get(named[1], named[1]), self._template)
        if self.param is None:
            return message, None
        param = words.fields.get(self.param, self.param)
        if self.index is None or self.param in REQUEST_SETTINGS or words.place is None:
            return message, param
        place = words.place(param, self.index)
        return (message if message.startswith(place) else f"{place}: {message}"), param

    def with_prefix(self, beginning: str, *, param: str | None = None) -> InvalidInput:
        """Return the same error with a longer message.

        Args:
            beginning: Text to put before the message.
            param: The field at fault if the error names none.
        """
        return type(self)(f"{beginning}{self._template}", param=self.param or param, index=self.index)


class InvalidSetting(InvalidInput):
    """A field that holds for all inputs is wrong: the error has no `index`."""


class InvalidArgument(InvalidInput, ValueError):
    """An argument of `encode`, `predict` or `rank` is wrong. It is a `ValueError`, as in sentence-transformers."""


class NoInputs(InvalidInput):
    """The request has no input."""


class TooLarge(InvalidInput):
    """The request exceeds a limit on bytes or items that does not depend on load."""


class UrlNotAllowed(InvalidInput):
    """The settings do not allow this image URL: its host, address, port or file."""


class UnusableMedia(InvalidInput):
    """An image cannot be decoded, or does not exist at its URL."""


class UnsupportedMedia(InvalidInput):
    """The format of an image is not supported."""


class UnknownModel(InvalidInput):
    """The request names a model that is not served."""


class Unsupported(StagedPoolError):
    """The served model cannot do the requested task, for any input."""


class Overloaded(StagedPoolError):
    """Admission rejected the request before any work was done on it.

    Args:
        message: The limit that is reached.
        retry_after_s: Seconds from now after which a retry may succeed.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStopped(StagedPoolError):
    """The engine takes or finishes no request: it is starting, draining, stopped or broken.

    Args:
        message: The phase and the reason.
        retry_after_s: Seconds from now after which a retry may succeed.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(StagedPoolError, TimeoutError):
    """The time limit of the request (`timeout_s`) passed, or could not be met.

    It is a `TimeoutError`, like the error of `anyio.fail_after`. A deadline of the caller's own scope never raises it.

    Args:
        message: The limit, and where it passed.
        stage: The stage that the request was in.
        retry_after_s: Seconds from now after which a retry may succeed. None: unknown.
    """

    def __init__(self, message: str, *, stage: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.retry_after_s = retry_after_s


class Abandoned(StagedPoolError):
    """The caller left. No caller sees this outcome: tickets keep it, and metrics count it."""


class ScopeEnds(StagedPoolError):
    """A stage dropped the request because the caller's own cancel scope ends too soon.

    No caller sees this outcome: `Engine.submit` waits for the scope to cancel it.
    """

    def __init__(self, message: str, *, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class ModelFailed(StagedPoolError):
    """The model failed on one input: it raised, or its row holds NaN or Inf.

    Args:
        message: The failure.
        index: Index of the input in the request, if known.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class MediaUnavailable(StagedPoolError):
    """The host of an image's URL failed; the same request may succeed later.

    Args:
        message: The failure.
        index: Index of the input with the image, if known.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class MediaTimedOut(MediaUnavailable):
    """The host of an image's URL did not answer in time."""


class StageFailed(StagedPoolError):
    """A worker of a stage crashed on this request: a bug of ours, logged with its traceback."""

    def __init__(self, message: str, *, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class PluginFailed(StagedPoolError):
    """A hook of a plugin failed: a bug of the plugin, logged with its traceback.

    Args:
        message: The failure.
        plugin: Name of the plugin.
        hook: Name of the hook.
    """

    def __init__(self, message: str, *, plugin: str, hook: str) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.hook = hook


class OutOfMemory(StagedPoolError):
    """Memory ran out, on the device or in the process; a smaller batch or a retry may succeed."""


class DeviceLost(StagedPoolError):
    """The device does not answer, or cannot be trusted; only a new process helps."""


def detached(error: StagedPoolError) -> StagedPoolError:
    """Copy an error without its traceback.

    A traceback keeps frames alive, and these keep the bodies of requests. Each caller gets its own copy, with its own
    index and traceback.
    """
    return _made_again(type(error), error.args, error.__dict__)


def _made_again(kind: type[StagedPoolError], args: tuple[object, ...], fields: Mapping[str, object]) -> StagedPoolError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
