"""Inputs for tokenizers, and comparisons of ours with those of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import transformers

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.checkpoint.tokenizer import LoadedTokenizer, load_tokenizer
from staged_pool.runtime.models.folders.resolver import resolve
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.tokenizing.shared_tokenizer import copy_tokenizer
from staged_pool.runtime.models.tokenizing.text_settings import TextSettings
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, PairInput, TextInput
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared
from tests.models.conftest import TinyFolder

TokenizerOf: TypeAlias = Callable[..., tuple[TextTokenizer, Any]]

WORDS = " ".join(topics.values()).split()
STRANGE = [
    "",
    " ",
    "naïve café, Ωmega, 日本語のテキスト, 🙂🏽, e\u0301, \u200b, İ",
    "   leading, trailing and   inner blanks \n\t ",
    "[CLS] <s> </s> [MASK] [SEP] <mask> <|im_end|>",
    "a" * 150,
    "don't we'll I'm 12345 !!!\n\n  ???",
]


def load(kind: str, tiny_folder: TinyFolder) -> tuple[LoadedTokenizer, Any]:
    """A kind of model's tokenizer as we load it, and as transformers does."""
    path = resolve(None).folder if kind == "real" else tiny_folder(kind)
    folder = ModelFolder(path=path, body=path, config={}, heads=(), prompts={})
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(path)


def reader(source: LoadedTokenizer, *, lower_case: bool = False, **settings: Any) -> TextTokenizer:
    """Our tokenizer, for a model that takes 10,000 tokens unless something else is said."""
    common = {
        "max_tokens": 10_000,
        "vocabulary": source.backend.get_vocab_size(),
        "gives_types": source.gives_types,
        "special_tokens": source.special_tokens,
        "truncation_side": source.truncation_side,
        "cleans_up": source.cleans_up,
    }
    return TextTokenizer(copy_tokenizer(source.backend, lower_case=lower_case), TextSettings(**{**common, **settings}))


def some_text(random: random.Random, most: int) -> str:
    """A few words, and sometimes something strange among them."""
    words = random.choices(WORDS, k=random.randint(0, most))
    if random.random() < 0.3:
        words.insert(random.randint(0, len(words)), random.choice(STRANGE))
    return " ".join(words)


def read(tokenizer: TextTokenizer, source: TextInput | PairInput, **given: Any) -> TokenSequence:
    """The one sequence that an input becomes."""
    outputs = given.pop("outputs", DENSE_ONLY)
    prepared = tokenizer.preprocess([ModelInput(source, outputs, **given)])[0]
    assert isinstance(prepared, Prepared), prepared
    assert prepared.tokens == len(prepared.payload.ids)
    assert prepared.batch_key == outputs
    return prepared.payload


def parts(tokenizer: TextTokenizer, source: TextInput, **given: Any) -> Sequence[TokenSequence]:
    """The several sequences that an input becomes."""
    prepared = tokenizer.preprocess([ModelInput(source, DENSE_ONLY, may_split=True, **given)])[0]
    assert isinstance(prepared, tuple), prepared
    return [part.payload for part in prepared]


def rejection(tokenizer: TextTokenizer, source: TextInput | PairInput, **given: Any) -> InvalidInput:
    rejected = tokenizer.preprocess([ModelInput(source, DENSE_ONLY, **given)])[0]
    assert isinstance(rejected, InvalidInput), rejected
    assert rejected.index is None
    return rejected
