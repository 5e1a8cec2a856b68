"""Embedding models of texts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.models import oracle
from tests.models.folders.test_hub_layouts import GTE_WEIGHTS, ONE_LABEL, gte_hidden
from tests.models.oracle import Array
from tests.models.published import Layout, served
from tests.models.published.comparisons import TEXTS, all_of, tokens, vectors, vectors_of, weights
from tests.models.tiny import EVERY, bodies, edit_json, pooling_flags, write_modules, write_prompts
from tests.models.tiny.bodies import POSITIONS, WIDTH, Body, save_body
from tests.models.tiny.hub import WEIGHTS, after, claims, gte, modernbert_mlm, pooled
from tests.models.tiny.vocabularies import byte_bpe
from tests.models.vectors import test_bidirectional as bidirectional
from tests.models.vectors import test_static as static

INSTRUCT: Final = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
_GTE_NEEDS: Final = "5.18"


def mode(name: str, *, normalize: bool = True, **prompts: str) -> Callable[[Path], None]:
    """Write `modules.json` with the flags of a pooling, and the prompts."""

    def change(folder: Path) -> None:
        end = [("Normalize", dict[str, Any]())] if normalize else []
        flags = pooling_flags(name, pooling_mode_lasttoken=name == "lasttoken")
        write_modules(folder, ("Pooling", flags), *end)
        write_prompts(folder, prompts)

    return change


def decoder(name: str, **config: Any) -> Body:
    """A decoder whose tokenizer ends texts with a token of its own."""

    def make(folder: Path) -> None:
        tokenizer = byte_bpe(begin="", between="</s>")
        settings = {
            "vocab_size": len(tokenizer), "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": POSITIONS,
            "pad_token_id": 1,
        }  # fmt: skip
        made = getattr(hf, f"{name}Config")(**settings, **config)
        save_body(folder, getattr(hf, f"{name}Model")(made), tokenizer, model_max_length=POSITIONS)

    return make


def in_place(make: Callable[[Path], object]) -> Body:
    """Let a function that makes its own folder write into one that is there."""

    def body(folder: Path) -> None:
        folder.rmdir()
        make(folder)

    return body


def gte_cls(folder: Path) -> Array:
    """The first token's vector, of length 1."""
    rows = torch.stack([gte_hidden(folder, text)[1][0] for text in TEXTS])
    return torch.nn.functional.normalize(rows, dim=1).numpy()


def stella(folder: Path) -> None:
    """NewModel, the mean, and one of several folders of a Dense."""
    gte("NewModel", prefix="", type_vocab_size=2, rope_scaling={"type": "ntk", "factor": 2.0})(folder)
    dense = {"in_features": WIDTH, "out_features": 24, "bias": True}
    identity = "torch.nn.modules.linear.Identity"
    write_modules(
        folder, ("Pooling", pooling_flags("mean_tokens")), ("Dense", {**dense, "activation_function": identity})
    )
    for name in ("2_Dense", "2_Dense_256"):
        (folder / name).mkdir(exist_ok=True)
        save_file(
            {"linear.weight": torch.randn(24, WIDTH) / 6, "linear.bias": torch.randn(24)}, folder / name / WEIGHTS
        )
    write_prompts(
        folder, {"s2p_query": INSTRUCT, "s2s_query": "Instruct: Retrieve semantically similar text.\nQuery: "}
    )


def stella_formula(folder: Path) -> Array:
    layer = load_file(folder / "2_Dense" / WEIGHTS)
    rows = torch.stack([gte_hidden(folder, text)[1].mean(dim=0) for text in TEXTS])
    found = rows @ layer["linear.weight"].T + layer["linear.bias"]
    return found.numpy()


def both_ways(folder: Path) -> Array:
    return np.asarray(bidirectional.wanted(folder, TEXTS))


