"""Types of keyword arguments: those that the methods of an engine have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from staged_pool.runtime.call_options import (
    ClassifyOptions,
    EmbedOptions,
    ScoreOptions,
    TokenClassifyOptions,
    VectorOptions,
)
from staged_pool.runtime.encoding.options import EngineKeywords
from staged_pool.runtime.engine.engine_api import EngineApi

METHODS: dict[type[Any], tuple[Callable[..., Any], set[str]]] = {
    EmbedOptions: (EngineApi.embed, set()),
    VectorOptions: (EngineApi.embed, {"outputs", "late_chunking", "chunk_tokens", "offsets", "max_active_dims"}),
    ClassifyOptions: (EngineApi.classify, set()),
    TokenClassifyOptions: (EngineApi.classify_tokens, set()),
    ScoreOptions: (EngineApi.score, set()),
    EngineKeywords: (
        EngineApi.embed,
        {
            *{"outputs", "late_chunking", "chunk_tokens", "offsets", "max_active_dims", "dimensions"},
            *{"normalize", "prompt_name", "prompt", "max_tokens"},
        },
    ),
}


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options.__name__)
def test_options_are_the_keyword_arguments_of_a_method(options: type[Any]) -> None:
    method, left_out = METHODS[options]
    hints = get_type_hints(method)
    keywords = {
        name: hints[name]
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in left_out
    }
    assert get_type_hints(options) == keywords
