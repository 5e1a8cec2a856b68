"""Traces in the headers of requests, and the choice of those that begin here."""

from __future__ import annotations

from random import Random

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from staged_pool.api.tracing.trace_context import RootSampler, TraceParent, new_span_id, new_trace_id, trace_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True)])
def test_a_header_names_trace_span_and_whether_it_is_sampled(flags: str, sampled: bool) -> None:
    found = trace_parent(f"00-{TRACE}-{SPAN}-{flags}".encode())
    assert found == TraceParent(int(TRACE, 16), int(SPAN, 16), int(flags, 16))
    assert found is not None
    assert found.sampled == sampled


def test_later_versions_may_have_more_fields() -> None:
    assert trace_parent(f"01-{TRACE}-{SPAN}-01-more".encode()) is not None


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_an_invalid_header_is_none(header: str) -> None:
    assert trace_parent(header.encode()) is None


@pytest.mark.parametrize("ratio", [0.0, 1e-6, 0.01, 0.5, 1.0])
def test_the_same_traces_are_chosen_as_by_the_sampler_of_opentelemetry(ratio: float) -> None:
    ours, theirs, random = RootSampler(ratio), TraceIdRatioBased(ratio), Random(1)
    ids = [random.getrandbits(128) for _ in range(500)]
    ids += [0, 1, 2**64 - 1, 2**128 - 1, theirs.bound, max(theirs.bound - 1, 0)]
    assert [ours.chooses(each) for each in ids] == [
        theirs.should_sample(None, each, "").decision is Decision.RECORD_AND_SAMPLE for each in ids
    ]


def test_new_ids_fit_their_fields() -> None:
    assert all(0 < new_trace_id() < 2**128 and 0 < new_span_id() < 2**64 for _ in range(100))
