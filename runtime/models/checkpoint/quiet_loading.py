"""Run loaders of transformers without their output, and turn their errors into ours."""

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
"""What transformers raises for files that it cannot read."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing bars and reports while it loads: what matters in them is checked here.

    Its switches are process-wide, so that a host's own loading in another thread is quiet for as long.
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
def unusable(folder: ModelFolder, what: str) -> Iterator[None]:
    """Raise a `ConfigError` where a library cannot read a file of the folder.

    Args:
        folder: What was read of the folder.
        what: The part that is being loaded, for the message.
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
        said = " ".join(str(error).split())  # in one line
        kind = f"{type(error).__name__}: " if isinstance(error, LookupError) else ""
        raise ConfigError(f"{folder.body}: {what} cannot be loaded: {kind}{said}") from error
    except (SafetensorError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{folder.body}: the weights are damaged: {error}") from error


def _rope_types(config: Mapping[str, Any]) -> set[object]:
    """Rope types that a `config.json` names, in either spelling, for all layers or by the type of a layer."""
    found: set[object] = set()
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(said := config.get(field), Mapping):
            for part in (said, *said.values()):
                if isinstance(part, Mapping):
                    found |= {kind for name in ("rope_type", "type") if isinstance(kind := part.get(name), str)}
    return found
