"""The tiny models and their oracles are sound: what the tests of a server lean on, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.models import oracle, tiny
from tests.models.conftest import TinyFolder
from tests.models.images.drawing import drawing, encode, pixels
from tests.models.oracle import Array

TEXTS = ["A man is eating food.", "The stock market fell sharply today.", "naïve café, Ωmega 🙂", "short"]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[0], "Someone has a meal."), (TEXTS[2], TEXTS[3])]
LONG = "A function call with many arguments and one more. " * 60
APART = 1e-4
"""Results that should differ do so by far more than rounding."""


def differ(rows: Array | Sequence[Array]) -> bool:
    """True if all rows are finite and no two are the same."""
    return all(
        np.isfinite(one).all() and np.abs(one - other).max() > APART
        for place, one in enumerate(rows)
        for other in rows[:place]
    )


@pytest.mark.parametrize("kind", tiny.CROSS_ENCODERS)
def test_scores_depend_on_both_texts_and_on_their_order(kind: str, tiny_folder: TinyFolder) -> None:
    logits = oracle.scores(tiny_folder(kind), [*PAIRS, *((b, a) for a, b in PAIRS)], activate=False)
    assert logits.shape[0] == 6
    assert differ(logits)


@pytest.mark.parametrize("kind", [kind for kind in tiny.CROSS_ENCODERS if kind != "ce-qwen3-lm"])
def test_a_pair_that_is_too_long_is_cut(kind: str, tiny_folder: TinyFolder) -> None:
    found = oracle.scores(tiny_folder(kind), [(TEXTS[0], LONG), (LONG, TEXTS[0]), (LONG, LONG)], activate=False)
    assert differ(found)


@pytest.mark.parametrize("kind", ["ce-bert-1label", "ce-xlmr-reranker", "ce-modernbert", "ce-qwen3-seqcls"])
def test_the_activation_is_a_sigmoid_where_the_folder_says_it_or_nothing(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    logits = oracle.scores(folder, PAIRS, activate=False)
    assert np.allclose(oracle.scores(folder, PAIRS), 1 / (1 + np.exp(-logits)), atol=1e-6)


@pytest.mark.parametrize("kind", ["ce-bert-identity", "ce-bert-old", "ce-nli-3label", "ce-qwen3-lm"])
def test_no_activation_where_the_folder_says_so_or_has_several_labels(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    assert np.array_equal(oracle.scores(folder, PAIRS), oracle.scores(folder, PAIRS, activate=False))


def test_types_of_tokens_change_the_score_of_a_pair(tiny_folder: TinyFolder) -> None:
    model = oracle.loaded("CrossEncoder", tiny_folder("ce-bert-1label"))
    features = model.preprocess([PAIRS[0]])
    assert features["token_type_ids"].sum() > 0
    with_types = model.model(**_inputs(features)).logits.item()
    features["token_type_ids"] *= 0
    assert abs(with_types - model.model(**_inputs(features)).logits.item()) > APART


def test_a_language_model_scores_by_its_template(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("ce-qwen3-lm")
    plain = oracle.scores(folder, PAIRS)
    assert differ([plain, oracle.scores(folder, PAIRS, prompt="Find something else")])
    model = oracle.loaded("CrossEncoder", folder)
    prompt = model.tokenizer.decode(model.preprocess([PAIRS[0]])["input_ids"][0])
    assert prompt.startswith("<|im_start|>system\nJudge whether")
    assert f"<Query>: {PAIRS[0][0]}\n<Document>: {PAIRS[0][1]}<|im_end|>" in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")


def test_the_folder_of_a_language_model_is_the_one_that_is_saved(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("ce-qwen3-lm")
    oracle.loaded("CrossEncoder", folder).save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    for name in ("modules.json", "sentence_bert_config.json", "1_LogitScore/config.json", "chat_template.jinja"):
        ours, theirs = ((root / name).read_text() for root in (folder, tmp_path / "saved"))
        assert (ours if name.endswith("jinja") else json.loads(ours)) == (
            theirs if name.endswith("jinja") else json.loads(theirs)
        )


@pytest.mark.parametrize("kind", tiny.CLASSIFIERS)
def test_labels_depend_on_the_text(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    logits = oracle.labels(folder, [*TEXTS, LONG], activate=False)
    assert differ(logits)
    found = oracle.labels(folder, [*TEXTS, LONG])
    if kind == "seqcls-regression":
        assert np.array_equal(found, logits)
    elif kind in ("seqcls-multilabel", "reward-qwen3"):
        assert np.allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-6)
    else:
        assert np.allclose(found.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("kind", tiny.TOKEN_CLASSIFIERS)
def test_tokens_are_labelled(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    logits = oracle.token_labels(folder, TEXTS[0])
    assert logits.shape[1] == 5
    assert differ(logits)
    assert oracle.token_labels(folder, LONG).shape == (tiny.POSITIONS, 5)


@pytest.mark.parametrize("kind", tiny.TOKEN_CLASSIFIERS)
def test_entities_depend_on_the_aggregation(kind: str, tiny_folder: TinyFolder) -> None:
    text = "Unfortunately Guido van Rossum programmed extensively in Amsterdam, notwithstanding interpretability."
    found = {
        name: oracle.entities(tiny_folder(kind), text, name) for name in ("none", "simple", "first", "average", "max")
    }
    assert all(found.values())
    assert len({str(each) for each in found.values()}) == 5
    assert {each["entity_group"] for each in found["simple"]} == {"PER", "LOC"}


@pytest.mark.parametrize("kind", tiny.PROMPTED)
def test_vectors_depend_on_the_text(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    vectors = oracle.dense(folder, [*TEXTS, LONG])
    assert differ(vectors)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5) == (kind != "gte-modernbert-mean")
    assert vectors.shape[1] == tiny.WIDTH


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("e5-xlmr", ["query", "passage"]),
        ("qwen3-embed-left", ["query"]),
        ("qwen3-embed-right", ["query"]),
        ("gemma3-embed", ["query", "document", "Clustering"]),
        ("nomic-matryoshka", ["query", "document", "clustering"]),
        ("instructor-no-prompt", ["query"]),
        ("instructor-bpe-no-prompt", ["query"]),
        ("arctic-cls", ["query"]),
        ("bge-cls", ["query"]),
    ],
)
def test_a_prompt_changes_vectors(kind: str, names: list[str], tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    prompts = oracle.loaded("SentenceTransformer", folder).prompts
    plain = oracle.dense(folder, TEXTS)
    named = [oracle.dense(folder, TEXTS, prompt_name=name) for name in names]
    assert all(differ([plain[place], *(found[place] for found in named)]) for place in range(len(TEXTS)))
    for name, found in zip(names, named, strict=True):
        assert np.array_equal(found, oracle.dense(folder, TEXTS, prompt=prompts[name]))
        joined = oracle.dense(folder, [prompts[name] + text for text in TEXTS])
        assert np.allclose(found, joined, atol=1e-5) == ("no-prompt" not in kind)


def test_the_side_of_padding_changes_nothing(tiny_folder: TinyFolder) -> None:
    left, right = (tiny_folder(f"qwen3-embed-{side}") for side in ("left", "right"))
    wanted = oracle.dense(left, TEXTS)
    assert np.array_equal(wanted, oracle.dense(right, TEXTS))
    together = oracle.loaded("SentenceTransformer", left).encode(TEXTS, show_progress_bar=False)
    assert np.allclose(wanted, together, atol=1e-5)


@pytest.mark.parametrize("kind", ["nomic-matryoshka", "jina-matryoshka", "gte-modernbert-mean"])
def test_vectors_are_cut_and_normalised_again(kind: str, tiny_folder: TinyFolder) -> None:
    whole, cut = (oracle.dense(tiny_folder(kind), TEXTS, dimensions=width) for width in (None, 8))
    wanted = whole[:, :8]
    if kind != "gte-modernbert-mean":
        wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.allclose(cut, wanted, atol=1e-6)


@pytest.mark.parametrize("kind", [*tiny.SPARSE, "bge-m3"])
def test_weights_depend_on_the_text(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    found = oracle.sparse(folder, [*TEXTS[:3], LONG])
    size = max(number for row in found for number in row) + 1
    rows = np.zeros((len(found), size), np.float32)
    for row, weights in zip(rows, found, strict=True):
        assert min(weights.values()) > 0
        row[list(weights)] = list(weights.values())
    assert differ(rows)
    assert all(0 < len(weights) < 900 for weights in found)


@pytest.mark.parametrize("kind", ["splade-bert", "splade-distilbert", "splade-sum"])
def test_a_prompt_changes_weights(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    assert oracle.sparse(folder, TEXTS[:1]) != oracle.sparse(folder, TEXTS[:1], prompt_name="query")


def test_the_heads_of_bge_m3_leave_out_special_tokens(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("bge-m3")
    tokens = oracle.loaded("SentenceTransformer", folder).tokenizer(TEXTS[0])["input_ids"]
    assert set(oracle.sparse(folder, TEXTS[:1])[0]) <= set(tokens[1:-1])
    assert oracle.multi_vector(folder, TEXTS[:1], role="query")[0].shape == (len(tokens) - 1, tiny.WIDTH)


@pytest.mark.parametrize("kind", [*tiny.MULTI_VECTOR, "bge-m3"])
def test_token_vectors_depend_on_the_text(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    queries, documents = (oracle.multi_vector(folder, TEXTS, role=role) for role in oracle.ROLES)
    found = [*queries, *documents]
    assert all(np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5) for rows in found)
    assert differ([rows.sum(axis=0) for rows in queries])
    assert differ([rows.sum(axis=0) for rows in documents])
    longer = kind == "colbert-st-min"  # a query that has more tokens keeps them
    assert all(rows.shape[0] == 24 or (longer and rows.shape[0] > 24) for rows in queries) == (kind != "bge-m3")
    assert differ([np.array([oracle.maxsim(queries[0], rows)], np.float32) for rows in documents])
    own = oracle.multi_vector(folder, [TEXTS[0].replace(".", "")], role="document")[0]
    assert (own.shape == documents[0].shape) == (kind != "bge-m3")  # a full stop is not compared


@pytest.mark.parametrize(
    ("kind", "name", "files"),
    [
        ("splade-bert", "SparseEncoder", ["1_SpladePooling/config.json"]),
        ("colbert-st", "MultiVectorEncoder", ["1_Dense/config.json", "2_MultiVectorMask/config.json"]),
        ("colbert-st-min", "MultiVectorEncoder", ["3_Normalize/config.json"]),
    ],
)
def test_the_newest_layouts_are_the_ones_that_are_saved(
    kind: str, name: str, files: list[str], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tiny_folder(kind)
    oracle.loaded(name, folder).save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    for file in ("modules.json", "sentence_bert_config.json", *files):
        assert json.loads((folder / file).read_text()) == json.loads((tmp_path / "saved" / file).read_text())


@pytest.mark.parametrize("role", oracle.ROLES)
def test_stanfords_layout_gives_the_vectors_of_its_formula(role: oracle.Role, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("colbert-hf")
    for text, found in zip(TEXTS, oracle.multi_vector(folder, TEXTS, role=role), strict=True):
        assert np.allclose(found, oracle.stanford_colbert(folder, text, role=role), atol=1e-5)


@pytest.mark.parametrize("kind", [*tiny.TWO_TOWERS, *tiny.IMAGE_ENCODERS])
def test_vectors_depend_on_the_image(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind) / ("0_CLIPModel" if kind == "clip-st-old" else "")
    found = oracle.image_vectors(folder, [encode(drawing(120, 90, seed)) for seed in range(1, 5)])
    assert differ(found)
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    assert (unit @ unit.T)[~np.eye(4, dtype=bool)].max() < 0.999


@pytest.mark.parametrize("kind", tiny.IMAGE_CLASSIFIERS)
def test_labels_depend_on_the_image(kind: str, tiny_folder: TinyFolder) -> None:
    found = oracle.image_labels(tiny_folder(kind), [encode(drawing(120, 90, seed)) for seed in range(1, 5)])
    assert differ(found)
    assert np.allclose(found.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(("kind", "crops"), [("clip", True), ("dinov2", True), ("siglip", False), ("vit", False)])
def test_what_lies_outside_of_the_crop_is_not_seen(kind: str, crops: bool, tiny_folder: TinyFolder) -> None:
    whole = pixels(240, 120, 1)
    other = whole.copy()
    other[:, :30] = other[:, -30:] = 0
    one, two = oracle.image_vectors(tiny_folder(kind), [encode(Pillow.fromarray(each)) for each in (whole, other)])
    assert np.array_equal(one, two) == crops


@pytest.mark.parametrize("kind", ["siglip", "siglip-masked", "siglip2-fixed", "siglip2-naflex"])
def test_the_padding_of_a_text_counts(kind: str, tiny_folder: TinyFolder) -> None:
    filled, bare = (oracle.text_features(tiny_folder(kind), TEXTS, fill_to=length) for length in (64, None))
    assert np.abs(filled - bare).max() > APART


def test_hidden_padding_makes_a_difference(tiny_folder: TinyFolder) -> None:
    seen, hidden = (oracle.text_features(tiny_folder(kind), TEXTS, fill_to=64) for kind in ("siglip", "siglip-masked"))
    assert np.abs(seen - hidden).max() > APART


@pytest.mark.parametrize("kind", ["clip", "clip-old-end"])
def test_a_text_of_clip_ends_at_its_first_end(kind: str, tiny_folder: TinyFolder) -> None:
    ends = ["one text", "one text <|endoftext|> and what is behind it", "one text and what is behind it"]
    first, same, other = oracle.text_features(tiny_folder(kind), ends, fill_to=None)
    assert np.allclose(first, same, atol=1e-5)
    assert np.abs(first - other).max() > APART


def _inputs(features: dict[str, object]) -> dict[str, object]:
    return {name: features[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
