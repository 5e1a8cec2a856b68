"""Qwen3-VL-Reranker gives transformers' logits of its authors' prompt, for texts, images and both."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import transformers as hf

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Chat, Image, ScoreRequest
from staged_pool.runtime.results import ScoreResult
from staged_pool.stages.errors import ConfigError, InvalidInput, UnsupportedMedia
from tests.models import qwen3_vl_oracle as oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Part
from tests.models.requests import content, prepare, score
from tests.models.tiny import edit_json
from tests.models.tiny.vision_language import QWEN3_QUESTION

Load: TypeAlias = Callable[..., Encoder]

EXACT = 1e-4
WIDE, TALL, TINY = encode(100, 80), encode(70, 150, "PNG", 1), encode(31, 47, "PNG", 3)
PIXELS = {"shortest_edge": 4 * 32**2, "longest_edge": 1280 * 32**2}
PAIRS: list[tuple[list[Part], list[Part]]] = [
    (["a query"], ["a document"]),
    (["a query"], [""]),
    (["a query"], [WIDE]),
    ([TALL], ["a document"]),
    ([TINY], [WIDE]),
    (["like this ", TINY], [TALL, "with words ", WIDE]),
]


@pytest.fixture(scope="module")
def load(tiny_folder: TinyFolder) -> Load:
    loaded: dict[EngineConfig, Encoder] = {}

    def load(kind: str = "qwen3-vl-reranker", **settings: Any) -> Encoder:
        given = {"dtype": "float32", "image_path": "exact"} | settings
        config = EngineConfig(model=str(tiny_folder(kind)), **given)
        if config not in loaded:
            loaded[config] = load_model(config)
        return loaded[config]

    return load


def prompt(query: Sequence[Part], document: Sequence[Part], instruction: str = QWEN3_QUESTION) -> str:
    """The authors' text: https://huggingface.co/Qwen/Qwen3-VL-Reranker-2B, scripts/qwen3_vl_reranker.py."""
    of_query, of_document = (
        "".join(part if isinstance(part, str) else oracle.IMAGE for part in parts) or "NULL"
        for parts in (query, document)
    )
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruction}<Query>:{of_query}\n<Document>:{of_document}<|im_end|>\n<|im_start|>assistant\n"
    )


def wanted_score(folder: Path, written: str, images: Sequence[bytes], size: dict[str, int] | None) -> float:
    """The sigmoid of (w_yes - w_no) . h at the last token."""
    ids, given = oracle.tokens(folder, written, images, size)
    with torch.inference_mode():
        logits = whole(folder)(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0, -1]
    yes, no = hf.AutoTokenizer.from_pretrained(str(folder)).convert_tokens_to_ids(["yes", "no"])
    return float(torch.sigmoid(logits[yes] - logits[no]))


@functools.cache
def whole(folder: Path) -> Any:
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        return hf.Qwen3VLForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32).eval()


def images_of(*contents: Sequence[Part]) -> list[bytes]:
    return [part for parts in contents for part in parts if isinstance(part, bytes)]


