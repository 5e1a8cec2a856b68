"""Tokenizers, trained on English that comes with Python; each is trained once in a process."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Iterable, Sequence
from pydoc_data.topics import topics
from typing import Any

import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = list(topics.values())
SIZE = 1500

# Words that must be one token each, because a kind of model reads their logits.
_ANSWERS = ["yes", "no"] * 2000


def word_piece(*, unused: int = 0) -> hf.PreTrainedTokenizerFast:
    """BERT's, with type 1 for the second text of a pair. `unused` entries such as `[unused0]` end the vocabulary."""
    content = json.loads(_word_piece())
    for number in range(unused):
        content["model"]["vocab"][f"[unused{number}]"] = len(content["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    # Real folders come with settings like these; they must have no effect.
    tokenizer.enable_truncation(11)
    tokenizer.enable_padding(length=11)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def byte_bpe(begin: str = "<s>", end: str = "</s>", between: str = "</s> </s>") -> hf.PreTrainedTokenizerFast:
    """RoBERTa's, by default: one type, and `between` stands between the texts of a pair."""
    tokenizer = Tokenizer.from_str(_byte_bpe())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(),
        pair=f"{begin} $A {between} $B {end}".strip(),
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def unigram(
    begin: str = "<s>", end: str = "</s>", *, lower_case: bool = False, canonical: bool = False
) -> hf.PreTrainedTokenizerFast:
    """XLM-RoBERTa's, by default. `canonical`: without punctuation, and with single blanks between words."""
    tokenizer = Tokenizer.from_str(_unigram())
    steps: list[Any] = [normalizers.Lowercase()] if lower_case else []
    if canonical:
        marks = "".join(f"\\{mark}" for mark in string.punctuation)
        steps += [normalizers.Replace(Regex(f"[{marks}]"), ""), normalizers.Replace(Regex(r"\s+"), " ")]
        steps += [normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence([*steps, tokenizer.normalizer])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(),
        pair=f"{begin} $A {end} {end} $B {end}".strip(),
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token="<mask>",
    )


def blank_bpe() -> hf.PreTrainedTokenizerFast:
    """Gemma's, as SigLIP2's folders have it: blanks are a character of their own, and capitals stay."""
    tokenizer = Tokenizer.from_str(_blank_bpe())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B <eos>", special_tokens=[("<eos>", tokenizer.token_to_id("<eos>"))]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )


def chat_bpe(*, appended: str = "", **settings: Any) -> hf.PreTrainedTokenizerFast:
    """Qwen's: padding is a token that also ends texts, and a pair is one text after the other.

    `appended` is put after every text, which embedding models of the family do.
    """
    tokenizer = Tokenizer.from_str(_chat_bpe())
    byte_level = processors.ByteLevel(trim_offsets=False)
    if appended:
        template = processors.TemplateProcessing(
            single=f"$A {appended}",
            pair=f"$A $B {appended}",
            special_tokens=[(appended, tokenizer.token_to_id(appended))],
        )
        tokenizer.post_processor = processors.Sequence([byte_level, template])
    else:
        tokenizer.post_processor = byte_level
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", **settings
    )


def clip_bpe() -> hf.CLIPTokenizer:
    """CLIP's: lowercased, and words end in `</w>`. The end of a text has the highest id, and pads."""
    content = json.loads(_clip_bpe())["model"]
    merges = [tuple(pair) for pair in content["merges"]]
    tokenizer: hf.CLIPTokenizer = hf.CLIPTokenizer(vocab=content["vocab"], merges=merges, model_max_length=77)
    return tokenizer


@functools.cache
def _clip_bpe() -> str:
    tokenizer = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = vocabulary = _numbered(content["model"]["vocab"])
    for character in sorted(alphabet):  # each is also the end of a word
        vocabulary.setdefault(f"{character}</w>", len(vocabulary))
    for token in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[token] = len(vocabulary)
    return json.dumps(content)


@functools.cache
def _blank_bpe() -> str:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        "\u2581", "merged_with_next"
    )  # else a text is one word to the trainer
    trainer = trainers.BpeTrainer(vocab_size=SIZE - 256, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    content = json.loads(tokenizer.to_str())
    content["model"]["byte_fallback"] = True
    for byte in range(256):
        content["model"]["vocab"][f"<0x{byte:02X}>"] = len(content["model"]["vocab"])
    return json.dumps(content)


@functools.cache
def _word_piece() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = _numbered(content["model"]["vocab"], special)
    return json.dumps(content)


@functools.cache
def _byte_bpe() -> str:
    return trained_bpe(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], CORPUS)


@functools.cache
def _chat_bpe() -> str:
    return trained_bpe(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>"], [*CORPUS, *_ANSWERS])


def trained_bpe(special: list[str], corpus: list[str]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return str(tokenizer.to_str())


@functools.cache
def _unigram() -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=SIZE, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    pieces = [(piece, round(score, 3)) for piece, score in content["model"]["vocab"]]  # beyond that, they differ
    content["model"]["vocab"] = [
        *pieces[: len(special)], *sorted(pieces[len(special) :], key=lambda each: (-each[1], each[0]))
    ]  # fmt: skip
    return json.dumps(content)


def _numbered(vocabulary: Iterable[str], special: Sequence[str] = ()) -> dict[str, int]:
    """The same tokens, the special ones first: what trainers find is the same every time, its order is not."""
    tokens = [*special, *sorted(set(vocabulary).difference(special))]
    return {token: number for number, token in enumerate(tokens)}
