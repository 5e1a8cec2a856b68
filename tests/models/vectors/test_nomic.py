"""NomicBERT in the layouts of the hub, with and without experts, against its formula."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models import nomic_oracle
from tests.models.tiny import edit_json, pooling_flags, unigram, write_json, write_modules, write_prompts
from tests.models.vectors.test_oracle import MIXED, embed
from tests.needed import needs

CLOSE = 2e-5
TEXTS = ["A man is eating food.", "x", *MIXED[:8], " ".join(MIXED)[:900]]
_CODE = "nomic-ai/nomic-bert-2048--"
V2: dict[str, Any] = {
    "activation_function": "gelu",
    "architectures": ["NomicBertModel"],
    "auto_map": {
        "AutoConfig": f"{_CODE}configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": f"{_CODE}modeling_hf_nomic_bert.NomicBertModel",
    },
    "causal": False,
    "expert_choice_router": False,
    "layer_norm_epsilon": 1e-5,
    "max_trained_positions": 512,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "model_type": "nomic_bert",
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 24,
    "n_layer": 4,
    "n_positions": 512,
    "num_experts": 8,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "pad_vocab_size_to_multiple": 1,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": True,
    "rotary_emb_base": 500.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "torch_dtype": "float32",
    "type_vocab_size": 1,
    "use_rms_norm": None,
}
"""The config of nomic-embed-text-v2-moe, but for its size."""
NATIVE = needs("transformers", "5.5", "NomicBertModel")


def _write(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    tokenizer = unigram()
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer", model_max_length=512)
    config = {**V2, "vocab_size": len(tokenizer), **changes}
    write_json(folder / "config.json", config)
    save_file(nomic_oracle.random_tensors(config), folder / "model.safetensors", {"format": "pt"})
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 384, "do_lower_case": False})
    write_prompts(folder, {"query": "search_query: ", "passage": "search_document: "})
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "v2-moe": _write,
    "gelu": lambda folder: _write(folder, num_experts=0, moe_every_n_layers=0, type_vocab_size=0),
    "v1.5": lambda folder: _write(
        folder,
        activation_function="swiglu",
        num_experts=0,
        moe_every_n_layers=0,
        qkv_proj_bias=False,
        mlp_fc1_bias=False,
        mlp_fc2_bias=False,
        layer_norm_epsilon=1e-3,
        type_vocab_size=2,
    ),
    "v1.5-scaled": lambda folder: _write(
        folder,
        activation_function="swiglu",
        num_experts=0,
        moe_every_n_layers=0,
        qkv_proj_bias=False,
        mlp_fc1_bias=False,
        mlp_fc2_bias=False,
        max_trained_positions=32,
        rotary_scaling_factor=2,
    ),
}
KINDS = ["v2-moe", "gelu", pytest.param("v1.5", marks=NATIVE), pytest.param("v1.5-scaled", marks=NATIVE)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(7)
    root = tmp_path_factory.mktemp("nomic")
    return {name: make(root / name) for name, make in MAKERS.items()}


def wanted(folder: Path, texts: list[str], **rules: Any) -> Any:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=384).input_ids
        vectors = nomic_oracle.hidden(tensors, config, ids, **rules)
        rows.append(functional.normalize(vectors.mean(dim=0), dim=0))
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_formula(kind: str, attention: Any, folders: dict[str, Path]) -> None:
    model = load_model(EngineConfig(model=str(folders[kind]), dtype="float32", attention=attention))
    assert (model.card.attention, model.card.pooling) == (attention, "mean")
    right = wanted(folders[kind], TEXTS)
    assert np.abs(embed(model, TEXTS) - right).max() <= CLOSE
    alone = np.concatenate([embed(model, [text]) for text in TEXTS[:4]])
    assert np.abs(alone - right[:4]).max() <= CLOSE
    prompted = wanted(folders[kind], [f"search_query: {text}" for text in TEXTS[:2]])
    assert np.abs(embed(model, TEXTS[:2], prompt_name="query") - prompted).max() <= CLOSE


def test_probabilities_of_experts_are_not_made_to_sum_to_one(folders: dict[str, Path]) -> None:
    folder = folders["v2-moe"]
    assert np.abs(wanted(folder, TEXTS[:4]) - wanted(folder, TEXTS[:4], renormalise=True)).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights=True is not supported"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved=True is not supported"),
        ({"rotary_emb_base": 0}, "rotary_emb_base=0 must be a number above 0"),
        ({"rotary_scaling_factor": 2}, "rotary_scaling_factor=2 is not supported for 'gelu', only None"),
        ({"num_shared_experts": 1}, "num_shared_experts=1 is not supported"),
        ({"activation_function": "swiglu"}, "activation_function='swiglu' is not supported for NomicBertModel"),
        ({"moe_top_k": 9}, "moe_top_k=9 must be from 1 to num_experts=8"),
        ({"moe_every_n_layers": 3}, "the weights are not those of a NomicMoeModel"),
    ],
)
def test_what_is_not_understood_is_rejected(
    changes: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["v2-moe"], tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=said):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
