"""Zero-shot classification on the routes of classifiers: labels of the caller, instead of those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.dialects.pooling import Narrowed
from staged_pool.api.wire.exchange import Body
from staged_pool.runtime import arguments
from staged_pool.runtime.requests import HYPOTHESIS
from staged_pool.runtime.tasks.zero_shot import entailment


class LabelSettings(TypedDict):
    """Fields of a `ClassifyRequest` for the labels of the caller."""

    candidate_labels: tuple[str, ...] | None
    hypothesis_template: str
    multi_label: bool


def label_settings(
    labels: str | list[str] | None, hypothesis_template: str | None, multi_label: bool | None
) -> LabelSettings:
    """Return the fields of a request; a null is a field that is left out."""
    return {
        "candidate_labels": arguments.candidate_labels(labels),
        "hypothesis_template": HYPOTHESIS if hypothesis_template is None else hypothesis_template,
        "multi_label": multi_label is True,
    }


def has_parameters(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Tell if `parameters` has labels, as in the Hugging Face inference API."""
    parameters = fields.get("parameters")
    if parameters is None or json_decode.shape(parameters) != (0, b"{"):
        return False
    return "candidate_labels" in json_decode.given_fields(parameters)


def narrowed(body: Body) -> Narrowed | None:
    """Return the conditions of a body with labels on the model; None for a body without.

    Raises:
        InvalidInput: The body is not a JSON object.
    """
    fields = json_decode.given_fields(body)
    if "candidate_labels" not in fields and not has_parameters(fields):
        return None
    # No model is unable: the plan of an unfit one names its labels.
    return Narrowed(able=lambda card: True, meant=lambda card: entailment(card) is not None)
