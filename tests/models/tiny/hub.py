"""Folders as they are found on the hub, beside the kinds of this package: other heads, other files, other libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.models import gte_oracle
from tests.models.tiny import bodies
from tests.models.tiny.bodies import POSITIONS, Body, save_body
from tests.models.tiny.layout import edit_json, pooling_flags, write_json, write_modules
from tests.models.tiny.vocabularies import byte_bpe, unigram, word_piece

Change = Callable[[Path], object]

WEIGHTS: Final = "model.safetensors"
PICKLED: Final = "pytorch_model.bin"


def after(body: Body, *changes: Change) -> Body:
    """Make a body, then change its folder."""

    def make(folder: Path) -> None:
        body(folder)
        for change in changes:
            change(folder)

    return make


def bert_as(name: str, **config: Any) -> Body:
    """A BERT of one of transformers' classes for it."""

    def make(folder: Path) -> None:
        tokenizer = word_piece()
        save_body(folder, getattr(hf, name)(bodies.bert_config(len(tokenizer), **config)), tokenizer)

    return make


def of_pages(name: str, model_type: str, **config: Any) -> Body:
    """A model of pages or tables, with a tokenizer of texts: that of BERT or of RoBERTa."""

    def make(folder: Path) -> None:
        tokenizer = word_piece() if model_type in ("layoutlm", "tapas", "bros") else byte_bpe()
        settings = {
            "vocab_size": len(tokenizer),
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": POSITIONS + 2,
            "pad_token_id": tokenizer.pad_token_id,
        }
        made = hf.AutoConfig.for_model(model_type, **settings, **config)
        save_body(folder, getattr(hf, name)(made), tokenizer, model_max_length=POSITIONS)

    return make


def electra(folder: Path) -> None:
    tokenizer = word_piece()
    config = hf.ElectraConfig(
        vocab_size=len(tokenizer), embedding_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=POSITIONS,
    )  # fmt: skip
    save_body(folder, hf.ElectraForPreTraining(config), tokenizer)


def distilbert_mlm(folder: Path) -> None:
    tokenizer = word_piece()
    save_body(folder, hf.DistilBertForMaskedLM(bodies.distilbert_config(len(tokenizer))), tokenizer)


def modernbert_mlm(folder: Path) -> None:
    tokenizer = byte_bpe(between="</s>")
    save_body(folder, hf.ModernBertForMaskedLM(bodies.modernbert_config(len(tokenizer))), tokenizer)


def roberta_labels(folder: Path) -> None:
    tokenizer = byte_bpe()
    config = bodies.roberta_config(len(tokenizer), id2label={0: "negative", 1: "neutral", 2: "positive"})
    save_body(folder, hf.RobertaForSequenceClassification(config), tokenizer, model_max_length=POSITIONS)


def qwen3_lm(folder: Path) -> None:
    tokenizer = byte_bpe(begin="", between="</s>")
    save_body(folder, hf.Qwen3ForCausalLM(bodies.qwen3_config(len(tokenizer))), tokenizer)


def t5_whole(folder: Path) -> None:
    tokenizer = byte_bpe(begin="", between="</s>")
    config = hf.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=1,
        decoder_start_token_id=1,
    )  # fmt: skip
    save_body(folder, hf.T5ForConditionalGeneration(config), tokenizer, model_max_length=64)


def with_readout(folder: Path) -> None:
    """As decision models have it: a matrix with a row for each option, and how it is used."""
    settings = {"format_version": 1, "pooling": "last", "attention_mode": "causal", "temperature": 1.13}
    write_json(folder / "decision_config.json", settings)
    save_file({"weight": torch.randn(255, bodies.WIDTH)}, folder / "readout.safetensors")


def pooled(mode: str) -> Change:
    """Write the files of sentence-transformers beside a transformer."""
    return lambda folder: write_modules(folder, ("Pooling", pooling_flags(mode)), ("Normalize", {}))


def claims(name: str, **others: Any) -> Change:
    """Say in `config.json` that the checkpoint is of another class."""
    return lambda folder: edit_json(folder / "config.json", architectures=[name], **others)


