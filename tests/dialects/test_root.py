"""text-embeddings-inference at its root, where clients ask that know no path: the hub's, LiteLLM's, chromadb's."""

from __future__ import annotations

import pytest
from numpy.testing import assert_allclose

from tests.dialects.answers import answer, rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]


def test_an_embedder_gives_vectors_and_similarities(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    for inputs in (TEXTS[0], TEXTS):
        assert answer(client, "/", inputs=inputs) == answer(client, "/embed", inputs=inputs)
    pair = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    assert_allclose(answer(client, "/", inputs=pair), answer(client, "/similarity", inputs=pair), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("seqcls-multiclass", "/predict", {"inputs": TEXTS[0]}),
        ("ce-bert-1label", "/rerank", {"query": TEXTS[0], "texts": TEXTS}),
        ("ce-bert-1label", "/predict", {"inputs": [[TEXTS[0], TEXTS[1]]]}),
        ("splade-bert", "/embed_sparse", {"inputs": TEXTS}),
        ("tokcls-ner", "/classify_tokens", {"inputs": TEXTS[0]}),
    ],
)
def test_the_kind_of_the_model_says_what_is_wanted(
    kind: str, path: str, body: dict[str, object], client_of: ClientOf
) -> None:
    client = client_of(kind)
    assert answer(client, "/", **body) == answer(client, path, **body)


def test_entities_of_several_texts_are_lists(client_of: ClientOf) -> None:
    client = client_of("tokcls-ner")
    many = answer(client, "/", inputs=TEXTS)
    for entities, text in zip(many, TEXTS, strict=True):
        alone = answer(client, "/classify_tokens", inputs=text)
        assert [each | {"score": 0} for each in alone] == [each | {"score": 0} for each in entities]
        assert_allclose([each["score"] for each in alone], [each["score"] for each in entities], atol=1e-5)
    assert answer(client, "/invocations", inputs=TEXTS[0])[0].keys() == {
        "entity_group",
        "score",
        "word",
        "start",
        "end",
    }
    for wrong in ([1], [["a"]], 1):
        assert rejection(client, "/", 422, inputs=wrong)["error_type"] == "Validation"


def test_of_several_models_the_first_decides_what_the_fields_do_not(client_of: ClientOf) -> None:
    client = client_of("seqcls-multiclass", EMBEDDER)
    assert answer(client, "/", inputs="a") == answer(client, "/predict", inputs="a")
    assert len(answer(client, "/", inputs={"source_sentence": "a", "sentences": ["b", "c"]})) == 2


def test_errors_are_in_its_words(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    assert rejection(client, "/", 422, input="a") == {
        "error": "The body has neither `inputs`, nor `query` and `texts`",
        "error_type": "Validation",
    }
    assert rejection(client, "/", 422, inputs=1)["error_type"] == "Validation"
    assert rejection(client_of("colbert-pylate"), "/", 501, inputs="a")["error_type"] == "Backend"
    assert client.get("/").headers["content-type"].startswith("text/html")
