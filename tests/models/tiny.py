"""Tiny models made by code, in the folder layouts that are found in the wild.

Weights are random but wide: a wrong mask, position, pooling or module order moves vectors by far more than rounding.
Tokenizers are trained on English that comes with Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

CORPUS = list(topics.values())
WIDTH = 32
POSITIONS = 96

Body = Callable[[Path], None]


def build(kind: str, folder: Path) -> Path:
    """Make the model `kind` in `folder`, which must not exist yet."""
    folder.mkdir(parents=True)
    torch.manual_seed(7)
    KINDS[kind](folder)
    return folder


# Tokenizers


def _trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> hf.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _trained(tokenizer, trainers.WordPieceTrainer(vocab_size=1500, special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # Real folders come with settings like these; they must have no effect.
    tokenizer.enable_truncation(11)
    tokenizer.enable_padding(length=11)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def byte_bpe(begin: str = "<s>", end: str = "</s>") -> hf.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    _trained(
        tokenizer,
        trainers.BpeTrainer(vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(), special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def unigram() -> hf.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=1500, special_tokens=special, unk_token="<unk>", show_progress=False)
    _trained(tokenizer, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


# Transformers


def save_body(
    folder: Path, model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast, **tokenizer_config: Any
) -> None:
    """Save a transformer with wide random weights, and its tokenizer."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 1.5 * module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 1)
            elif isinstance(weight := getattr(module, "weight", None), nn.Parameter):
                weight.normal_(1, 0.2)  # the norms, whose class differs between architectures
            if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
                bias.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if tokenizer_config:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer_config))


def bert(folder: Path, **tokenizer_config: Any) -> None:
    tokenizer = word_piece()
    config = hf.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
    )
    save_body(folder, hf.BertModel(config), tokenizer, **tokenizer_config)


def _roberta(config_class: type[hf.RobertaConfig], model_class: type[hf.PreTrainedModel], folder: Path) -> None:
    tokenizer = unigram() if config_class is hf.XLMRobertaConfig else byte_bpe()
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS + 2,
        type_vocab_size=1,
        pad_token_id=1,
    )
    save_body(folder, model_class(config), tokenizer, model_max_length=POSITIONS)


def _mpnet(folder: Path) -> None:
    tokenizer = byte_bpe()
    config = hf.MPNetConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS + 2,
        pad_token_id=1,
    )
    save_body(folder, hf.MPNetModel(config), tokenizer, model_max_length=POSITIONS)


def _distilbert(folder: Path) -> None:
    tokenizer = word_piece()
    config = hf.DistilBertConfig(
        vocab_size=len(tokenizer), dim=WIDTH, n_layers=3, n_heads=4, hidden_dim=64, max_position_embeddings=POSITIONS
    )
    save_body(folder, hf.DistilBertModel(config), tokenizer)


def _modernbert(folder: Path) -> None:
    tokenizer = byte_bpe()
    config = hf.ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=POSITIONS,
        local_attention=16,
        global_attn_every_n_layers=2,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        cls_token_id=0,
        sep_token_id=2,
    )
    save_body(folder, hf.ModernBertModel(config), tokenizer)


def _t5(folder: Path) -> None:
    tokenizer = byte_bpe(begin="")
    config = hf.T5Config(
        vocab_size=len(tokenizer), d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=1
    )
    save_body(folder, hf.T5EncoderModel(config), tokenizer)


def _qwen3(folder: Path) -> None:
    tokenizer = byte_bpe(begin="")
    config = hf.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=1,
    )
    save_body(folder, hf.Qwen3Model(config), tokenizer)


# What stands around them


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(folder: Path, *modules: tuple[str, Mapping[str, Any]], body: str = "") -> None:
    """Write `modules.json` for a Transformer in `body` and what follows it, and each one's own settings."""
    entries = [{"idx": 0, "name": "0", "path": body, "type": "sentence_transformers.models.Transformer"}]
    for place, (kind, settings) in enumerate(modules, start=1):
        path = f"{place}_{kind.rpartition('.')[2]}"
        full = kind if "." in kind else f"sentence_transformers.models.{kind}"
        entries.append({"idx": place, "name": str(place), "path": path, "type": full})
        if settings:
            write_json(folder / path / "config.json", settings)
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "modules.json", entries)


def pooling_flags(mode: str, **others: Any) -> dict[str, Any]:
    """How folders made before sentence-transformers 5.4 say it."""
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens")}
    return {"word_embedding_dimension": WIDTH, **flags, **others}