def renamed(prefix: str) -> Callable[[Path], None]:
    """Put the name of a wrapper before the names of all weights."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})

    return change


def without(prefix: str) -> Callable[[Path], Array]:
    """Return the vectors of sentence-transformers, with weights that have their own names."""

    def formula(folder: Path) -> Array:
        plain = Path(shutil.copytree(folder, folder.with_name("plain")))
        tensors = load_file(plain / WEIGHTS)
        names = {name: name.removeprefix(prefix) for name in tensors}
        save_file({names[name]: tensor for name, tensor in tensors.items()}, plain / WEIGHTS, {"format": "pt"})
        return oracle.dense(plain, TEXTS)

    return formula


def saved_by_mlx(folder: Path) -> None:
    """Weights that are not quantised, with the name of MLX in their header."""
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, {"format": "mlx"})


def beside_other_formats(folder: Path) -> None:
    """Graphs and weights of other libraries beside the safetensors."""
    for name in ("onnx/model.onnx", "onnx/model_quantized.onnx", "openvino/openvino_model.xml", "model-Q8_0.gguf"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"weights")


_QWEN3 = EVERY["qwen3-embed-left"]
_ALL_KINDS = all_of(vectors(), weights(), tokens())

LAYOUTS: Final[Mapping[str, Layout]] = {
    "Qwen/Qwen3-Embedding-0.6B": served(after(_QWEN3, claims("Qwen3ForCausalLM")), vectors("query")),
    "codefuse-ai/F2LLM-0.6B": served(after(decoder("Qwen3"), mode("lasttoken")), vectors(words_of_file=True)),
    "google/embeddinggemma-300m": served(EVERY["gemma3-embed"], vectors("query", "document", "Clustering")),
    "BAAI/bge-multilingual-gemma2": served(
        after(
            decoder("Gemma2", query_pre_attn_scalar=8, sliding_window=16),
            mode("lasttoken", web_search_query=f"<instruct>{INSTRUCT}\n<query>"),
        ),
        vectors("web_search_query", words_of_file=True),
    ),
    "Salesforce/SFR-Embedding-Mistral": served(
        after(decoder("Mistral", sliding_window=16), mode("lasttoken")), vectors(words_of_file=True)
    ),
    "BAAI/bge-code-v1": served(after(decoder("Qwen2"), mode("lasttoken")), vectors(words_of_file=True)),
    "jinaai/jina-code-embeddings-0.5b": served(
        after(
            decoder("Qwen2"),
            claims("Qwen2ForCausalLM"),
            mode(
                "lasttoken",
                nl2code_query="Find the most relevant code snippet given the following query:\n",
                nl2code_document="Candidate code snippet:\n",
            ),
            lambda folder: edit_json(folder / "config.json", matryoshka_dims=[16, 32]),
        ),
        vectors("nl2code_query", "nl2code_document", words_of_file=True),
    ),
    "sbintuitions/sarashina-embedding-v1-1b": served(
        after(decoder("Llama"), mode("lasttoken", normalize=False)), vectors(words_of_file=True)
    ),
    "HIT-TMG/KaLM-embedding-multilingual-mini-instruct-v1.5": served(
        after(decoder("Qwen2"), mode("mean_tokens")), vectors(words_of_file=True)
    ),
    "Snowflake/snowflake-arctic-embed-l-v2.0": served(
        after(bodies.xlm_roberta, mode("cls_token", query="query: ")), vectors("query")
    ),
    "Snowflake/snowflake-arctic-embed-m-v2.0": served(
        after(gte("GteModel", prefix="", model_type="gte", rope_scaling=None, rope_theta=160000), pooled("cls_token")),
        vectors_of(gte_cls),
        needs=_GTE_NEEDS,
    ),
    "Alibaba-NLP/gte-multilingual-base": served(
        after(gte("NewForTokenClassification", head=GTE_WEIGHTS, **ONE_LABEL), pooled("cls_token")),
        vectors_of(gte_cls),
        needs=_GTE_NEEDS,
    ),
    "NovaSearch/stella_en_400M_v5": served(stella, vectors_of(stella_formula), needs=_GTE_NEEDS),
    "Alibaba-NLP/gte-modernbert-base": served(after(bodies.modernbert, mode("cls_token", normalize=False)), vectors()),
    "nomic-ai/modernbert-embed-base": served(after(bodies.modernbert, mode("mean_tokens")), vectors()),
    "ibm-granite/granite-embedding-english-r2": served(EVERY["modernbert-cls"], vectors()),
    "cl-nagoya/ruri-v3-310m": served(
        after(bodies.modernbert, mode("mean_tokens", normalize=False, query="検索クエリ: ", document="検索文書: ")),
        vectors("query", "document"),
    ),
    "answerdotai/ModernBERT-base": served(modernbert_mlm, vectors()),
    "mixedbread-ai/mxbai-embed-large-v1": served(EVERY["arctic-cls"], vectors("query")),
    "intfloat/multilingual-e5-large-instruct": served(after(bodies.xlm_roberta, mode("mean_tokens")), vectors()),
    "ibm-granite/granite-embedding-107m-multilingual": served(after(bodies.xlm_roberta, mode("cls_token")), vectors()),
    "nomic-ai/nomic-embed-text-v1.5": served(EVERY["nomic-matryoshka"], vectors("query", "document"), needs="5.5"),
    "BAAI/bge-m3": served(EVERY["bge-m3"], _ALL_KINDS),
    "nvidia/llama-nemotron-embed-1b-v2": served(in_place(bidirectional.nemotron_with_modules), vectors_of(both_ways)),
    "voyageai/voyage-4-nano": served(in_place(bidirectional.voyage), vectors_of(both_ways)),
    "minishlab/potion-base-8M": served(in_place(static.potion), vectors()),
    "minishlab/potion-retrieval-32M": served(in_place(static.quantised), vectors()),
    "sentence-transformers/static-retrieval-mrl-en-v1": served(in_place(static.static_retrieval), vectors("query")),
    "onnx-community/all-MiniLM-L6-v2 with its safetensors": served(
        after(EVERY["bert-mean"], beside_other_formats), vectors()
    ),
    "mlx-community/bge-small-en-v1.5-bf16": served(after(EVERY["bge-cls"], saved_by_mlx), vectors("query")),
    **{
        f"weights below {prefix}": served(after(EVERY["bert-mean"], renamed(prefix)), vectors_of(without(prefix)))
        for prefix in ("_orig_mod.", "module.", "base_model.model.", "module._orig_mod.", "0.auto_model.")
    },
}
"""Served layouts, by the name of the repository, or of the form."""
