"""Plans of calls: their requests, and functions to read and join the answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from staged_pool.client.batches import split
from staged_pool.client.contents import Form, Given, encoded, form
from staged_pool.client.exchange import ServerAnswer, ServerRequest
from staged_pool.runtime.input_ranges import InputRange
from staged_pool.runtime.progress import Progress
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
class BatchRequest:
    """Request of a call for one batch of its inputs."""

    number: int
    input_range: InputRange
    request: ServerRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan(Generic[P, R]):
    """Plan of a call: one request or several."""

    total: int
    """Number of inputs."""
    batches: Callable[[], Iterator[BatchRequest]]
    """Returns the requests, which are made while they are sent."""
    read: Callable[[ServerAnswer, int], P]
    """Reads the answer to a request; the second argument is its number of inputs."""
    join: Callable[[Sequence[P]], R]
    """Joins the results of all requests, in their order."""
    timeout_s: float | None
    """Limit in seconds. None: the client's own."""
    progress: Progress = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Plan of a call with streamed answers."""

    total: int
    batches: Iterator[BatchRequest]
    timeout_s: float | None


def source(given: TextInput | PairInput | Image) -> Given:
    """Return an input as it is sent."""
    if isinstance(given, PairInput):
        return given.first, given.second
    return given if isinstance(given, Image) else given.source


def batch_requests(
    defaults: CallDefaults,
    path: str,
    inputs: Sequence[Given],
    fields: Callable[[Sequence[Any]], dict[str, object]],
    *,
    form_of: Callable[[Given], Form] = form,
    streamed: bool = False,
    whole: bool = False,
    items_each: int = 1,
) -> Iterator[BatchRequest]:
    """Yield the requests of a call, one for each batch of inputs.

    Args:
        defaults: Settings of the client.
        path: Path of the route.
        inputs: Inputs of the call.
        fields: Returns the fields of the body for a batch.
        form_of: See `split`.
        streamed: See `ServerRequest`.
        whole: Send all inputs in one request.
        items_each: Items that the server makes of an input.
    """
    most = max(1, defaults.batch_items // max(1, items_each))
    ranges = iter((InputRange(0, len(inputs)),)) if whole else split(inputs, max_items=most, form_of=form_of)
    for number, input_range in enumerate(ranges):
        some = inputs[input_range.first : input_range.last]
        yield BatchRequest(number, input_range, ServerRequest(path=path, fields=fields(some), streamed=streamed))


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
    read: Callable[[ServerAnswer, int], P],
    join: Callable[[Sequence[P]], R],
    timeout_s: float | None,
    progress: Progress,
    whole: bool = False,
    items_each: int = 1,
) -> CallPlan[P, R]:
    """Make a call that sends its inputs in batches with the same other fields; see `batch_requests`."""
    batches = partial(
        batch_requests, defaults, path, inputs, partial(with_inputs, common), whole=whole, items_each=items_each
    )
    return CallPlan(total=len(inputs), batches=batches, read=read, join=join, timeout_s=timeout_s, progress=progress)


def single(request: ServerRequest, read: Callable[[ServerAnswer], P], timeout_s: float | None) -> CallPlan[P, P]:
    """Make a call of one request."""
    return CallPlan(
        total=1,
        batches=lambda: iter((BatchRequest(0, InputRange(0, 1), request),)),
        read=lambda answer, count: read(answer),
        join=lambda results: results[0],
        timeout_s=timeout_s,
    )
