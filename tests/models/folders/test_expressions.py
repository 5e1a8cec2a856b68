"""Regular expressions that read a model folder: none looks again and again at the same text.

Quadratic ones would take hours for these texts, while no other thread runs.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from staged_pool.runtime.models.checkpoint.name_patterns import fits_end
from staged_pool.runtime.models.checkpoint.weights import _UNSAFE
from staged_pool.runtime.models.folders.adapters import AdapterFolder, _write_head
from staged_pool.runtime.models.folders.reranker_families import find_family
from staged_pool.runtime.models.folders.stored_tensors import read_shard
from staged_pool.stages.errors import ConfigError

MANY = 2**18


@pytest.mark.parametrize("name", ["ForA" * MANY + "!", "Model\n", "For", 5], ids=["long", "line", "For", "number"])
def test_the_name_of_a_base_class_must_be_one(tmp_path: Path, name: object) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": [name]}))
    adapter = AdapterFolder(path=tmp_path, body=tmp_path, base="base", revision=None, task="SEQ_CLS")
    with pytest.raises(ConfigError, match="which must be one") as refused:
        _write_head(config, adapter)
    assert len(str(refused.value)) < 1000


def test_the_names_of_a_reranker_may_be_long(tmp_path: Path) -> None:
    def found(name: str) -> str | None:
        family = find_family(tmp_path, tmp_path, {"_name_or_path": name}, None)
        return None if family is None else family[0].name

    assert found("contextualai" * MANY) is None
    assert found("contextualai-a-rerank") == found("ctxl-rerank") == "ctxl-rerank-v2"


def test_an_object_of_a_pickle_may_have_a_long_name() -> None:
    content = b"\x80\x02cos\n" + b"Unsupported " * MANY + b"\n."
    with pytest.raises(pickle.UnpicklingError) as refused:
        torch.load(io.BytesIO(content), weights_only=True)
    found = _UNSAFE.search(str(refused.value))
    assert found is None or found[0]


def test_the_name_of_a_tensor_is_no_text_of_a_megabyte(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a" + ".1" * MANY: np.ones(1, np.float32)}, file)
    with pytest.raises(ConfigError, match=r"model\.safetensors: a tensor has a name of \d+ characters; at most 1024"):
        read_shard(file, file.name)


NAME = "model.layers.11.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        (NAME, True),
        ("q_proj", True),
        ("proj", False),
        (r"layers\.\d+\.self_attn\.(q|k|v)_proj", True),
        (r".*\.layers\.(1[01]|2\d?)\..*", True),
        (r"layers\.\d{1,2}\.(?:self_)?attn\.[q-z*+]_proj", True),
        (r"layers\.[0-9]\..*", False),
        (f"^{re.escape(NAME)}$", True),
    ],
)
def test_the_expressions_of_adapters_name_the_end_of_a_name(pattern: str, fits: bool) -> None:
    assert fits_end(pattern, NAME) is fits


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+)+\.",
        r"(a|aa)*b",
        "(q|q)" * 40 + "!",
        r"\w?" * 40 + "!",
        r"\w*" * 9 + "!",
        r"(?:\w{1,9}){2,9}\.",
        "".join(f"(?:(?:m|m)o{place}|model)?" for place in range(40)),
    ],
)
def test_an_expression_with_too_many_ways_is_rejected(pattern: str) -> None:
    with pytest.raises(ValueError, match="too many ways to match a name"):
        fits_end(pattern, NAME)


@pytest.mark.parametrize("pattern", ["(", "[" + "a" * 900, "(" * 499 + ")" * 499, "a{2,1}", "a{9999999999}", "**"])
def test_what_is_no_expression_is_told(pattern: str) -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        fits_end(pattern, NAME)
    with pytest.raises(ValueError, match="too long a regular expression: at most 1000"):
        fits_end(pattern * 1001, NAME)


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@given(st.text(r"ab.|()?*+{}1,\[]^$", max_size=60), st.text("ab.1", max_size=60))
def test_every_expression_is_answered(pattern: str, name: str) -> None:
    try:
        found = fits_end(pattern, name)
    except ValueError:
        return
    assert found is (re.match(rf"(.*\.)?({pattern})$", name) is not None)
