"""Decoders with attention in both directions, in the layouts of the hub, against their formulas."""

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
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models import decoder_oracle
from tests.models.tiny import byte_bpe, chat_bpe, edit_json, pooling_flags, write_json, write_modules, write_prompts
from tests.models.vectors.test_oracle import MIXED, embed

CLOSE = 2e-5
TEXTS = ["A man is eating food.", "x", *MIXED[:12], " ".join(MIXED)[:600]]
_COMMON = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def nemotron(folder: Path, **changes: Any) -> Path:
    """nvidia/llama-nemotron-embed-1b-v2."""
    tokenizer = byte_bpe()
    config = {
        **_COMMON,
        "architectures": ["LlamaBidirectionalModel"],
        "auto_map": {
            "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
            "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
        },
        "model_type": "llama_bidirec",
        "pooling": "avg",
        "temperature": 1.0,
        "rope_scaling": {
            "factor": 4.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 128,
            "rope_type": "llama3",
        },
        "vocab_size": len(tokenizer),
        **changes,
    }
    return _write(folder, config, tokenizer, decoder_oracle.random_tensors(config))


def nemotron_with_modules(folder: Path) -> Path:
    nemotron(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_prompts(folder, {"query": "query: ", "document": "passage: "})
    return folder


def voyage(folder: Path, **changes: Any) -> Path:
    """voyageai/voyage-4-nano."""
    tokenizer = chat_bpe(appended="<|endoftext|>", padding_side="right")
    config = {
        **_COMMON,
        "architectures": ["Qwen3BidirectionalModel"],
        "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
        "model_type": "qwen3",
        "num_labels": 64,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": len(tokenizer),
        **changes,
    }
    tensors = decoder_oracle.random_tensors(config, "model.")
    _write(folder, config, tokenizer, tensors | {"linear.weight": torch.randn(64, 32) / 6})
    write_modules(
        folder, ("Pooling", {**pooling_flags("mean_tokens"), "word_embedding_dimension": 64}), ("Normalize", {})
    )
    write_prompts(folder, {"query": "Represent the query: ", "document": "Represent the document: "}, truncate_dim=None)
    return folder


def _write(
    folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tensors: dict[str, torch.Tensor]
) -> Path:
    folder.mkdir()
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "nemotron": nemotron,
    "nemotron-modules": nemotron_with_modules,
    "voyage": voyage,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(7)
    root = tmp_path_factory.mktemp("bidirectional")
    return {name: make(root / name) for name, make in MAKERS.items()}


def wanted(folder: Path, texts: list[str], *, causal: bool = False) -> Any:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=512).input_ids
        vectors = decoder_oracle.hidden(tensors, config, ids, causal=causal)
        if "linear.weight" in tensors:
            vectors = vectors @ tensors["linear.weight"].T
        rows.append(functional.normalize(vectors.mean(dim=0), dim=0))
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", MAKERS)
def test_vectors_are_those_of_the_formula(kind: str, attention: Any, folders: dict[str, Path]) -> None:
    model = load_model(EngineConfig(model=str(folders[kind]), dtype="float32", attention=attention))
    assert model.card.attention == attention
    assert model.card.pooling == "mean"
    right = wanted(folders[kind], TEXTS)
    assert np.abs(right - wanted(folders[kind], TEXTS, causal=True)).max() > 0.05
    assert np.abs(embed(model, TEXTS) - right).max() <= CLOSE
    alone = np.concatenate([embed(model, [text]) for text in TEXTS[:4]])
    assert np.abs(alone - right[:4]).max() <= CLOSE
    if kind != "nemotron":
        name = {"nemotron-modules": "query: ", "voyage": "Represent the query: "}[kind]
        assert (
            np.abs(
                embed(model, TEXTS[:2], prompt_name="query")
                - wanted(folders[kind], [name + text for text in TEXTS[:2]])
            ).max()
            <= CLOSE
        )


def test_code_of_the_folder_is_not_run_with_trust(folders: dict[str, Path]) -> None:
    model = load_model(EngineConfig(model=str(folders["voyage"]), dtype="float32", trust_remote_code=True))
    assert np.abs(embed(model, TEXTS[:2]) - wanted(folders["voyage"], TEXTS[:2])).max() <= CLOSE


def test_the_pooling_of_the_config_holds(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["nemotron"], tmp_path / "model")
    edit_json(folder / "config.json", pooling="last")
    assert read_folder(folder).heads[0].pooling == ("lasttoken",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("nemotron", {"pooling": "weighted_avg"}, "pooling='weighted_avg' is not supported, only avg, cls, last"),
        (
            "nemotron",
            {"architectures": ["LlamaBidirectionalForTokenClassification"]},
            "LlamaBidirectionalForTokenClassification is not supported for model_type='llama_bidirec'",
        ),
        (
            "voyage",
            {"auto_map": {"AutoModel": "modeling.Mine"}},
            "Qwen3BidirectionalModel, a class of the folder's own code",
        ),
    ],
)
def test_what_is_not_understood_is_rejected(
    kind: str, changes: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=said):
        load_model(EngineConfig(model=str(folder), dtype="float32"))


def test_a_model_that_reads_one_way_although_its_config_says_two_is_rejected(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    attend = modeling_llama.LlamaAttention.forward

    def one_way(self: Any, *arguments: Any, **settings: Any) -> Any:
        return attend(self, *arguments, **{**settings, "is_causal": True, "attention_mask": None})

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", one_way)
    with pytest.raises(ConfigError, match="LlamaModel of this transformers attends to earlier tokens only"):
        load_model(EngineConfig(model=str(folders["nemotron"]), dtype="float32", attention="padded"))
