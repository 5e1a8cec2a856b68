"""jina-reranker-m0 gives the scores of its published formula, for texts, images and both."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Image, ScoreRequest
from staged_pool.stages.errors import ConfigError, InvalidInput
from tests.models import qwen3_vl_oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Part
from tests.models.requests import content, prepare, score
from tests.models.tiny import edit_json

EXACT = 1e-4
WIDE, TALL, SMALL = encode(100, 80), encode(70, 150, "PNG", 1), encode(31, 47, "PNG", 3)
PIXELS = {"shortest_edge": 3136, "longest_edge": 602112}
PAIRS: list[tuple[list[Part], list[Part]]] = [
    (["a query"], ["a document"]),
    (["another query"], ["a document"]),
    (["a query"], [WIDE]),
    ([TALL], ["a document"]),
    ([TALL], [WIDE]),
    ([WIDE], [TALL]),
    (["like this ", SMALL], [TALL, "with words ", WIDE]),
]


def prompt(query: Sequence[Part], document: Sequence[Part]) -> str:
    """The text of `formatting_prompts_func` in https://huggingface.co/jinaai/jina-reranker-m0, modeling.py."""
    texts = ["".join(p if isinstance(p, str) else qwen3_vl_oracle.IMAGE for p in each) for each in (document, query)]
    return f"**Document**:\n{texts[0]}\n**Query**:\n{texts[1]}"


def tokens(folder: Path, query: Sequence[Part], document: Sequence[Part]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The ids with the score token behind them; the images of the document come first."""
    images = [part for each in (document, query) for part in each if isinstance(part, bytes)]
    ids, given = qwen3_vl_oracle.tokens(folder, prompt(query, document), images, PIXELS)
    if given:
        given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, 1))
    return torch.nn.functional.pad(ids, (0, 1), value=100), given


def logit(folder: Path, query: Sequence[Part], document: Sequence[Part]) -> float:
    ids, given = tokens(folder, query, document)
    model, first, second = parts(folder)
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).last_hidden_state[0, -1]
        return float(second(torch.relu(first(hidden)))[0]) - 2.65


@functools.cache
def parts(folder: Path) -> tuple[Any, torch.nn.Linear, torch.nn.Linear]:
    """The body, by its class of transformers, and the two layers."""
    torch.set_num_threads(1)
    weights = load_file(folder / "model.safetensors")
    with warnings.catch_warnings(action="ignore"):
        whole = hf.Qwen2VLForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32).eval()
    layers = []
    for place in (0, 2):
        weight = weights[f"score.{place}.weight"]
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": weights[f"score.{place}.bias"]})
        layers.append(linear)
    assert torch.equal(
        whole.model.language_model.layers[0].mlp.up_proj.weight, weights["model.layers.0.mlp.up_proj.weight"]
    )
    return whole.model, layers[0], layers[1]


@pytest.fixture(scope="module", params=["packed", "padded"])
def model(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> Encoder:
    settings = {"dtype": "float32", "image_path": "exact", "attention": request.param}
    return load_model(EngineConfig(model=str(tiny_folder("jina-m0")), **settings))


def test_pairs_have_the_scores_of_the_formula(model: Encoder, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("jina-m0")
    wanted = np.array([logit(folder, *pair) for pair in PAIRS])
    assert min(np.diff(np.sort(wanted))) > 10 * EXACT
    for (query, document), one in zip(PAIRS, wanted, strict=True):
        found = score(model, content(query), [content(document)])
        assert found.logits is not None
        assert abs(found.logits[0] - one) < 10 * EXACT
        assert abs(found.scores[0] - 1 / (1 + np.exp(-one))) < EXACT
    together = score(model, "a query", [content(PAIRS[0][1]), content(PAIRS[2][1])])
    assert np.abs(np.array(together.logits) - wanted[[0, 2]]).max() < 10 * EXACT


@pytest.mark.parametrize("given", [["many different words " * 20], [SMALL, "many different words " * 20]])
def test_a_document_is_cut_before_the_query_and_the_score_token(
    given: list[Part], model: Encoder, tiny_folder: TinyFolder
) -> None:
    whole = tokens(tiny_folder("jina-m0"), ["q"], given)[0][0].tolist()
    behind = len(model.tokenize("\n**Query**:\nq", add_special_tokens=False).ids) + 1
    for excess in (-1, 0, 1, 30):
        limit = len(whole) - excess
        request = ScoreRequest(queries=("q",), documents=(content(given),), max_tokens=limit)
        (prepared,) = prepare(model, request)
        assert isinstance(prepared.payload, TokenSequence)
        gone = max(excess, 0)
        assert prepared.payload.ids == whole[: len(whole) - behind - gone] + whole[-behind:]


def test_what_does_not_fit_is_rejected(model: Encoder) -> None:
    with pytest.raises(InvalidInput, match="takes no instruction"):
        prepare(model, ScoreRequest(queries=("q",), documents=(Image(WIDE),), instruction="Find it"))


def test_a_folder_that_does_not_fit_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("jina-m0"), tmp_path / "model"))
    read = read_folder(folder, task="score")
    assert (read.scoring, read.max_seq_length) == ("cross-encoder", 10240)
    with pytest.raises(ConfigError, match="scores pairs, and was trained for nothing else"):
        read_folder(folder, task="embed")
    weights = load_file(folder / "model.safetensors")
    for wrong, reason in (
        ({"score.2.weight": torch.ones(2, 32), "score.2.bias": torch.ones(2)}, r"score\.2\.weight gives 2 values"),
        ({"score.0.weight": torch.ones(32, 8)}, "32"),
        ({"score.4.weight": torch.ones(1, 1)}, "would not be read"),
    ):
        save_file(weights | wrong, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=reason):
            load_model(EngineConfig(model=str(folder), dtype="float32"))
    edit_json(folder / "config.json", model_type="qwen2_5_vl")
    with pytest.raises(ConfigError, match="is supported with model_type='qwen2_vl'"):
        read_folder(folder)
