"""Zero-shot classification over HTTP: the plain form, that of the Hugging Face inference API, and our client."""

from __future__ import annotations

from typing import Any, Final

import huggingface_hub
import numpy as np
import pytest
from numpy.testing import assert_allclose

import staged_pool
from tests.dialects.answers import answer, rejection
from tests.dialects.conftest import ClientOf
from tests.models.conftest import TinyFolder
from tests.models.heads.test_zero_shot import expected

NLI: Final = "ce-nli-3label"
OTHER: Final = "seqcls-multiclass"
TEXTS: Final = ["The statement is executed.", "A module", "What does the operator yield?"]
LABELS: Final = ["a program", "food", "a question"]
LONG: Final = "the statement yields a module " * 60


def test_the_plain_form(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    client, wanted = client_of(NLI), expected(tiny_folder(NLI), TEXTS, LABELS)
    got = answer(client, "/classify", input=TEXTS, candidate_labels=LABELS)
    assert got["labels"] == LABELS
    assert_allclose([row["probs"] for row in got["data"]], wanted, atol=1e-5)
    assert [row["label"] for row in got["data"]] == [LABELS[place] for place in wanted.argmax(axis=1)]
    assert [row["num_classes"] for row in got["data"]] == [3, 3, 3]
    pairs = [[text, f"This example is {label}."] for text in TEXTS for label in LABELS]
    assert got["usage"]["prompt_tokens"] == answer(client, "/classify", input=pairs)["usage"]["prompt_tokens"]
    one = answer(client, "/classify", input=TEXTS[0], candidate_labels=", ".join(LABELS))
    assert_allclose(one["data"][0]["probs"], wanted[0], atol=1e-5)
    own = {"hypothesis_template": "Of {}: so!", "multi_label": True}
    got = answer(client, "/classify", input=TEXTS, candidate_labels=LABELS, **own)
    wanted = expected(tiny_folder(NLI), TEXTS, LABELS, **own)
    assert_allclose([row["probs"] for row in got["data"]], wanted, atol=1e-5)
    ordered = answer(client, "/classify", input=TEXTS, candidate_labels=LABELS, raw_scores=False, **own)
    assert ordered["object"] == "classify"
    assert_allclose([row[0]["score"] for row in ordered["data"]], wanted.max(axis=1), atol=1e-5)


@pytest.mark.parametrize("path", ["/predict", "/", "/invocations"])
def test_hugging_faces_form(path: str, client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    """A list of texts is a list of inputs, not a pair. Long texts are cut."""
    client, texts = client_of(NLI), [TEXTS[0], LONG]
    wanted = expected(tiny_folder(NLI), texts, LABELS, multi_label=True)
    parameters = {"candidate_labels": LABELS, "multi_label": True, "hypothesis_template": None}
    got = answer(client, path, inputs=texts, parameters=parameters)
    for row, scores in zip(got, wanted, strict=True):
        assert [entry["label"] for entry in row] == [LABELS[place] for place in np.argsort(-scores)]
        assert_allclose([entry["score"] for entry in row], np.sort(scores)[::-1], atol=1e-5)
    alone = answer(client, path, inputs=texts[0], parameters=parameters)
    assert_allclose([entry["score"] for entry in alone], [entry["score"] for entry in got[0]], atol=1e-5)


def test_the_client_of_the_hub(client_of: ClientOf, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it would not even ask this machine
    huggingface_hub.close_session()
    hub = huggingface_hub.InferenceClient(str(client_of(NLI).base_url), token="-")
    found = hub.zero_shot_classification(TEXTS[0], LABELS, multi_label=True)
    wanted = expected(tiny_folder(NLI), TEXTS[:1], LABELS, multi_label=True)[0]
    assert {each.label: pytest.approx(each.score, abs=1e-5) for each in found} == dict(zip(LABELS, wanted, strict=True))
    assert found[0].score == max(each.score for each in found)
    huggingface_hub.close_session()


def test_our_client_divides_long_lists(client_of: ClientOf, tiny_folder: TinyFolder) -> None:
    """Two requests of two texts and one of one: a batch of 6 items has 2 texts with 3 labels each."""
    client, texts = client_of(NLI), [*TEXTS, *TEXTS[:2]]
    with staged_pool.Client(str(client.base_url), batch_items=6) as ours:
        found = ours.classify(texts, candidate_labels=LABELS, hypothesis_template="Of {}.")
    assert found.labels == tuple(LABELS)
    assert_allclose(found.scores, expected(tiny_folder(NLI), texts, LABELS, hypothesis_template="Of {}."), atol=1e-5)


def test_of_several_classifiers_the_one_that_can_is_asked(client_of: ClientOf) -> None:
    client = client_of(OTHER, NLI)
    assert answer(client, "/classify", input="a", candidate_labels=LABELS)["model"] == NLI
    assert len(answer(client, "/predict", inputs="a", parameters={"candidate_labels": LABELS})) == 3
    assert "several served models give labels" in rejection(client, "/classify", 400, input="a")["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": ["a", LONG]}, "input", "input[1]: This model's maximum context length"),
        ({"input": ["a", ["b", "c"]]}, "input", "input"),
        ({"input": [["a", "b"]]}, "input", "input[0]: With candidate_labels each input must be a text"),
        ({"input": [[1, 2]]}, "input", "input[0]: With candidate_labels each input must be a text"),
        ({"candidate_labels": []}, "candidate_labels", "candidate_labels has no label"),
        ({"candidate_labels": " , "}, "candidate_labels", "candidate_labels has no label"),
        ({"candidate_labels": ["a", "a"]}, "candidate_labels", "Label 1 of candidate_labels stands there twice"),
        ({"candidate_labels": ["a", 1]}, "candidate_labels", "candidate_labels[1]: Expected `str`"),
        ({"candidate_labels": None, "multi_label": True}, "multi_label", "multi_label is for candidate_labels"),
        (
            {"candidate_labels": [LONG[:1000]], "truncate_prompt_tokens": -1},
            "candidate_labels",
            "One of candidate_labels has at least",
        ),
        ({"hypothesis_template": "so"}, "hypothesis_template", "hypothesis_template must have {} exactly once"),
        ({"candidate_labels": [*map(str, range(3000))]}, "candidate_labels", "are 3000 pairs; a request may have 2048"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], param: str, said: str, client_of: ClientOf) -> None:
    body = {"input": "a", "candidate_labels": LABELS, **fields}
    status = 413 if "pairs" in said else 400
    error = rejection(client_of(NLI), "/classify", status, **body)["error"]
    assert (error["param"], said in error["message"]) == (param, True), error


def test_errors_are_in_the_words_of_the_dialect(client_of: ClientOf) -> None:
    client = client_of(NLI)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"candidate_labels": []}, "parameters.candidate_labels has no label; at least one is needed."),
        ({"candidate_labels": ["a"], "hypothesis_template": ""}, "parameters.hypothesis_template must have {} exactly"),
    ]
    for given, said in wrong:
        error = rejection(client, "/predict", 422, inputs="a", parameters=given)
        assert error["error"].startswith(said)
    for path in ("/predict", "/", "/invocations"):
        error = rejection(client, path, 422, inputs="a", candidate_labels=LABELS)
        assert error["error"].startswith("candidate_labels: expected in `parameters`")
    for field, value in (("multi_label", True), ("hypothesis_template", "{}")):
        error = rejection(client, "/predict", 422, inputs="a", parameters={field: value})
        assert error["error"] == f"parameters.{field} is for parameters.candidate_labels, which are missing."
    parameters = {"candidate_labels": LABELS}
    error = rejection(client, "/predict", 422, inputs=["a", ["b"]], parameters=parameters)
    assert error["error"] == "inputs[1]: expected a text, which is read with each label"
    error = rejection(client, "/predict", 422, inputs=["a", LONG], parameters=parameters, truncate=False)
    assert error["error"].startswith("inputs[1]: This model's maximum context length")
    error = rejection(client_of(OTHER), "/", 501, inputs="a", parameters=parameters)
    assert error["error"] == (
        f"The model `{OTHER}` cannot choose among candidate labels: that needs a classifier of natural "
        "language inference, with a label that begins with `entail`. Its labels: anger, joy, fear, love."
    )
