"""JinaBERT in the layouts of the hub, against its formula."""

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
from transformers import PreTrainedTokenizerFast

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.kernels import attention as kernels
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models import jina_bert_oracle
from tests.models.requests import score
from tests.models.tiny import edit_json, pooling_flags, word_piece, write_json, write_modules
from tests.models.vectors.test_oracle import MIXED, embed

CLOSE = 2e-5
TEXTS = ["A man is eating food.", "x", *MIXED[:8], " ".join(MIXED)[:900]]
_IMPL = "jinaai/jina-bert-implementation--"
_CODE_IMPL = "jinaai/jina-bert-v2-qk-post-norm--"


def _write(folder: Path, name: str, *, code: bool = False, prefix: str = "", **changes: Any) -> Path:
    folder.mkdir()
    tokenizer = word_piece()
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", model_max_length=512)
    own = _CODE_IMPL if code else _IMPL
    config = {
        "architectures": [name],
        "attention_probs_dropout_prob": 0.1,
        "auto_map": {
            "AutoConfig": f"{own}configuration_bert.JinaBertConfig",
            "AutoModel": f"{own}modeling_bert.{name}",
        },
        "emb_pooler": "mean",
        "feed_forward_type": "geglu",
        "hidden_act": "gelu",
        "hidden_size": 48,
        "intermediate_size": 40,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_max_length": 512,
        "model_type": "bert",
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "position_embedding_type": "alibi",
        "torch_dtype": "float16",
        "type_vocab_size": 2,
        "vocab_size": len(tokenizer),
        **changes,
    }
    write_json(folder / "config.json", config)
    tensors = jina_bert_oracle.random_tensors(config, prefix, code=code)
    if name == "JinaBertForMaskedLM":
        tensors["cls.predictions.bias"] = torch.randn(len(tokenizer))
    if name == "JinaBertForSequenceClassification":
        tensors |= {"bert.pooler.dense.weight": torch.randn(48, 48) * 0.2, "bert.pooler.dense.bias": torch.randn(48)}
        tensors |= {"classifier.weight": torch.randn(1, 48) * 0.3, "classifier.bias": torch.randn(1)}
    else:
        pooling = {**pooling_flags("mean_tokens"), "word_embedding_dimension": 48}
        write_modules(folder, ("Pooling", pooling), ("Normalize", {}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "v2-base-en": lambda folder: _write(folder, "JinaBertForMaskedLM", prefix="bert."),
    "v2-base-de": lambda folder: _write(folder, "JinaBertModel", feed_forward_type="reglu", num_attention_heads=8),
    "v2-base-code": lambda folder: _write(folder, "JinaBertModel", code=True),
    "reranker-v1": lambda folder: _write(
        folder, "JinaBertForSequenceClassification", prefix="bert.", id2label={"0": "LABEL_0"}
    ),
}
EMBEDDERS = [name for name in MAKERS if name != "reranker-v1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(7)
    root = tmp_path_factory.mktemp("jina-bert")
    return {name: make(root / name) for name, make in MAKERS.items()}


def hidden(folder: Path, *texts: str) -> torch.Tensor:
    """Token vectors of one text, or of a pair."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    given = tokenizer(*texts, truncation=True, max_length=512, return_token_type_ids=True)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    return jina_bert_oracle.hidden(tensors, config, given["input_ids"], given["token_type_ids"])


@pytest.fixture(scope="module")
def right(folders: dict[str, Path]) -> dict[str, Any]:
    def mean(folder: Path, text: str) -> torch.Tensor:
        return torch.nn.functional.normalize(hidden(folder, text).mean(dim=0), dim=0)

    return {name: torch.stack([mean(folders[name], text) for text in TEXTS]).numpy() for name in EMBEDDERS}


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", EMBEDDERS)
def test_vectors_are_those_of_the_formula(
    kind: str, attention: Any, folders: dict[str, Path], right: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BIASED_SCORES", 6 * 5000)  # long texts are computed in parts
    model = load_model(EngineConfig(model=str(folders[kind]), dtype="float32", attention=attention))
    assert (model.card.attention, model.card.pooling) == (attention, "mean")
    assert np.abs(embed(model, TEXTS) - right[kind]).max() <= CLOSE
    alone = np.concatenate([embed(model, [text]) for text in TEXTS[:4]])
    assert np.abs(alone - right[kind][:4]).max() <= CLOSE


def test_distances_matter_in_the_formula(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bent = hidden(folders["v2-base-en"], TEXTS[-1])
    monkeypatch.setattr(jina_bert_oracle, "slopes", lambda heads: [0.0] * heads)
    assert float((bent - hidden(folders["v2-base-en"], TEXTS[-1])).abs().max()) > 0.5


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_scores_of_the_reranker_are_those_of_the_formula(attention: Any, folders: dict[str, Path]) -> None:
    folder = folders["reranker-v1"]
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    model = load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention))
    found = score(model, TEXTS[0], TEXTS[1:])
    assert found.logits is not None
    for text, logit in zip(TEXTS[1:], found.logits, strict=True):
        first = hidden(folder, TEXTS[0], text)[0]
        pooled = torch.tanh(first @ tensors["bert.pooler.dense.weight"].T + tensors["bert.pooler.dense.bias"])
        assert abs(float(pooled @ tensors["classifier.weight"][0] + tensors["classifier.bias"][0]) - logit) < 1e-4


def test_code_of_the_folder_is_not_run_with_trust(folders: dict[str, Path], right: dict[str, Any]) -> None:
    model = load_model(EngineConfig(model=str(folders["v2-base-code"]), dtype="float32", trust_remote_code=True))
    assert np.abs(embed(model, TEXTS[:2]) - right["v2-base-code"][:2]).max() <= CLOSE


def test_pickled_weights_take_the_form_from_the_name_of_the_code(
    folders: dict[str, Path], right: dict[str, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["v2-base-code"], tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    assert np.abs(embed(model, TEXTS[:2]) - right["v2-base-code"][:2]).max() <= CLOSE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feed_forward_type": "original"}, "feed_forward_type='original' is not supported for JinaBertForMaskedLM"),
        ({"architectures": ["JinaBertForQuestionAnswering"]}, "architectures names JinaBertForQuestionAnswering"),
        ({"num_attention_heads": 5}, "hidden_size must be a multiple of num_attention_heads"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
    ],
)
def test_what_is_not_understood_is_rejected(
    changes: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["v2-base-en"], tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=said):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
