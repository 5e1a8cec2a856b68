"""Folders whose `tokenizer.json` differs from the output of their tokenizer's class."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.models.tiny.layout import write_json
from tests.models.tiny.vocabularies import CORPUS

_TEXTS = [*CORPUS[:60], *["caf\u00e9 na\u00efve \u65e5\u672c\u8a9e 2023 2023 650841823 1999 12 34 56 78 90"] * 60]
"""Numbers of several digits come so often that they become one token."""

BERT = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
XLMR = {**LLAMA, "cls_token": "<s>", "sep_token": "</s>"}

_DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
_THREES = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


@functools.cache
def _trained(kind: str) -> str:
    if kind == "pieces":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(
            vocab_size=900, special_tokens=list(BERT.values()), show_progress=False
        )
        tokenizer.decoder = decoders.WordPiece()
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=900, special_tokens=list(LLAMA.values()), unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=list(LLAMA.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return str(tokenizer.to_str())


def pieces(normalizer: Any) -> Tokenizer:
    """BERT's, with a normalizer."""
    tokenizer = Tokenizer.from_str(_trained("pieces"))
    tokenizer.normalizer = normalizer
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def unigram(normalizer: Any = None) -> Tokenizer:
    """XLM-RoBERTa's, with a normalizer."""
    tokenizer = Tokenizer.from_str(_trained("unigram"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return with_template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def bytes_bpe(pre_tokenizer: Any = None, single: str = "") -> Tokenizer:
    """GPT-2's, with a pre-tokenizer and the special tokens around a text."""
    tokenizer = Tokenizer.from_str(_trained("bpe"))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return with_template(tokenizer, single, f"{single} $B") if single else tokenizer


def with_template(tokenizer: Tokenizer, single: str, pair: str) -> Tokenizer:
    """Set the special tokens around texts."""
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, model_type: str, **settings: Any) -> Path:
    """Write a folder with a tokenizer and its settings, and without weights."""
    write_json(folder / "config.json", {"model_type": model_type, "vocab_size": tokenizer.get_vocab_size()})
    write_json(folder / "tokenizer_config.json", settings)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _lower() -> Any:
    return normalizers.BertNormalizer(lowercase=True)


def _cased() -> Any:
    return normalizers.BertNormalizer(lowercase=False)


def _nfkc() -> Any:
    return normalizers.Sequence([normalizers.NFKC(), normalizers.BertNormalizer(lowercase=True)])


Layout = tuple[Callable[[], Tokenizer], str, Mapping[str, Any]]

_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}

LAYOUTS: Mapping[str, Layout] = {
    "BERT": (lambda: pieces(_lower()), "bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **BERT}),
    "BERT without a class": (lambda: pieces(_lower()), "bert", BERT),
    "BERT with Unigram": (unigram, "bert", XLMR),
    "BERT, cased": (lambda: pieces(_cased()), "bert", {"tokenizer_class": "BertTokenizer", **BERT}),
    "BERT, cased and said to be lower": (
        lambda: pieces(_cased()), "bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **BERT}
    ),
    "BERT behind NFKC": (lambda: pieces(_nfkc()), "bert", {"tokenizer_class": "BertTokenizer", **BERT}),
    "BERT behind NFKC, fast": (lambda: pieces(_nfkc()), "bert", {**_FAST, **BERT}),
    "XLM-R as RoBERTa": (unigram, "xlm-roberta", {"tokenizer_class": "RobertaTokenizer", **XLMR}),
    "XLM-R": (lambda: unigram(normalizers.NFKC()), "xlm-roberta", {"tokenizer_class": "XLMRobertaTokenizer", **XLMR}),
    "DeBERTa": (unigram, "deberta-v2", {"tokenizer_class": "DebertaV2Tokenizer", **XLMR}),
    "Granite": (lambda: bytes_bpe(_DIGITS), "granite", {"tokenizer_class": "GPT2Tokenizer", **LLAMA}),
    "Llama as GPT-2": (lambda: bytes_bpe(_DIGITS), "llama", {"tokenizer_class": "GPT2Tokenizer", **LLAMA}),
    "OLMo": (lambda: bytes_bpe(_THREES), "olmo", {"tokenizer_class": "GPT2Tokenizer", **LLAMA}),
    "Qwen2 with its own split": (lambda: bytes_bpe(_DIGITS), "qwen2", {**_FAST, **LLAMA}),
    "Qwen2": (bytes_bpe, "qwen2", {"tokenizer_class": "Qwen2Tokenizer", **LLAMA}),
    "Llama without the first token": (
        lambda: bytes_bpe(single="<s> $A"), "llama", {**_FAST, "add_bos_token": False, **LLAMA}
    ),
    "ModernBERT": (lambda: bytes_bpe(single="<s> $A </s>"), "modernbert", {**_FAST, **LLAMA}),
    "a class that is not known": (unigram, "xlm-roberta", {"tokenizer_class": "NobodysTokenizer", **XLMR}),
}  # fmt: skip
"""By kind: the tokenizer, the model's type and the settings."""


def write_layout(name: str, folder: Path) -> Path:
    """Write the folder of one of `LAYOUTS`."""
    make, model_type, settings = LAYOUTS[name]
    return write_tokenizer(folder, make(), model_type, **settings)


def edit_file(folder: Path, **parts: Any) -> None:
    """Change parts of `tokenizer.json`."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
