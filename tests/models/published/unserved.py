"""Models that are not served, and the words of each rejection."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.models.published import Layout, rejected, scores
from tests.models.published.embedders import mode
from tests.models.tiny import EVERY, edit_json, pooling_flags, write_json, write_modules
from tests.models.tiny.bodies import Body, bert
from tests.models.tiny.hub import WEIGHTS, after, claims, files, only, pooled, qwen3_lm, with_tensors
from tests.models.tiny.vocabularies import byte_bpe

CODE: Final = "asks for the folder's own code, which is not run unless trust_remote_code (--trust-remote-code) is set"
OWN_MODULE: Final = "is the folder's own code, which is never run"
HEAD: Final = "belongs to a head that is not supported: without it the model's results would be wrong"
EMBED: Final = "--task embed"
WORDS: Final = "adapter_config.json"


def own_code(name: str, model_type: str, file: str, body: Body = bert, **config: Any) -> Body:
    """A class of the repository's own Python file."""
    return after(body, claims(name, model_type=model_type, auto_map={"AutoModel": f"{file}.{name}"}, **config))


def with_module(kind: str, body: str = "bert-mean", **settings: Any) -> Body:
    """A module behind the pooling."""

    def make(folder: Path) -> None:
        EVERY[body](folder)
        write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), (kind, settings))

    return make


def sparse_autoencoder(folder: Path) -> None:
    """As sentence-transformers 5 saves a CSR model."""
    bert(folder)
    kind = "sentence_transformers.sparse_encoder.models.SparseAutoEncoder.SparseAutoEncoder"
    write_modules(
        folder, ("Pooling", pooling_flags("mean_tokens")), (kind, {"input_dim": 32, "hidden_dim": 128, "k": 8})
    )
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "prompts": {}})


def token_pooling(folder: Path) -> None:
    """As sentence-transformers 6 saves a MultiVectorEncoder that merges its vectors."""
    EVERY["colbert-st"](folder)
    entries = json.loads((folder / "modules.json").read_text())
    kind = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"
    entries.append({"idx": len(entries), "name": "4", "path": "4_HierarchicalTokenPooling", "type": kind})
    write_json(folder / "modules.json", entries)
    write_json(folder / "4_HierarchicalTokenPooling" / "config.json", {"pool_factor": 2})


