"""Zero-shot classification: scores of the caller's labels, by a model of natural language inference.

Such a model reads a text (premise) with a statement about it (hypothesis), and one of its labels means that the
statement follows. The rules are those of `ZeroShotClassificationPipeline` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from string import Formatter

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import MAX_LABEL_CHARACTERS, ClassifyRequest, Output, PairInput, TextInput
from staged_pool.runtime.results import ClassifyResult, Usage
from staged_pool.runtime.tasks.classify import LABELS_ONLY, activated, label_logits
from staged_pool.stages.errors import InvalidInput, Unsupported, shortened
from staged_pool.stages.work import Plan


def entailment(card: ModelCard) -> int | None:
    """Return the place of the label that means that the hypothesis follows; None if the model has none.

    It is the first whose name begins with `entail`, in upper or lower case.
    """
    if Output.LABELS not in card.outputs or "text" not in card.lanes or len(card.labels) < 2:
        return None
    return next((place for place, name in enumerate(card.labels) if name.lower().startswith("entail")), None)


def contradiction(entailed: int) -> int:
    """Return the place of the label that a label by itself is compared with: the first, or the last if that entails."""
    return -1 if entailed == 0 else 0


def check(labels: Sequence[str], template: str) -> None:
    """Check the labels of a caller, and the statement that they complete.

    Raises:
        InvalidInput: See `plan`.
    """
    _check_labels(labels)
    _sides(template)


def plan(request: ClassifyRequest, card: ModelCard) -> Plan[ModelInput]:
    """Plan a pair of each text with each label.

    Raises:
        Unsupported: The model has no label that means entailment.
        InvalidInput: The labels, the template or a text are not of the right kind.
    """
    labels = request.candidate_labels or ()
    entailed = entailment(card)
    if entailed is None:
        has = ", ".join(map(shortened, card.labels[:8])) + (", ..." if len(card.labels) > 8 else "")
        raise Unsupported(
            f"The model `{card.name}` cannot choose among candidate labels: that needs a classifier of natural "
            f"language inference, with a label that begins with `entail`. Its labels: {has or 'none'}."
        )
    _check_labels(labels)
    before, after = _sides(request.hypothesis_template)
    hypotheses = [before + label + after for label in labels]
    texts = [_text(given, index) for index, given in enumerate(request.inputs)]
    inputs = [
        ModelInput(
            PairInput(
                first=text,
                second=hypothesis,
                max_tokens=given.max_tokens,
                truncate_side=given.truncate_side,
                cuts_first_only=True,
            ),
            LABELS_ONLY,
            card.default_prompt,
        )
        for text, given in texts
        for hypothesis in hypotheses
    ]
    return Plan(inputs, partial(_finish, request, card, entailed), locate=partial(_locate, len(labels)))


def _check_labels(labels: Sequence[str]) -> None:
    if not labels:
        raise InvalidInput("$candidate_labels has no label; at least one is needed.", param="candidate_labels")
    seen: set[str] = set()
    for place, label in enumerate(labels):
        if not label.strip():
            raise InvalidInput(f"Label {place} of $candidate_labels is empty.", param="candidate_labels")
        if len(label) > MAX_LABEL_CHARACTERS:
            message = f"Label {place} of $candidate_labels has more than {MAX_LABEL_CHARACTERS} characters."
            raise InvalidInput(message, param="candidate_labels")
        if label in seen:
            message = f"Label {place} of $candidate_labels stands there twice: each must be given once."
            raise InvalidInput(message, param="candidate_labels")
        seen.add(label)
        try:
            label.encode()
        except UnicodeEncodeError:
            message = f"Label {place} of $candidate_labels is not valid Unicode: it has half of a surrogate pair."
            raise InvalidInput(message, param="candidate_labels") from None


def _sides(template: str) -> tuple[str, str]:
    """Return the text before the label, and behind it. Double braces are single ones, as in `str.format`.

    Raises:
        InvalidInput: There is not exactly one place for the label, or the template is too long.
    """
    if len(template) > MAX_LABEL_CHARACTERS:
        message = f"$hypothesis_template has more than {MAX_LABEL_CHARACTERS} characters."
        raise InvalidInput(message, param="hypothesis_template")
    before, after, places = "", "", 0
    try:
        template.encode()
        for text, field, form, conversion in Formatter().parse(template):
            before, after = (before, after + text) if places else (before + text, after)
            if field is not None:
                places += 1 if (field in ("", "0") and not form and conversion is None) else 2
    except ValueError:  # a brace alone, or half of a surrogate pair
        places = 0
    if places != 1:
        raise InvalidInput(
            "$hypothesis_template must have {} exactly once, where the label goes, such as `This example is {}.`; "
            "other braces are written twice.",
            param="hypothesis_template",
        )
    return before, after


def _text(given: object, index: int) -> tuple[str, TextInput]:
    if not isinstance(given, TextInput) or not isinstance(given.source, str):
        message = "With $candidate_labels each input must be a text: the model reads it with each label."
        raise InvalidInput(message, param="input", index=index)
    if not given.add_special_tokens:
        message = "With $candidate_labels the special tokens between a text and its label cannot be left out."
        raise InvalidInput(message, param="add_special_tokens")
    return given.source, given


def _locate(labels: int, index: int) -> tuple[str, int]:
    return "input", index // labels


def _finish(
    request: ClassifyRequest, card: ModelCard, entailed: int, rows: Sequence[object], tokens: int
) -> ClassifyResult:
    """Score the labels.

    One label by itself: softmax over the logits of contradiction and entailment, which is the sigmoid of their
    difference. Several that exclude each other: softmax over their logits of entailment.
    """
    labels = request.candidate_labels or ()
    logits = label_logits(rows).reshape(len(request.inputs), len(labels), -1)
    if request.multi_label or len(labels) == 1:
        values = logits[..., entailed] - logits[..., contradiction(entailed)]
        scores = activated(values, "sigmoid")
    else:
        values = logits[..., entailed].copy()
        scores = activated(values, "softmax")
    return ClassifyResult(
        scores=scores if request.activate else values,
        labels=labels,
        usage=Usage(tokens),
        model=card.name,
        logits=values if request.activate else None,
    )
