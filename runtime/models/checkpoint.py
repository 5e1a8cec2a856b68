"""Load the transformer and the tokenizer of a model folder: local files, no code of the folder's own."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from staged_pool.runtime.models.specs import Architecture, ModelFolder
from staged_pool.stages.errors import ConfigError

_SANE_TOKENS = 10**9
"""Tokenizers that know no longest input say a number beyond this."""


def load_transformer(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The folder's transformer in eval mode, with the checkpoint's own head where `ModelFolder.architecture` names one.

    Raises:
        ConfigError: The architecture is not one of transformers, or the weights are not all there or do not fit.
    """
    own_code = folder.config.get("auto_map")
    kind = folder.config.get("model_type")
    if own_code and kind not in CONFIG_MAPPING:
        raise ConfigError(f"config.json: auto_map={own_code!r} asks for code of its own, which is never run")
    with _quiet(), _unusable(folder, "the transformer"):
        config = AutoConfig.from_pretrained(folder.body, local_files_only=True, trust_remote_code=False)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model_class = _model_class(config, folder.architecture)
        if not hasattr(config, "hidden_size"):
            raise ConfigError(f"config.json: model_type={config.model_type!r} is not a text model")
        # No pooling here reads BERT's pooler, and many folders lack its weights.
        takes_pooler = "add_pooling_layer" in inspect.signature(model_class).parameters
        model, report = model_class.from_pretrained(
            folder.body,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with its name; transformers only logs that
            **({"add_pooling_layer": False} if takes_pooler else {}),
        )
    reshaped = {name for name, *_ in report["mismatched_keys"]}
    if unfit := sorted(name for name in reshaped | set(report["missing_keys"]) if "pooler." not in name):
        hint = " (its auto_map asks for code of its own, which is never run)" if own_code else ""
        raise ConfigError(
            f"{folder.body}: the weights are not those of a {model_class.__name__}{hint}: "
            f"{unfit[0]} is missing or of another shape ({len(unfit)} such in all)"
        )
    placed: PreTrainedModel = model.eval().to(device)
    return placed


def load_tokenizer(folder: ModelFolder) -> tuple[Tokenizer, int | None]:
    """The folder's tokenizer, and the longest input that it declares (None: none).

    Raises:
        ConfigError: There is none that can be used, or only one in Python.
    """
    with _quiet(), _unusable(folder, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder.body, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        name = type(tokenizer).__name__
        raise ConfigError(f"{folder.body}: {name} is written in Python; a tokenizer.json is needed")
    declared = tokenizer.model_max_length
    return tokenizer.backend_tokenizer, declared if 0 < declared < _SANE_TOKENS else None


def _model_class(config: PreTrainedConfig, architecture: Architecture) -> type[PreTrainedModel]:
    """The class that reads this config; only the encoder where there is a decoder beside it."""
    if architecture == "masked language model":
        masked: type[PreTrainedModel] | None = MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)
        if masked is None:
            raise ConfigError(f"config.json: model_type={config.model_type!r} has no masked language model")
        return masked
    found = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    if found is None and not config.is_encoder_decoder:
        found = MODEL_MAPPING.get(type(config), None)
    if found is None:
        raise ConfigError(f"config.json: model_type={config.model_type!r} has no encoder in transformers")
    choices: tuple[type[PreTrainedModel], ...] = found if isinstance(found, tuple) else (found,)
    named = config.architectures or []
    return next((choice for choice in choices if choice.__name__ in named), choices[0])


@contextmanager
def _quiet() -> Iterator[None]:
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
def _unusable(folder: ModelFolder, what: str) -> Iterator[None]:
    """Say in our words that transformers cannot read a file of the folder."""
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, AttributeError, ImportError) as error:
        raise ConfigError(f"{folder.body}: {what} cannot be loaded: {error}") from error
    except (SafetensorError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{folder.body}: the weights are damaged: {error}") from error
