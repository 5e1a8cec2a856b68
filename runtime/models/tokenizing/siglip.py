"""Tokenizers of SigLIP and its successors, which were trained on lowercased texts.

SigLIP's class in transformers is written in Python; the folder's `tokenizer.json` is used instead. The class lowercases
a text, removes punctuation and joins spaces before it looks up tokens. Some `tokenizer.json` files do not, so each is
checked.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, normalizers

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError

_CLASS: Final = "SiglipTokenizer"

_SAME: Final = (
    ("Hello, World!", "hello world"),
    (" a \n  b ", "a b"),
    ("".join(f"x{mark}" for mark in string.punctuation), "x" * len(string.punctuation)),
)
"""Pairs of texts that the class tokenizes alike."""


_LOWERING: Final = frozenset({"Siglip2Tokenizer"})
"""Classes that lowercase texts although `tokenizer.json` does not, as the models were trained."""


def lower_texts(tokenizer: Tokenizer, class_name: str) -> str | None:
    """Add lowercasing to a tokenizer whose class does it but whose `tokenizer.json` does not.

    Args:
        tokenizer: The tokenizer; it is changed.
        class_name: Name of its class in transformers.

    Returns:
        A note for the log. None: nothing was changed.
    """
    if class_name not in _LOWERING or tokenizer.encode("Hello THERE").ids == tokenizer.encode("hello there").ids:
        return None
    given = tokenizer.normalizer
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([given] if given is not None else [])])
    return f"{class_name}: texts are lowercased, as in training, which tokenizer.json does not do"


def is_siglip_tokenizer(body: Path) -> bool:
    """True if a folder has SigLIP's class and a `tokenizer.json`."""
    settings = JsonFile.read(body / "tokenizer_config.json", root=body) or JsonFile.empty()
    return settings.content.get("tokenizer_class") == _CLASS and (body / "tokenizer.json").is_file()


def check_siglip_tokenizer(tokenizer: Tokenizer) -> None:
    """Compare a `tokenizer.json` with SigLIP's class.

    Args:
        tokenizer: The tokenizer of the file, without truncation and padding.

    Raises:
        ConfigError: It tokenizes texts differently.
    """
    for text, canonical in _SAME:
        if tokenizer.encode(text).ids != tokenizer.encode(canonical).ids:
            raise ConfigError(
                f"tokenizer.json: does not lowercase texts, remove punctuation and join spaces, as {_CLASS} does, "
                "whose Python code is not run"
            )
