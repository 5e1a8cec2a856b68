"""XLM-RoBERTa in Jina AI's layout; the oracle is transformers with the same weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError
from tests.models.requests import embed, score
from tests.models.tiny import edit_json, unigram, write_json
from tests.models.tiny.bodies import POSITIONS, WIDTH, roberta_config, widen
from tests.models.vectors.test_oracle import MIXED

TEXTS = ["A man is eating food", "x", *MIXED[:6]]
_CODE = "configuration_xlm_roberta.XLMRobertaFlashConfig"
_ABSOLUTE = (
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.output\.dense", "mixer.out_proj"),
    (r"attention\.output\.LayerNorm", "norm1"),
    (r"(\d)\.output\.LayerNorm", r"\1.norm2"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"(\d)\.output\.dense", r"\1.mlp.fc2"),
    (r"embeddings\.LayerNorm", "emb_ln"),
)
_ROTARY = (
    (r"(^|\.)layers\.", r"\1encoder.layers."),
    (r"self_attn\.o_proj", "mixer.out_proj"),
    (r"post_attention_layernorm", "norm1"),
    (r"post_mlp_layernorm", "norm2"),
    (r"embeddings\.LayerNorm", "emb_ln"),
)
_APART = re.compile(r"(attention\.self|self_attn)\.(query|q_proj)\.")


def published(model: nn.Module, names: tuple[tuple[str, str], ...], prefix: str = "") -> dict[str, Tensor]:
    """The weights of a model by the names of the layout."""
    own, found = model.state_dict(), dict[str, Tensor]()
    for name, tensor in own.items():
        if name.endswith("position_ids") or re.search(r"\.(key|value|k_proj|v_proj)\.", name):
            continue
        if _APART.search(name):
            others = [name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")]
            if "query" in name:
                others = [name.replace(".query.", ".key."), name.replace(".query.", ".value.")]
            tensor = torch.cat([tensor, *(own[other] for other in others)])  # noqa: PLW2901
        new = _APART.sub("mixer.Wqkv.", name)
        for pattern, other in names:
            new = re.sub(pattern, other, new)
        found[prefix + new] = tensor.contiguous().clone()
    return found


def _write(folder: Path, tensors: dict[str, Tensor], config: hf.PreTrainedConfig, **fields: Any) -> None:
    folder.mkdir()
    unigram().save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer", model_max_length=POSITIONS)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("model_type", "architectures", "rope_parameters", "transformers_version", "dtype")
    }
    write_json(folder / "config.json", {**kept, "auto_map": {"AutoConfig": _CODE}, "use_flash_attn": True, **fields})


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """jina-reranker-v2-base-multilingual, whose config has no model_type."""
    torch.manual_seed(7)
    config = roberta_config(len(unigram()), hf.XLMRobertaConfig, num_labels=1)
    model = hf.XLMRobertaForSequenceClassification(config).eval()
    widen(model)
    folder = tmp_path_factory.mktemp("flash") / "reranker"
    _write(
        folder,
        published(model, _ABSOLUTE),
        config,
        architectures=["XLMRobertaForSequenceClassification"],
        num_labels=1,
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
        position_embedding_type="absolute",
    )
    return folder, model


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Tensor]:
    """jina-colbert-v2."""
    torch.manual_seed(8)
    tokenizer = unigram()
    config = hf.JinaEmbeddingsV3Config(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=POSITIONS, pad_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    model = hf.JinaEmbeddingsV3Model(config, add_pooling_layer=False).eval()
    widen(model)
    linear = torch.randn(16, WIDTH) / 6
    folder = tmp_path_factory.mktemp("flash") / "colbert"
    _write(
        folder,
        published(model, _ROTARY, "roberta.") | {"linear.weight": linear},
        config,
        architectures=["HF_ColBERT"],
        model_type="xlm-roberta",
        lora_adaptations=None,
        position_embedding_type="rotary",
        rotary_emb_base=500.0,
    )
    marker = tokenizer.convert_ids_to_tokens(20)
    metadata = {"query_token_id": marker, "doc_token_id": marker, "doc_maxlen": POSITIONS, "query_maxlen": 16}
    write_json(folder / "artifact.metadata", {**metadata, "mask_punctuation": False, "similarity": "cosine"})
    return folder, model, linear


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_scores_are_those_of_transformers(attention: Any, reranker: tuple[Path, Any]) -> None:
    folder, whole = reranker
    model = load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention))
    found = score(model, TEXTS[0], TEXTS[1:])
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    assert found.logits is not None
    for text, logit in zip(TEXTS[1:], found.logits, strict=True):
        given = tokenizer(TEXTS[0], text, truncation=True, max_length=POSITIONS, return_tensors="pt")
        with torch.inference_mode():
            wanted = float(whole(input_ids=given["input_ids"]).logits)
        assert abs(wanted - logit) < 1e-4


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_token_vectors_with_rotary_positions_are_those_of_transformers(
    attention: Any, colbert: tuple[Path, Any, Tensor]
) -> None:
    folder, body, linear = colbert
    model = load_model(EngineConfig(model=str(folder), dtype="float32", attention=attention))
    found = embed(model, TEXTS, Output.MULTI_VECTOR, prompt_name="document").multi_vector
    assert found is not None
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    for text, vectors in zip(TEXTS, found, strict=True):
        first, *ids = tokenizer(text, truncation=True, max_length=POSITIONS - 1)["input_ids"]
        with torch.inference_mode():
            hidden = body(input_ids=torch.tensor([[first, 20, *ids]])).last_hidden_state[0]
        wanted = functional.normalize(hidden @ linear.T, dim=1).numpy()
        assert np.abs(vectors - wanted).max() < 2e-5


def test_code_of_the_folder_is_not_run_with_trust(reranker: tuple[Path, Any]) -> None:
    model = load_model(EngineConfig(model=str(reranker[0]), dtype="float32", trust_remote_code=True))
    assert model.card.architecture == "XLMRobertaModel"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["XLMRobertaForQuestionAnswering"]}, "is not supported for XLMRobertaFlashConfig, only"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi' is not supported"),
        ({"lora_adaptations": ["a"]}, "lora_adaptations is not supported for XLMRobertaForSequenceClassification"),
        ({"position_embedding_type": "rotary", "rotary_emb_base": "x"}, "rotary_emb_base='x' must be a number above 0"),
    ],
)
def test_what_is_not_understood_is_rejected(
    changes: dict[str, Any], said: str, reranker: tuple[Path, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(reranker[0], tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=said):
        load_model(EngineConfig(model=str(folder), dtype="float32"))


def test_a_weight_that_no_class_reads_is_named(reranker: tuple[Path, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(reranker[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"roberta.gate.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"gate\.weight of the weights would not be read"):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
