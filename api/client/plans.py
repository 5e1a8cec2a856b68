"""A call as requests and the reading of their answers: pure, and the same for both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from staged_pool.client.batches import Stretch, cut
from staged_pool.client.contents import Form, Given, form, written
from staged_pool.client.exchange import Answer, Request
from staged_pool.client.progress import Progress
from staged_pool.runtime.requests import Image, PairInput, TextInput

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Options:
    """What the calls of a client have in common."""

    model: str | None
    batch_items: int

    def fields(self, model: str | None, **fields: object) -> dict[str, object]:
        """Of a body that asks `model`, or the client's own; those that are None are left to the server."""
        asked = self.model if model is None else model
        return {name: value for name, value in {"model": asked, **fields}.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Part:
    """One request of a call."""

    number: int
    stretch: Stretch
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[P, R]):
    """What is asked of the server, in one request or several."""

    total: int
    """Inputs."""
    parts: Callable[[], Iterator[Part]]
    """Made one by one, as they are sent."""
    read: Callable[[Answer, int], P]
    """What the answer to a request for so many inputs holds."""
    join: Callable[[Sequence[P]], R]
    """The result of the parts, which are in order."""
    timeout_s: float | None
    """None: the client's own."""
    progress: Progress = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What is asked of the server, in requests whose answers are read in lines."""

    total: int
    parts: Iterator[Part]
    timeout_s: float | None


def source(given: TextInput | PairInput | Image) -> Given:
    """As it is sent."""
    if isinstance(given, PairInput):
        return given.first, given.second
    return given if isinstance(given, Image) else given.source


def parts_of(
    own: Options,
    path: str,
    inputs: Sequence[Given],
    fields: Callable[[Sequence[Any]], dict[str, object]],
    *,
    form_of: Callable[[Given], Form] = form,
    streamed: bool = False,
) -> Iterator[Part]:
    """Requests for some of the inputs each.

    Args:
        own: Of the client.
        path: Of the route.
        inputs: Of the call.
        fields: Of the body of a request for these inputs.
        form_of: See `cut`.
        streamed: See `Request`.
    """
    for number, stretch in enumerate(cut(inputs, max_items=own.batch_items, form_of=form_of)):
        some = inputs[stretch.first : stretch.last]
        yield Part(number, stretch, Request(path=path, fields=fields(some), streamed=streamed))


def with_inputs(common: Mapping[str, object], some: Sequence[Given]) -> dict[str, object]:
    """The body of a request that has `input`."""
    shared = form(some[0]).fields if some else {}
    return {**common, **shared, "input": [written(given) for given in some]}


def batched(
    own: Options,
    path: str,
    inputs: Sequence[Given],
    common: Mapping[str, object],
    *,
    read: Callable[[Answer, int], P],
    join: Callable[[Sequence[P]], R],
    timeout_s: float | None,
    progress: Progress,
) -> Call[P, R]:
    """A call of which each request has the fields in common and some of the inputs."""
    parts = partial(parts_of, own, path, inputs, partial(with_inputs, common))
    return Call(total=len(inputs), parts=parts, read=read, join=join, timeout_s=timeout_s, progress=progress)


def single(request: Request, read: Callable[[Answer], P], timeout_s: float | None) -> Call[P, P]:
    """A call that is one request."""
    return Call(
        total=1,
        parts=lambda: iter((Part(0, Stretch(0, 1), request),)),
        read=lambda answer, count: read(answer),
        join=lambda parts: parts[0],
        timeout_s=timeout_s,
    )
