"""BERTs of real sizes with random weights, which take the time of trained ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

POSITIONS: Final = 512
ROWS: Final = 30_522
"""Minimum number of embedding rows, that of BERT: the weights have real sizes whatever the tokenizer has."""

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SMALL: Final = 0.1
"""Standard deviation of the states that all texts share: positions and types.

With the usual weights, all texts would have nearly the same vector, and a wrong vector would not be seen.
"""


def bert_folder(
    folder: Path,
    *,
    layers: int,
    width: int,
    heads: int,
    inner: int,
    device: str,
    dtype: str,
    tokenizer: Path | None,
    positions: int = POSITIONS,
) -> Path:
    """Make a folder of sentence-transformers with a BERT that embeds texts.

    A vector is the mean of the states of its text, scaled to length 1.

    Args:
        folder: Folder that is made, or is empty.
        layers: Number of layers.
        width: Width of a token's state, and of a vector.
        heads: Number of attention heads.
        inner: Width inside of a layer's feed-forward part.
        device: Device on which the weights are drawn.
        dtype: Data type of the weights, as a torch name.
        tokenizer: Folder from which the tokenizer is copied. None: one is trained on Python's documentation.
        positions: Tokens of the longest text.

    Raises:
        FileNotFoundError: The folder of the tokenizer has no `tokenizer.json`.
    """
    import torch
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _train_tokenizer(folder, positions) if tokenizer is None else _copy_tokenizer(tokenizer, folder)
    config = BertConfig(
        vocab_size=max(ROWS, vocabulary),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = BertModel(config)
    _draw(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _write_steps(folder, width, positions)
    return folder


def _draw(model: torch.nn.Module) -> None:
    """Draw weights with which texts differ in their vectors."""
    import torch
    from torch import nn

    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 1 if "word" in name else _SMALL)


def _train_tokenizer(folder: Path, positions: int) -> int:
    """Write a word-piece tokenizer of the words of Python's documentation; return its vocabulary size."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=ROWS, min_frequency=1, special_tokens=list(_SPECIAL))
    tokenizer.train_from_iterator(topics.values(), trainer)
    begin, end = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", begin), ("[SEP]", end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size: int = tokenizer.get_vocab_size()
    return size


def _copy_tokenizer(source: Path, folder: Path) -> int:
    """Copy the files of a tokenizer; return its vocabulary size."""
    from tokenizers import Tokenizer

    if not (source / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{source} has no tokenizer.json")
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    size: int = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    return size


def _write_steps(folder: Path, width: int, positions: int) -> None:
    """Write the files by which sentence-transformers pools and normalizes."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    steps = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "2_Normalize").mkdir(exist_ok=True)
    for name, content in {
        "modules.json": steps,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": positions, "do_lower_case": False},
    }.items():
        (folder / name).write_text(json.dumps(content))
