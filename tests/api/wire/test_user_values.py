"""JSON of values of users: whatever a value does, the error names the output."""

from __future__ import annotations

from typing import Any

import pytest

from staged_pool.api.wire.pipelines import encode_lines, encode_result
from staged_pool.runtime.pipelines.items import PipelineItem, PipelineResult
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StageFailed
from tests.support.user_code import BAD_ENDS, BadEnd


class Walked(dict[str, int]):
    """A value that ends so when it is walked through."""

    def __init__(self, end: BadEnd) -> None:
        super().__init__(a=1)
        self._end = end

    def items(self) -> Any:
        self._end.called()
        return super().items()


def both(value: object) -> None:
    """Write an answer with a value, and a line."""
    item = PipelineItem(index=0, value=value)
    with pytest.raises(StageFailed) as whole:
        encode_result(
            PipelineResult(items=(item,), errors=(), usage=Usage(0), stage_s={}), pipeline="it", request_id="r"
        )
    with pytest.raises(StageFailed) as line:
        encode_lines([item], pipeline="it")
    assert str(whole.value) == str(line.value)
    raise line.value


@pytest.mark.parametrize("end", BAD_ENDS)
def test_a_value_that_cannot_be_walked_is_an_output_that_cannot_be_written(end: BadEnd) -> None:
    with pytest.raises(StageFailed, match=f"The output of the pipeline `it` cannot be written: {end.kind}"):
        both([Walked(end)])


def test_a_value_that_contains_itself_and_one_of_no_json_are_told_apart() -> None:
    tree: dict[str, Any] = {"children": []}
    tree["children"].append({"parent": tree})
    with pytest.raises(StageFailed, match=r"is no JSON: it contains itself, or is nested too deeply\.$"):
        both(tree)
    with pytest.raises(StageFailed, match=r"is no JSON: Type is not JSON serializable: object\.$"):
        both({"a": object()})
