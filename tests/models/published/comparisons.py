"""Comparisons of a loaded model with sentence-transformers, transformers or a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import transformers as hf

from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.requests import MODEL_MAX, Image, Output, TextInput, TokenClassifyRequest
from tests.models import image_oracle, oracle
from tests.models.images.drawing import drawing, encode
from tests.models.oracle import Array
from tests.models.published import Check
from tests.models.requests import classify, embed, result_of, score

CLOSE = 5e-5
TEXTS = ["A man is eating food.", "The stock market fell sharply today, and then it rose again.", "short"]
QUERY = "what is a man eating"
IMAGES = [encode(drawing(333, 217, 2), "PNG"), encode(drawing(61, 47, 4), "PNG")]

Formula = Callable[[Path], Array]


def assert_close(found: Array | None, wanted: Array) -> None:
    assert found is not None
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < CLOSE
    assert np.ptp(wanted) > 100 * CLOSE  # or else anything would pass


def vectors(*prompts: str, words_of_file: bool = False) -> Check:
    """Vectors of texts are those of sentence-transformers: without a prompt, and with each of these.

    With `words_of_file`, ids are those of `tokenizer.json`: classes of transformers split some texts in another way.
    """

    def check(folder: Path, model: Encoder) -> None:
        if words_of_file:
            oracle.loaded("SentenceTransformer", folder)[0].processor = hf.PreTrainedTokenizerFast.from_pretrained(
                folder
            )
        for prompt in (None, *prompts):
            found = embed(model, TEXTS, Output.DENSE, prompt_name=prompt).dense
            assert_close(found, oracle.dense(folder, TEXTS, prompt_name=prompt))

    return check


def vectors_of(formula: Formula) -> Check:
    """Vectors of texts are those of a formula."""
    return lambda folder, model: assert_close(embed(model, TEXTS, Output.DENSE).dense, formula(folder))


def weights(*prompts: str) -> Check:
    """Sparse vectors are those of sentence-transformers."""

    def check(folder: Path, model: Encoder) -> None:
        for prompt in (None, *prompts):
            found = embed(model, TEXTS, Output.SPARSE, prompt_name=prompt).sparse
            assert found is not None
            for vector, wanted in zip(found, oracle.sparse(folder, TEXTS, prompt_name=prompt), strict=True):
                ours = dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
                assert wanted
                assert {place for place in ours.keys() ^ wanted.keys() if ours.get(place, 0) > CLOSE} == set()
                assert max(abs(ours.get(place, 0) - weight) for place, weight in wanted.items()) < CLOSE

    return check


def tokens(by: Callable[..., Sequence[Array] | Array] | None = None) -> Check:
    """Vectors of tokens are those of sentence-transformers, or of a formula for one text."""

    def check(folder: Path, model: Encoder) -> None:
        for role in oracle.ROLES:
            found = embed(model, TEXTS, Output.MULTI_VECTOR, prompt_name=role).multi_vector
            wanted = (
                oracle.multi_vector(folder, TEXTS, role=role)
                if by is None
                else [np.asarray(by(folder, text, role=role)) for text in TEXTS]
            )
            assert oracle.apart(found, wanted) < CLOSE

    return check


def all_of(*checks: Check) -> Check:
    """Several comparisons of one model."""

    def check(folder: Path, model: Encoder) -> None:
        for one in checks:
            one(folder, model)

    return check


def scores(folder: Path, model: Encoder) -> None:
    """Logits of pairs are those of sentence-transformers."""
    found = score(model, QUERY, TEXTS)
    wanted = oracle.scores(folder, [(QUERY, text) for text in TEXTS], activate=False)
    assert_close(found.scores if found.logits is None else found.logits, wanted)


def scores_by(formula: Callable[[Path, str, str], float]) -> Check:
    """Logits of pairs are those of a formula."""

    def check(folder: Path, model: Encoder) -> None:
        found = score(model, QUERY, TEXTS)
        wanted = np.asarray([formula(folder, QUERY, text) for text in TEXTS], np.float32)
        assert_close(found.scores if found.logits is None else found.logits, wanted)

    return check


def labels(folder: Path, model: Encoder) -> None:
    """Scores of labels are those of transformers' pipeline."""
    found = classify(model, [TextInput(text, MODEL_MAX) for text in TEXTS])
    assert_close(found.scores, oracle.labels(folder, TEXTS))


def token_labels(folder: Path, model: Encoder) -> None:
    """Scores of labels of each token are those of transformers."""
    texts = [text for text in TEXTS if len(text) > 10]
    found = result_of(model, TokenClassifyRequest(inputs=tuple(TextInput(text, MODEL_MAX) for text in texts)))
    for row, text in zip(found.scores, texts, strict=True):
        logits = oracle.token_labels(folder, text)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        wanted = odds / odds.sum(axis=1, keepdims=True)
        assert_close(row, wanted)


def images(folder: Path, model: Encoder) -> None:
    """Vectors of images are those of transformers."""
    found = embed(model, [Image(one) for one in IMAGES], Output.DENSE, normalize=False).dense
    assert_close(found, oracle.image_vectors(folder, IMAGES))


def texts_of_two_towers(*, fill_to: int | None = None, lower: bool = False) -> Check:
    """Vectors of texts are the text features of transformers."""

    def check(folder: Path, model: Encoder) -> None:
        found = embed(model, TEXTS, Output.DENSE, normalize=False).dense
        read = [text.lower() for text in TEXTS] if lower else TEXTS
        assert_close(found, oracle.text_features(folder, read, fill_to=fill_to))

    return check


def pages(folder: Path, model: Encoder) -> None:
    """Vectors of pages and queries are those of the class of transformers."""
    shown = embed(model, [Image(one) for one in IMAGES], Output.MULTI_VECTOR).multi_vector
    assert oracle.apart(shown, [image_oracle.page(folder, one) for one in IMAGES]) < CLOSE
    asked = embed(model, TEXTS, Output.MULTI_VECTOR, prompt_name="query").multi_vector
    assert oracle.apart(asked, [image_oracle.query(folder, text) for text in TEXTS]) < CLOSE
