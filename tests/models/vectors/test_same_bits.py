"""The table of docs/same-bits.md: how far a vector may be another one, in a batch and after a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.models.tiny import pooling_flags, save_body, word_piece, write_modules
from tests.models.tiny.bodies import bert_config

DTYPES = ("float32", "bfloat16")
WIDE = {
    "hidden_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 128,
}
"""Layer sizes of MiniLM, so that kernels share and cut them as they do there."""

ROOT = Path(__file__).parents[3]

Starts = Sequence[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """Return the vectors of two processes, one after the other, with the same decision file."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = word_piece()
    config = bert_config(len(tokenizer), **WIDE)
    torch.manual_seed(7)
    save_body(folder, hf.BertModel(config), tokenizer)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-m", "tests.models.bits", str(folder)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(json.loads(run.stdout.splitlines()[-1]))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_texts_one_by_one_have_the_same_bits_after_a_restart_and_after_a_rest(starts: Starts, dtype: str) -> None:
    first, second = (start[f"{dtype}, usual"] for start in starts)
    assert first["alone"] == second["alone"]
    assert first["rested"] == first["alone"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_changes_a_vector_by_rounding_only(starts: Starts, dtype: str) -> None:
    for start in starts:
        found = start[f"{dtype}, usual"]
        if dtype == "float32":
            assert found["apart"] <= 1e-6
        assert found["cosine"] > 0.9999


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_deterministic_engine_gives_the_same_bits_in_any_batch(starts: Starts, dtype: str) -> None:
    names = ("alone", "rested", "together", "at once")
    assert len({start[f"{dtype}, deterministic"][name] for start in starts for name in names}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_deterministic_engine_scores_a_document_the_same_whatever_else_it_ranks(starts: Starts, dtype: str) -> None:
    names = ("scores", "scores alone")
    assert len({start[f"{dtype}, deterministic"][name] for start in starts for name in names}) == 1
