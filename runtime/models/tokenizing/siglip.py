"""The tokenizers of SigLIP and its successors, which were trained on lowercased texts.

SigLIP's class in transformers is in Python; the `tokenizer.json` that lies beside its own file stands in for it.

Before it looks up tokens, that class lowercases a text, leaves out punctuation and joins blanks. The
`tokenizer.json` is tried out for that: there are some that do not do so.
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
"""Texts that are one to the class."""


_LOWERING: Final = frozenset({"Siglip2Tokenizer"})
"""Classes that lowercase texts although the files of their models do not: the models were trained on such texts."""


def lower_texts(tokenizer: Tokenizer, class_name: str) -> str | None:
    """Lowercase texts before anything else, where a class does so and `tokenizer.json` does not.

    Args:
        tokenizer: Is changed.
        class_name: Of the class in transformers.

    Returns:
        A note for the log. None: nothing was done.
    """
    if class_name not in _LOWERING or tokenizer.encode("Hello THERE").ids == tokenizer.encode("hello there").ids:
        return None
    given = tokenizer.normalizer
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([given] if given is not None else [])])
    return f"{class_name}: texts are lowercased, as in training, which tokenizer.json does not do"


def is_siglip_tokenizer(body: Path) -> bool:
    """Whether a folder asks for that class, and has what stands in for it."""
    settings = JsonFile.read(body / "tokenizer_config.json", root=body) or JsonFile.empty()
    return settings.content.get("tokenizer_class") == _CLASS and (body / "tokenizer.json").is_file()


def check_siglip_tokenizer(tokenizer: Tokenizer) -> None:
    """Compare what stands in for that class with what it does.

    Args:
        tokenizer: Neither cuts nor pads.

    Raises:
        ConfigError: It does something else with texts than the class.
    """
    for text, canonical in _SAME:
        if tokenizer.encode(text).ids != tokenizer.encode(canonical).ids:
            raise ConfigError(
                f"tokenizer.json: does not lowercase texts, leave out punctuation and join blanks, as {_CLASS} does, "
                "which is in Python and not run"
            )