def _bert_mean(folder: Path) -> None:
    bert(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})


def _bert_cls(folder: Path) -> None:
    """The newest names, and the transformer in a folder of its own as in the oldest."""
    bert(folder / "0_Transformer", model_max_length=48)
    new = "sentence_transformers.sentence_transformer.modules"
    write_modules(
        folder,
        (f"{new}.pooling.Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "cls"}),
        (f"{new}.dropout.Dropout", {"dropout": 0.5}),
        ("sentence_transformers.base.modules.normalize.Normalize", {}),
        body="0_Transformer",
    )
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SentenceTransformer", "prompts": {}})


def _bert_max_dense(folder: Path) -> None:
    """Two Dense: pickled and with an activation, and safe with a residual. Not normalised."""
    bert(folder)
    first = {
        "in_features": WIDTH,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    second = {
        "in_features": 24,
        "out_features": 20,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": True,
    }
    write_modules(folder, ("Pooling", pooling_flags("max_tokens")), ("Dense", first), ("Dense", second))
    torch.save({"linear.weight": torch.randn(24, WIDTH) / 6, "linear.bias": torch.randn(24)},
               folder / "2_Dense" / "pytorch_model.bin")  # fmt: skip
    save_file({"linear.weight": torch.randn(20, 24) / 6, "residual.weight": torch.randn(20, 24) / 6},
              folder / "3_Dense" / "model.safetensors")  # fmt: skip


def _bert_plain(folder: Path) -> None:
    bert(folder)


def _bert_mean_cls(folder: Path) -> None:
    bert(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens", pooling_mode_cls_token=True)), ("Normalize", {}))


def _bert_other_means(folder: Path) -> None:
    bert(folder)
    modes = ["weightedmean", "mean_sqrt_len_tokens", "lasttoken"]
    write_modules(folder, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": modes}), ("Normalize", {}))


def _bert_layernorm(folder: Path) -> None:
    """A normalisation in the middle, which counts, and text that is lowercased before a cased tokenizer."""
    tokenizer = byte_bpe()
    config = hf.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        pad_token_id=1,
    )
    save_body(folder, hf.BertModel(config), tokenizer)
    write_modules(
        folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}), ("LayerNorm", {"dimension": WIDTH})
    )
    save_file({"norm.weight": torch.randn(WIDTH), "norm.bias": torch.randn(WIDTH)},
              folder / "3_LayerNorm" / "model.safetensors")  # fmt: skip
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})


def _roberta_mean(folder: Path) -> None:
    _roberta(hf.RobertaConfig, hf.RobertaModel, folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(folder / "sentence_roberta_config.json", {"max_seq_length": POSITIONS})


def _xlmr_prompt(folder: Path) -> None:
    """A prompt before every text, and vectors that are cut."""
    _roberta(hf.XLMRobertaConfig, hf.XLMRobertaModel, folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query", "truncate_dim": 20},
    )


def _mean_of(body: Body) -> Body:
    def make(folder: Path) -> None:
        body(folder)
        write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))

    return make


def _modernbert_cls(folder: Path) -> None:
    _modernbert(folder)
    write_modules(folder, ("Pooling", pooling_flags("cls_token")), ("Normalize", {}))


def _t5_mean(folder: Path) -> None:
    _t5(folder)
    write_modules(folder, ("Pooling", pooling_flags("mean_tokens")), ("Normalize", {}))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64})


def _qwen3_last(folder: Path) -> None:
    _qwen3(folder)
    write_modules(folder, ("Pooling", {"embedding_dimension": WIDTH, "pooling_mode": "lasttoken"}), ("Normalize", {}))


KINDS: Mapping[str, Body] = {
    "bert-mean": _bert_mean,
    "bert-cls": _bert_cls,
    "bert-max-dense": _bert_max_dense,
    "bert-plain": _bert_plain,
    "bert-mean-cls": _bert_mean_cls,
    "bert-other-means": _bert_other_means,
    "bert-layernorm": _bert_layernorm,
    "roberta-mean": _roberta_mean,
    "xlmr-prompt": _xlmr_prompt,
    "mpnet-mean": _mean_of(_mpnet),
    "distilbert-mean": _mean_of(_distilbert),
    "modernbert-cls": _modernbert_cls,
    "t5-mean": _t5_mean,
    "qwen3-last": _qwen3_last,
}
"""Each kind of model that can be built, by name."""