def privacy_filter(folder: Path) -> None:
    """OpenAI's model, whose entities come from transitions between labels."""
    tokenizer = byte_bpe()
    names = ["O", *(f"{mark}-private_person" for mark in "BIES")]
    config = hf.AutoConfig.for_model(
        "openai_privacy_filter", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
        id2label=dict(enumerate(names)), label2id={name: place for place, name in enumerate(names)}, pad_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    hf.AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    points = {"default": {"biases": {"transition_bias_background_stay": 0.0}}}
    write_json(folder / "viterbi_calibration.json", {"operating_points": points})


def llm2vec(folder: Path) -> None:
    """A LoRA over a class that reads both ways, as McGill-NLP saves it."""
    base = folder.with_name("base")
    base.mkdir()
    qwen3_lm(base)
    own = {"AutoModel": "modeling_llama_encoder.LlamaEncoderModel"}
    config = json.loads((base / "config.json").read_text())
    write_json(folder / "config.json", config | {"architectures": ["LlamaEncoderModel"], "auto_map": own})
    write_json(
        folder / "adapter_config.json",
        {"peft_type": "LORA", "base_model_name_or_path": "../base", "r": 4, "lora_alpha": 8,
         "target_modules": ["q_proj"], "task_type": None},
    )  # fmt: skip
    shapes = {"A": (4, 32), "B": (32, 4)}
    layers = [f"base_model.model.layers.{place}.self_attn.q_proj.lora_{part}" for place in range(3) for part in "AB"]
    save_file(
        {f"{name}.weight": torch.randn(shapes[name[-1]]) for name in layers}, folder / "adapter_model.safetensors"
    )


def mlx(field: str) -> Body:
    """Integers with scales and biases by groups, as mlx-embeddings saves them."""

    def make(folder: Path) -> None:
        EVERY["bert-mean"](folder)
        edit_json(folder / "config.json", **{field: {"group_size": 64, "bits": 4, "mode": "affine"}})
        tensors = load_file(folder / WEIGHTS)
        tensors["encoder.layer.1.output.dense.weight"] = torch.zeros(32, 8, dtype=torch.uint32)
        for name in ("scales", "biases"):
            tensors[f"encoder.layer.1.output.dense.{name}"] = torch.ones(32, 1)
        save_file(tensors, folder / WEIGHTS, {"format": "mlx"})

    return make


def set_fit(folder: Path) -> None:
    """A head of scikit-learn beside the modules of an embedding model."""
    EVERY["bert-mean"](folder)
    (folder / "model_head.pkl").write_bytes(b"\x80\x04.")
    write_json(folder / "config_setfit.json", {"labels": ["spam", "ham"], "normalize_embeddings": False})


def bytes_of(*names: str) -> Callable[[Path], None]:
    """Nothing but these files."""

    def make(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"weights")

    return make


def hidden_layers(folder: Path) -> None:
    """WeightedLayerPooling between the transformer and its pooling."""
    bert(folder)
    layers = {"word_embedding_dimension": 32, "layer_start": 1, "num_hidden_layers": 3}
    write_modules(folder, ("WeightedLayerPooling", layers), ("Pooling", pooling_flags("mean_tokens")))


def _rerank_with(**config: Any) -> Body:
    return after(scores.nemotron_rerank, lambda folder: edit_json(folder / "config.json", **config))


_ADAPTERS: Final[Mapping[str, Any]] = {
    "config": {"adapter_residual_before_ln": False, "reduction_factor": 16},
    "hidden_size": 768,
    "model_class": "BertAdapterModel",
    "model_name": "allenai/specter2_base",
    "model_type": "bert",
    "name": "[PRX]",
}


def adapter_of_adapters(folder: Path) -> None:
    """An adapter of AdapterHub, whose settings have the name of peft's."""
    write_json(folder / WORDS, _ADAPTERS)
    (folder / "pytorch_adapter.bin").write_bytes(b"weights")


def without_base(folder: Path) -> None:
    """A LoRA of peft beside which its base model is not."""
    write_json(folder / WORDS, {"peft_type": "LORA", "base_model_name_or_path": "../nothing", "r": 4})
    save_file({"base_model.model.q.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")


LAYOUTS: Final[Mapping[str, Layout]] = {
    "nvidia/NV-Embed-v2": rejected(
        after(own_code("NVEmbedModel", "nvembed", "modeling_nvembed"), pooled("mean_tokens")),
        "modeling_nvembed.NVEmbedModel",
        CODE,
    ),
    "GritLM/GritLM-7B": rejected(
        after(
            qwen3_lm,
            claims("Qwen3ForCausalLM", auto_map={"AutoModel": "modeling_gritlm7b.MistralModel"}),
            pooled("mean_tokens"),
        ),
        "may make attention bidirectional: set is_causal in config.json to true or false",
    ),
    "Alibaba-NLP/gte-Qwen2-7B-instruct": rejected(
        after(
            qwen3_lm, claims("Qwen3ForCausalLM", auto_map={"AutoModel": "modeling_qwen.Qwen2Model"}), mode("lasttoken")
        ),
        "may make attention bidirectional: set is_causal in config.json to true or false",
    ),
    "Lajavaness/bilingual-embedding-large": rejected(
        after(own_code("BilingualModel", "bilingual", "modeling"), pooled("mean_tokens")), "modeling.Bilingual", CODE
    ),
    "openbmb/MiniCPM-Embedding-Light": rejected(
        own_code("MiniCPM", "minicpm", "modeling_minicpm"), "modeling_minicpm.MiniCPM", CODE
    ),
    "perplexity-ai/pplx-embed-v1-0.6b": rejected(
        with_module("st_quantize.FlexibleQuantizer"),
        "modules.json[2]: module st_quantize.FlexibleQuantizer",
        OWN_MODULE,
    ),
    "McGill-NLP/LLM2Vec-Meta-Llama-3-8B-Instruct-mntp": rejected(
        llm2vec, "architectures names LlamaEncoderModel, whose head is not supported", EMBED
    ),
    "McGill-NLP/LLM2Vec-Meta-Llama-3-8B-Instruct-mntp, asked for its vectors": rejected(
        llm2vec, "may make attention bidirectional: set is_causal in config.json to true or false", task="embed"
    ),
    "tomaarsen/csr-mxbai-embed-large-v1-nq": rejected(
        sparse_autoencoder, "modules.json: a sparse model must be", "Pooling -> SparseAutoEncoder"
    ),
    "a MultiVectorEncoder that merges tokens": rejected(
        token_pooling, "modules.json: module HierarchicalTokenPooling is not supported"
    ),
    "a pooling of several layers": rejected(
        hidden_layers, "the Transformer must be followed by a Pooling", "WeightedLayerPooling"
    ),
    "jinaai/jina-reranker-v3": rejected(
        after(qwen3_lm, claims("JinaForRanking", auto_map={"AutoModel": "modeling.JinaForRanking"})),
        "jina-reranker-v3, which is not supported: it reads all documents of a request in one sequence",
    ),
    "BAAI/bge-reranker-v2.5-gemma2-lightweight": rejected(
        after(qwen3_lm, claims("CostWiseGemmaForCausalLM")), "its code merges tokens between layers"
    ),
    "BAAI/bge-reranker-v2-minicpm-layerwise": rejected(
        after(qwen3_lm, claims("LayerWiseMiniCPMForCausalLM")), "its code computes scores at inner layers"
    ),
    "naver/provence-reranker-debertav3-v1": rejected(
        own_code("Provence", "Provence", "modeling_provence"), "modeling_provence.Provence", CODE
    ),
    "a llama-nemotron-rerank with a temperature": rejected(
        _rerank_with(temperature=0.5), "config.json: temperature=0.5 is not supported, only 1"
    ),
    "a llama-nemotron-rerank with two labels": rejected(
        _rerank_with(id2label={"0": "no", "1": "yes"}, num_labels=2),
        "2 labels are not supported for this class, only 1",
    ),
    "RLHFlow/ArmoRM-Llama3-8B-v0.1": rejected(
        after(
            bert,
            claims("LlamaForRewardModelWithGating"),
            with_tensors(regression_layer__weight=(19, 32), gating__weight__layers__0__weight=(4, 32)),
        ),
        "LlamaForRewardModelWithGating, whose head is not supported",
        EMBED,
    ),
    "internlm/internlm2-1_8b-reward": rejected(
        own_code("InternLM2ForRewardModel", "internlm2", "modeling_internlm2"),
        "modeling_internlm2.InternLM2ForRewardModel",
        CODE,
    ),
    "nvidia/domain-classifier": rejected(
        after(
            bert,
            files(config={"base_model": "microsoft/deberta-v3-base", "fc_dropout": 0.2, "id2label": {"0": "Adult"}}),
        ),
        "config.json: model_type is missing, so the architecture is not known",
        "PyTorchModelHubMixin",
    ),
    "a SetFit classifier": rejected(set_fit, "config_setfit.json", "SetFit", EMBED),
    "openai/privacy-filter": rejected(privacy_filter, "viterbi_calibration.json", "Viterbi", needs="5.23"),
    "urchade/gliner_multi-v2.1": rejected(
        files(gliner_config={"model_name": "microsoft/mdeberta-v3-base"}), "this is a GLiNER model", "examples/entities"
    ),
    "knowledgator/gliclass-modern-base-v2.0": rejected(
        after(bert, claims("GLiClassModel", model_type="GLiClass", architecture_type="uni-encoder")),
        "GLiClass",
        "plugin",
    ),
    "fastino/gliner2-base-v1": rejected(
        files(
            config={
                "model_type": "extractor",
                "architectures": ["Extractor"],
                "model_name": "microsoft/deberta-v3-base",
            },
            tokenizer_config={},
        ),
        "GLiNER2",
        "plugin",
    ),
    "Qwen/Qwen3-Embedding-0.6B-GGUF": rejected(
        bytes_of("Qwen3-Embedding-0.6B-Q8_0.gguf", "Qwen3-Embedding-0.6B-f16.gguf"),
        "found only weights in GGUF",
        "fetch or convert the weights",
    ),
    "mlx-community/Qwen3-Embedding-0.6B-4bit-DWQ": rejected(
        mlx("quantization"), "config.json: quantization: the weights are quantised (mlx)", "serve the unquantised model"
    ),
    "mlx-community, with the field of transformers": rejected(
        mlx("quantization_config"), "the weights are quantised (", "serve the unquantised model"
    ),
    "unsloth's 4 bits": rejected(
        after(EVERY["bert-mean"], claims("BertModel", quantization_config={"quant_method": "bitsandbytes"})),
        "the weights are quantised (bitsandbytes)",
    ),
    "onnx-community/embeddinggemma-300m-ONNX": rejected(
        after(EVERY["bert-mean"], only("onnx/model.onnx", "onnx/model_q4.onnx")), "found only a graph in ONNX"
    ),
    "OpenVINO/bge-base-en-v1.5-int8-ov": rejected(
        after(EVERY["bert-mean"], only("openvino_model.xml", "openvino_model.bin")), "found only a graph of OpenVINO"
    ),
    "allenai/specter2": rejected(
        adapter_of_adapters,
        WORDS,
        "library adapters",
        "save the whole model",
    ),
    "a LoRA whose base is missing": rejected(
        without_base,
        "adapter_config.json: the base model cannot be found: model='../nothing'",
    ),
    "weights of which some lie below a prefix": rejected(
        after(EVERY["bert-mean"], lambda folder: _some_below(folder, "_orig_mod.")), "of another shape"
    ),
}
"""Rejected layouts, by the name of the repository, or of the form."""


def _some_below(folder: Path, prefix: str) -> None:
    """Put a prefix before all names but one."""
    tensors = load_file(folder / WEIGHTS)
    first, *others = sorted(tensors)
    named = {first: tensors[first], **{f"{prefix}{name}": tensors[name] for name in others}}
    save_file(named, folder / WEIGHTS, {"format": "pt"})