def with_tensors(**more: tuple[int, ...]) -> Change:
    """Add tensors to the weights; two underscores stand for a dot."""
    return with_tensors_in("", **more)


def with_tensors_in(inner: str, **more: tuple[int, ...]) -> Change:
    """Add tensors to the weights in a folder of the folder."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / inner / WEIGHTS)
        tensors |= {name.replace("__", "."): torch.randn(shape) for name, shape in more.items()}
        save_file(tensors, folder / inner / WEIGHTS, {"format": "pt"})

    return change


def without_tensor(name: str) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors[name]
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return change


def with_types(kind: torch.dtype, *names: str) -> Change:
    """Save these tensors as another type."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {name: tensors[name].to(kind) for name in names}, folder / WEIGHTS, {"format": "pt"})

    return change


def modalities(output: str = "token_embeddings", **config: Any) -> Change:
    """Write how the newest sentence-transformers asks a transformer."""
    content = {
        "transformer_task": "feature-extraction", "modality_config": config, "module_output_name": output
    }  # fmt: skip
    return lambda folder: write_json(folder / "sentence_bert_config.json", content)


def scaled(**fields: Any) -> Change:
    """Say something else of rotary positions."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config["rope_parameters"]
        write_json(folder / "config.json", config | {"rope_theta": 10000.0} | fields)

    return change


def dense_with(activation: str) -> Change:
    """Name another function of the Dense behind the pooling."""
    return lambda folder: edit_json(folder / "2_Dense" / "config.json", activation_function=activation)


def canine(folder: Path) -> None:
    """Put a CANINE beside a tokenizer."""
    config = hf.CanineConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64,
        num_hash_buckets=16, local_transformer_stride=4,
    )  # fmt: skip
    hf.CanineModel(config).save_pretrained(folder)


def pickled(folder: Path) -> None:
    """Save the weights as they were before safetensors."""
    torch.save(load_file(folder / WEIGHTS), folder / PICKLED)
    (folder / WEIGHTS).unlink()


def pickled_in_parts(folder: Path) -> None:
    """Save the weights in two pickles and an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"pytorch_model-0000{1 + place % 2}-of-00002.bin" for place, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    write_json(folder / f"{PICKLED}.index.json", {"metadata": {}, "weight_map": files})


def only(*names: str, **written: str) -> Body:
    """Take the weights away, and put these files there; two underscores in `written` stand for a dot."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink(missing_ok=True)
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"weights")
        for name, text in written.items():
            (folder / name.replace("__", ".")).write_text(text)

    return change


def files(**content: Mapping[str, Any]) -> Body:
    """Nothing but these JSON files, by their names without the ending."""

    def make(folder: Path) -> None:
        for name, fields in content.items():
            write_json(folder / f"{name}.json", fields)

    return make


GTE: Final[Mapping[str, Any]] = {
    "model_type": "new",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "max_position_embeddings": POSITIONS,
    "hidden_act": "gelu",
    "layer_norm_type": "layer_norm",
    "layer_norm_eps": 1e-12,
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "rope_theta": 20000,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}
"""The config of gte-multilingual-base, but for its size."""

_IMPL: Final = "Alibaba-NLP/new-impl--"


def gte(name: str, *, prefix: str = "new.", head: Mapping[str, tuple[int, ...]] | None = None, **config: Any) -> Body:
    """A GTE model as Alibaba-NLP publishes it, whose code lies in another repository."""

    def make(folder: Path) -> None:
        tokenizer = unigram()
        tokenizer.save_pretrained(folder)
        edit_json(folder / "tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer", model_max_length=POSITIONS)
        code = {"AutoConfig": f"{_IMPL}configuration.NewConfig", "AutoModel": f"{_IMPL}modeling.NewModel"}
        fields = {**GTE, "architectures": [name], "vocab_size": len(tokenizer), "auto_map": code, **config}
        write_json(folder / "config.json", fields)
        tensors = gte_oracle.random_tensors(fields, prefix)
        tensors |= {part: torch.randn(shape) * 0.5 for part, shape in (head or {}).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return make
