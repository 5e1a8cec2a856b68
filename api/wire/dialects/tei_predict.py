"""Text classification of text-embeddings-inference and of the hub.

Their clients share the path, and not the answer. The hub's clients always send `parameters`, and those of
text-embeddings-inference never do. So `parameters` ask for the form of the hub: a list of texts is several inputs, and
the answer has a list of labels for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.chunked_json import Pieces, dump, dump_list
from staged_pool.api.wire.dialects.tei import TruncationFields, empty
from staged_pool.api.wire.dialects.zero_shot import label_settings
from staged_pool.api.wire.exchange import Body, Write
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths
from staged_pool.api.wire.fields import Dimensions
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import ClassifyRequest, PairInput, TextInput
from staged_pool.runtime.results import ClassifyResult
from staged_pool.runtime.tasks.classify import activated
from staged_pool.stages.errors import Words

Pairs: TypeAlias = str | list[str | list[str]]


class ZeroShotParameters(msgspec.Struct, kw_only=True):
    """Parameters of a zero-shot classification."""

    candidate_labels: str | list[str] | None = None
    """Labels to choose among, for a model of natural language inference (zero-shot classification)."""
    hypothesis_template: str | None = None
    """Statement that each label completes, with {} for the label. None: `This example is {}.`"""
    multi_label: bool | None = None
    """Score each label by itself. Otherwise the scores of a text add up to 1."""


class PredictParameters(ZeroShotParameters, kw_only=True):
    """Parameters of a text classification; those that are not named here are ignored."""

    top_k: Dimensions | None = None
    """Number of labels to keep of each text, the best first. None: all."""
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    """Activation in place of the model's own; `none` gives logits."""


class PredictBody(TruncationFields, kw_only=True):
    """Body of `/predict`; fields that are not named here are ignored."""

    inputs: Pairs
    """With `parameters`, one text or several."""
    raw_scores: bool | None = None
    parameters: PredictParameters | None = None
    """Parameters of the Hugging Face inference API. With them, the answer has the form of that API."""
    candidate_labels: str | list[str] | None = None
    """Rejected: here labels of the caller belong in `parameters`."""


_PREDICT: Final = msgspec.json.Decoder(PredictBody)


@dataclass(frozen=True, slots=True)
class Shown:
    """Form of the labels of an answer."""

    single: bool
    """The labels of one input alone, and not a list of these for each input."""
    top_k: int | None = None
    """Number of labels to keep of each input. None: all."""
    function: Literal["sigmoid", "softmax"] | None = None
    """Activation in place of that of the scores. None: the scores as they are."""


def read_predict(
    body: Body, card: ModelCard, *, auto_truncate: bool, nested: bool = True
) -> tuple[ClassifyRequest, Write]:
    """See `Read` and `read_embed`.

    A text or `[text]` is one input, `[text, text]` is one pair, and a list of lists is a list of inputs. With
    `parameters` a list of texts is a list of inputs.

    Args:
        body: See `Read`.
        card: See `Read`.
        auto_truncate: See `read_embed`.
        nested: With `parameters`, the answer to one text is a list of one list, as the hub's client reads it.
    """
    fields = json_decode.decode(_PREDICT, body)
    if not fields.inputs:
        raise empty("inputs")
    if fields.candidate_labels is not None:
        raise field_error("candidate_labels", 'expected in `parameters`: {"parameters": {"candidate_labels": [...]}}')
    parameters = fields.parameters or PredictParameters()
    of_caller, function = parameters.candidate_labels is not None, parameters.function_to_apply
    if of_caller and function is not None:
        raise field_error("parameters.function_to_apply", "is for the model's own labels, not for candidate_labels")
    inputs, places = _inputs(fields, auto_truncate)
    single = not places.several and (fields.parameters is None or of_caller or not nested)
    request = ClassifyRequest(
        inputs=inputs,
        words=_words(places),
        activate=function != "none" if function is not None else not fields.raw_scores,
        **label_settings(parameters.candidate_labels, parameters.hypothesis_template, parameters.multi_label),
    )
    shown = Shown(single, parameters.top_k, None if function == "none" else function)
    return request, partial(encode_predict, shown=shown)


def _words(places: InputPaths) -> Words:
    names = {name: f"parameters.{name}" for name in ZeroShotParameters.__struct_fields__}
    return Words({"input": "inputs", "max_tokens": "truncate", **names}, places)


def _inputs(fields: PredictBody, auto_truncate: bool) -> tuple[tuple[TextInput | PairInput, ...], InputPaths]:
    """Return the inputs of a body, and their places in it."""
    given, parameters = fields.inputs, fields.parameters
    if isinstance(given, str):
        return (fields.text(given, auto_truncate),), InputPaths("inputs", several=False)
    if parameters is None and isinstance(given[0], str):
        places = InputPaths("inputs", several=False)
        return (_predicted(given, places, 0, fields, auto_truncate),), places
    places = InputPaths("inputs", several=True)
    only_texts = parameters is not None and parameters.candidate_labels is not None
    inputs: list[TextInput | PairInput] = []
    for index, each in enumerate(given):
        if only_texts and not isinstance(each, str):
            raise field_error(places("inputs", index), "expected a text, which is read with each label", index)
        if parameters is not None and isinstance(each, str):
            inputs.append(fields.text(each, auto_truncate))
        else:
            inputs.append(_predicted(each, places, index, fields, auto_truncate))
    return tuple(inputs), places


def _predicted(
    given: str | Sequence[str | list[str]], places: InputPaths, index: int, fields: PredictBody, auto_truncate: bool
) -> TextInput | PairInput:
    texts = [text for text in given if isinstance(text, str)] if not isinstance(given, str) else []
    if len(texts) != len(given) or len(texts) not in (1, 2):
        what = "expected a list of one text, or of the two texts of a pair"
        raise field_error(places("inputs", index), what, index)
    text = fields.text(texts[0], auto_truncate)
    if len(texts) == 1:
        return text
    first, second = texts
    return PairInput(first=first, second=second, max_tokens=text.max_tokens, truncate_side=text.truncate_side)


def encode_predict(result: ClassifyResult, /, shown: Shown, *, request_id: str, created: int) -> Pieces:
    """Write the labels of each input, the highest score first; see `Write`.

    Args:
        result: Scores of the labels. Labels without a name are called `LABEL_0`, `LABEL_1`, ...
        shown: Form of the answer.
        request_id: See `Write`.
        created: See `Write`.
    """
    if shown.function is not None:
        result = replace(result, scores=activated(result.sort_keys, shown.function))
    rows = labels_by_score(result, shown.top_k)
    count = min(result.scores.shape[1], shown.top_k or result.scores.shape[1])
    return dump(next(rows)) if shown.single else dump_list(rows, item_values=4 * count)


def labels_by_score(result: ClassifyResult, top_k: int | None = None) -> Iterator[list[dict[str, object]]]:
    """Yield the labels and scores of each input, the highest score first; `top_k` of them."""
    count = result.scores.shape[1]
    names = result.labels if len(result.labels) == count else [f"LABEL_{place}" for place in range(count)]
    for row, keys in zip(result.scores, result.sort_keys, strict=True):
        order = np.argsort(-keys, kind="stable")[:top_k].tolist()
        yield [{"label": names[place] or f"LABEL_{place}", "score": row[place]} for place in order]
