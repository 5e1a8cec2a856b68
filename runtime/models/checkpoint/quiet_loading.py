"""Context managers for transformers' loaders: no output, and errors as `ConfigError`."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from staged_pool.runtime.models.folders.files import check_json
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

LOADER_ERRORS: Final = (
    OSError, ValueError, TypeError, RuntimeError, LookupError, AttributeError, ImportError, ArithmeticError,
    AssertionError, StrictDataclassError,
)  # fmt: skip
"""Exceptions that transformers raises for files it cannot read."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from printing progress bars and load reports; the callers check the reports.

    The switches are process-wide: loads in other threads of the host process are quiet for the same time.
    """
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def loading_errors(folder: ModelFolder, what: str) -> Iterator[None]:
    """Raise a `ConfigError` when a library cannot read a file of the folder.

    Args:
        folder: The settings read from the folder.
        what: The part being loaded, for the message.
    """
    try:
        yield
    except LOADER_ERRORS as error:
        check_json(folder.body, "config.json", *TOKENIZER_FILES)
        if isinstance(error, KeyError) and error.args and error.args[0] in _rope_types(folder.config):
            raise ConfigError(
                f"config.json: rope_type={error.args[0]!r} is not known to transformers for "
                f"model_type={folder.config.get('model_type')!r}"
            ) from error
        reason = " ".join(str(error).split())  # on one line
        kind = f"{type(error).__name__}: " if isinstance(error, LookupError) else ""
        raise ConfigError(f"{folder.body}: {what} cannot be loaded: {kind}{reason}") from error
    except (SafetensorError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{folder.body}: the weights are damaged: {error}") from error


def _rope_types(config: Mapping[str, Any]) -> set[object]:
    """Rope types in a `config.json`: of all layers or of each layer type."""
    found: set[object] = set()
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(given := config.get(field), Mapping):
            for part in (given, *given.values()):
                if isinstance(part, Mapping):
                    found |= {kind for name in ("rope_type", "type") if isinstance(kind := part.get(name), str)}
    return found
