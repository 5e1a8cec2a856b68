"""Tokenizers of SigLIP and its successors, which were trained on lowercased texts.

SigLIP's class in transformers is written in Python; the folder's `tokenizer.json` is used instead. The class lowercases
a text, removes punctuation and joins spaces before it looks up tokens. Some `tokenizer.json` files do not, so each is
checked. SigLIP2 has Gemma's tokenizer, which keeps capitals: its authors' code lowercases before it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
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


_MODELS: Final = frozenset({"siglip", "siglip2"})
"""Values of `model_type`. A SigLIP2 for images of one size says `siglip`."""
_GEMMA: Final = frozenset({"GemmaTokenizer", "GemmaTokenizerFast"})
"""Classes of the tokenizer that SigLIP2 has, and SigLIP has not."""
_LOWERING: Final = frozenset({"Siglip2Tokenizer"})
"""Classes that lowercase texts although `tokenizer.json` does not, as the models were trained."""


def is_trained_on_lowercase(model_type: object, class_names: Iterable[str | None], lower_case: bool | None) -> bool:
    """True for SigLIP2, whose authors' code lowercases a text before its tokenizer, which is Gemma's.

    Args:
        model_type: That of `config.json`.
        class_names: Classes of the tokenizer: the one that the folder names, and the one that transformers takes.
        lower_case: `do_lower_case` of `tokenizer_config.json`, which Gemma's class ignores. None: not set.
    """
    names = set(class_names)
    if names & _LOWERING:
        return True
    if model_type not in _MODELS or _CLASS in names:
        return False
    return lower_case if lower_case is not None else bool(names & _GEMMA)


def lower_texts(tokenizer: Tokenizer) -> str | None:
    """Add lowercasing to a tokenizer, if it has none.

    Args:
        tokenizer: The tokenizer; it is changed.

    Returns:
        A note for the log. None: nothing was changed.
    """
    if tokenizer.encode("Hello THERE").ids == tokenizer.encode("hello there").ids:
        return None
    given = tokenizer.normalizer
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([given] if given is not None else [])])
    return "SigLIP2: texts are lowercased, as in training, which tokenizer.json does not do"


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
