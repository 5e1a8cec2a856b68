"""Calls: their requests, and functions to read and join the answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from staged_pool.client.batches import InputRange, split
from staged_pool.client.contents import Form, Given, encoded, form
from staged_pool.client.exchange import Answer, Request
from staged_pool.client.progress import Progress
from staged_pool.runtime.requests import Image, PairInput, TextInput

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """Settings of a client that apply to all its calls."""

    model: str | None
    batch_items: int

    def fields(self, model: str | None, **fields: object) -> dict[str, object]:
        """Return the fields of a body without those that are None; the model is `model` or the client's own."""
        asked = self.model if model is None else model
        return {name: value for name, value in {"model": asked, **fields}.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Part:
    """One request of a call."""

    number: int
    input_range: InputRange
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[P, R]):
    """One call, as one request or several."""

    total: int
    """Number of inputs."""
    parts: Callable[[], Iterator[Part]]
    """Returns the requests, which are made while they are sent."""
    read: Callable[[Answer, int], P]
    """Reads the answer to a request; the second argument is its number of inputs."""
    join: Callable[[Sequence[P]], R]
    """Joins the results of all requests, in their order."""
    timeout_s: float | None
    """Limit in seconds. None: the client's own."""
    progress: Progress = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One call with streamed answers."""

    total: int
    parts: Iterator[Part]
    timeout_s: float | None


def source(given: TextInput | PairInput | Image) -> Given:
    """Return an input as it is sent."""
    if isinstance(given, PairInput):
        return given.first, given.second
    return given if isinstance(given, Image) else given.source


def parts_of(
    defaults: CallDefaults,
    path: str,
    inputs: Sequence[Given],
    fields: Callable[[Sequence[Any]], dict[str, object]],
    *,
    form_of: Callable[[Given], Form] = form,
    streamed: bool = False,
) -> Iterator[Part]:
    """Yield the requests of a call, one for each batch of inputs.

    Args:
        defaults: Settings of the client.
        path: Path of the route.
        inputs: Inputs of the call.
        fields: Returns the fields of the body for a batch.
        form_of: See `split`.
        streamed: See `Request`.
    """
    for number, input_range in enumerate(split(inputs, max_items=defaults.batch_items, form_of=form_of)):
        some = inputs[input_range.first : input_range.last]
        yield Part(number, input_range, Request(path=path, fields=fields(some), streamed=streamed))


def with_inputs(common: Mapping[str, object], some: Sequence[Given]) -> dict[str, object]:
    """Return the fields of a body with `input`."""
    shared = form(some[0]).fields if some else {}
    return {**common, **shared, "input": [encoded(given) for given in some]}


def batched(
    defaults: CallDefaults,
    path: str,
    inputs: Sequence[Given],
    common: Mapping[str, object],
    *,
    read: Callable[[Answer, int], P],
    join: Callable[[Sequence[P]], R],
    timeout_s: float | None,
    progress: Progress,
) -> Call[P, R]:
    """Make a call that sends its inputs in batches, with the same other fields."""
    parts = partial(parts_of, defaults, path, inputs, partial(with_inputs, common))
    return Call(total=len(inputs), parts=parts, read=read, join=join, timeout_s=timeout_s, progress=progress)


def single(request: Request, read: Callable[[Answer], P], timeout_s: float | None) -> Call[P, P]:
    """Make a call of one request."""
    return Call(
        total=1,
        parts=lambda: iter((Part(0, InputRange(0, 1), request),)),
        read=lambda answer, count: read(answer),
        join=lambda parts: parts[0],
        timeout_s=timeout_s,
    )