def ids_of(model: Encoder, request: ScoreRequest) -> list[int]:
    (prepared,) = prepare(model, request)
    assert isinstance(prepared.payload, TokenSequence)
    return prepared.payload.ids


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_pairs_of_texts_and_images_have_the_oracles_scores(attention: str, tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load(attention=attention), tiny_folder("qwen3-vl-reranker")
    assert model.card.attention == attention
    assert model.card.scoring == "cross-encoder"
    wanted = [wanted_score(folder, prompt(*pair), images_of(*pair), PIXELS) for pair in PAIRS]
    assert np.ptp(wanted) > 1000 * EXACT
    for (query, document), one in zip(PAIRS, wanted, strict=True):
        assert abs(score(model, content(query), [content(document)]).scores[0] - one) < EXACT
    documents = [document for query, document in PAIRS[:3]]
    found = score(model, "a query", [content(document) for document in documents]).scores
    assert np.abs(found - np.array(wanted[:3])).max() < EXACT


def test_an_instruction_takes_the_place_of_the_usual_one(tiny_folder: TinyFolder, load: Load) -> None:
    for query, document in (PAIRS[0], PAIRS[5]):
        request = ScoreRequest(queries=(content(query),), documents=(content(document),), instruction="Find it")
        images = images_of(query, document)
        written = prompt(query, document, "Find it")
        wanted = oracle.tokens(tiny_folder("qwen3-vl-reranker"), written, images, PIXELS)[0][0].tolist()
        assert ids_of(load(), request) == wanted


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_document_is_cut_and_the_end_of_the_prompt_stays(side: Any, tiny_folder: TinyFolder, load: Load) -> None:
    words = "many different words " * 20
    document: list[Part] = [TINY, words] if side == "right" else [words, TINY]
    images = images_of(document)
    folder, model = tiny_folder("qwen3-vl-reranker"), load()
    whole_ids = oracle.tokens(folder, prompt(["q"], document), images, PIXELS)[0][0].tolist()
    own = len(model.tokenize(words, add_special_tokens=False).ids)
    tail = len(model.tokenize("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids)
    head = len(whole_ids) - tail - 8 - own  # an image of 6 tokens between two marks

    def asked(limit: int) -> ScoreRequest:
        return ScoreRequest(queries=("q",), documents=(content(document),), max_tokens=limit, truncate_side=side)

    for excess in (-1, 0, 1, 30):
        gone, found = max(excess, 0), ids_of(model, asked(len(whole_ids) - excess))
        if side == "right":
            assert found == whole_ids[: len(whole_ids) - tail - gone] + whole_ids[-tail:]
        else:
            assert found == whole_ids[:head] + whole_ids[head + gone :]
    with pytest.raises(InvalidInput, match="would cut an image"):
        ids_of(model, asked(len(whole_ids) - own - 4))
    with pytest.raises(InvalidInput, match="The prompt without the document takes"):
        ids_of(model, asked(20))


def test_a_cross_encoder_folder_says_itself_what_is_written(tiny_folder: TinyFolder, load: Load) -> None:
    model, folder = load("qwen3-vl-cross-encoder"), tiny_folder("qwen3-vl-cross-encoder")
    query, document = PAIRS[5]
    before = prompt(query, document).partition("<|im_end|>\n")[2]
    written = f"<|im_start|>system\nJudge.<|im_end|>\n{before}"
    found = score(model, content(query), [content(document)]).scores[0]
    assert abs(found - wanted_score(folder, written, images_of(query, document), None)) < EXACT
    text = score(model, "a query", ["a document"]).scores[0]
    alone = f"<|im_start|>system\nJudge.<|im_end|>\n{prompt(*PAIRS[0]).partition('<|im_end|>' + chr(10))[2]}"
    assert abs(text - wanted_score(folder, alone, [], None)) < EXACT


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"documents": (Chat(({"role": "user", "content": "a"},) * 2),)}, "one message of texts and images, not 2"),
        ({"documents": (Image(WIDE),), "max_document_tokens": 9}, "is for texts, and this pair has images"),
        ({"documents": (content([WIDE, "<|image_pad|>"]),)}, "no text may contain the image token"),
        ({"documents": (Image(b"no image"),)}, "The image"),
    ],
)
def test_what_does_not_fit_is_rejected(given: dict[str, Any], reason: str, load: Load) -> None:
    with pytest.raises(InvalidInput, match=reason):
        prepare(load(), ScoreRequest(queries=("q",), **given))


def test_settings_of_a_folder_that_do_not_fit_are_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("qwen3-vl-reranker"), tmp_path / "model"))
    assert read_folder(folder, task="score").images is not None
    with pytest.raises(ConfigError, match=r"Qwen3-VL-Reranker, .* whose own prompt"):
        read_folder(folder, score_tokens="yes,maybe")
    own = read_folder(folder, score_template="{query} {document} {instruction}", score_tokens="no,yes")
    assert "this replaces the prompt and tokens" in own.notes[0]
    (folder / "README.md").unlink()
    with pytest.raises(ConfigError, match=r"nothing in model says how it makes vectors.*Set task='score'"):
        read_folder(folder)
    assert read_folder(folder, task="embed").scoring == "bi-encoder"
    assert "only evidence is task='score'" in read_folder(folder, task="score").warnings[0]
    edit_json(folder / "config.json", architectures=["Qwen3VLModel"])
    with pytest.raises(ConfigError, match="gives no logits of answers"):
        read_folder(folder, task="score")


@pytest.fixture(scope="module")
def ranked(tiny_folder: TinyFolder) -> tuple[EngineConfig, list[float]]:
    """Settings of an engine, and the scores of the first documents."""
    folder = tiny_folder("qwen3-vl-reranker")
    wanted = [wanted_score(folder, prompt(*pair), images_of(*pair), PIXELS) for pair in PAIRS[:3]]
    return EngineConfig(model=str(folder), dtype="float32", image_path="exact"), wanted


@pytest.mark.anyio
async def test_an_engine_ranks_texts_and_images(ranked: tuple[EngineConfig, list[float]]) -> None:
    config, wanted = ranked
    documents = tuple(content(document) for _, document in PAIRS[:3])
    async with open_engine(config) as engine:
        request = ScoreRequest(queries=("a query",), documents=documents)
        result: ScoreResult = await engine.submit(lambda: request, lambda result: result)
        assert np.abs(result.scores - np.array(wanted)).max() < EXACT
        wrong = ScoreRequest(queries=("a query",), documents=(Image(WIDE), Image(b"no image")))
        with pytest.raises(UnsupportedMedia):
            await engine.submit(lambda: wrong, lambda result: result)
