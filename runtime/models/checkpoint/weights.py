"""Loader of a model folder's weights: local files only, and no code of the folder without trust."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from staged_pool.runtime.models.architectures.catalogue import register_architectures
from staged_pool.runtime.models.checkpoint.adapter_changes import read_adapters
from staged_pool.runtime.models.checkpoint.adapters import merge_adapter
from staged_pool.runtime.models.checkpoint.claimed_size import check_claimed_size
from staged_pool.runtime.models.checkpoint.configs import is_engine, read_config
from staged_pool.runtime.models.checkpoint.experts import select_experts_implementation
from staged_pool.runtime.models.checkpoint.flash_names import has_flash_names, model_tensors
from staged_pool.runtime.models.checkpoint.quiet_loading import loading_errors, quiet_transformers
from staged_pool.runtime.models.checkpoint.special_ids import check_without_padding, clear_unknown_ids
from staged_pool.runtime.models.checkpoint.static import load_static
from staged_pool.runtime.models.checkpoint.unread_weights import check_unread_weights
from staged_pool.runtime.models.checkpoint.wrapped_names import unwrapped_names
from staged_pool.runtime.models.folders.embedding_gemma import KEY_NAMES, OTHER_PARTS, TEXT
from staged_pool.runtime.models.folders.engine_retrievers import ENGINE_NAMES
from staged_pool.runtime.models.folders.weight_files import weight_files
from staged_pool.runtime.models.specs.model import Architecture, LogitScoreSpec, ModelFolder
from staged_pool.runtime.models.transformer.adapters import AdapterChanges
from staged_pool.stages.errors import ConfigError

_WITH_HEAD: Final[Mapping[Architecture, Any]] = {
    "sequence classifier": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "token classifier": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "masked language model": MODEL_FOR_MASKED_LM_MAPPING,
    "causal language model": MODEL_FOR_CAUSAL_LM_MAPPING,
    "image classifier": MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
}
"""Mappings of transformers from a config class to its model classes, by architecture."""

_AUTO: Final[Mapping[Architecture, Any]] = {
    "encoder": AutoModel,
    "sequence classifier": AutoModelForSequenceClassification,
    "token classifier": AutoModelForTokenClassification,
    "masked language model": AutoModelForMaskedLM,
    "causal language model": AutoModelForCausalLM,
    "two towers": AutoModel,
    "image encoder": AutoModel,
    "image classifier": AutoModelForImageClassification,
}
"""Auto classes, which find a model class in the folder's own code."""

_READ_BY_DECODERS: Final = ("BartForSequenceClassification",)
"""Classifiers whose decoder reads the text again, and gives a vector of each token."""

_UNSAFE: Final = re.compile(r"Unsupported .{0,100}?(?:GLOBAL ([\w.]+)|operand|class|function)", re.DOTALL)
"""Torch's error for an object in a pickle that is not a tensor; a group holds the object's name."""


class Loaded(NamedTuple):
    """A loaded checkpoint and its parts."""

    whole: PreTrainedModel
    """The model with its head; the same as `base` for an encoder."""
    base: PreTrainedModel
    """The transformer that reads text."""
    image: PreTrainedModel | None = None
    """The transformer that reads images. None: the model has no separate one."""
    adapters: AdapterChanges = MappingProxyType({})
    """Adapters of which a request chooses one."""

    def image_parameters(self) -> int:
        """Count the parameters of the image transformer and its projection."""
        if self.image is None:
            return 0
        parts = (
            [self.whole] if self.image is self.base else [self.image, getattr(self.whole, "visual_projection", None)]
        )
        return sum(p.numel() for part in parts if part is not None for p in part.parameters())


def load_transformer(
    folder: ModelFolder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    own_code: bool = False,
    allow_pickle: bool = False,
) -> Loaded:
    """Load the folder's model, in eval mode, with the head of `ModelFolder.architecture`.

    Args:
        folder: The settings read from the folder.
        dtype: Data type of the weights.
        device: Device of the weights.
        own_code: True if the folder's own Python code may run.
        allow_pickle: True if pickled weights may run the code in them. Pickles of bare tensors need no permission.

    Raises:
        ConfigError: transformers lacks the architecture; or weights are missing, of another shape, or unread.
    """
    if folder.architecture == "static embedding":
        static = load_static(folder, dtype=dtype, device=device)
        return Loaded(static, static)
    model, report, cleared = _load_checkpoint(folder, dtype=dtype, own_code=own_code, allow_pickle=allow_pickle)
    adapted = merge_adapter(folder.body, model, headless=_is_headless(folder))
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])} - adapted
    _check_loaded(folder, model, missing, report["unexpected_keys"], own_code=own_code)
    whole = model.eval().to(device)
    select_experts_implementation(whole)
    if folder.architecture == "two towers":
        return Loaded(whole, whole.text_model, whole.vision_model)
    base = _base(folder, whole)
    if "pad_token_id" in cleared:
        check_without_padding(base, cleared["pad_token_id"])
    return Loaded(whole, base, base if folder.image_heads else None, read_adapters(folder, base))


def _load_checkpoint(
    folder: ModelFolder, *, dtype: torch.dtype, own_code: bool, allow_pickle: bool
) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """Load the checkpoint by the class that fits it.

    Returns:
        The model, transformers' report on its weights, and the special token ids that were cleared in its config.
    """
    multimodal = folder.architecture == "vision-language model"
    runs_code = _has_own_code(folder) and own_code
    with quiet_transformers(), loading_errors(folder, "the transformer"):
        config = read_config(folder, own_code=own_code)
        text_config = config.get_text_config()
        for each in (config, text_config):
            if hasattr(each, "use_cache"):
                each.use_cache = False
        parts, towers = (config, text_config), folder.architecture == "two towers"
        cleared = {name: i for part in parts for name, i in clear_unknown_ids(part, keeps_end=towers).items()}
        model_class = (
            _AUTO[folder.architecture] if runs_code and not multimodal else _model_class(config, folder.architecture)
        )
        wide = text_config if folder.images is not None else config
        if folder.architecture not in ("two towers", "image classifier") and not hasattr(wide, "hidden_size"):
            raise ConfigError(f"config.json: model_type={config.model_type!r} is not a text model")
        # No pooling here reads BERT's pooler, and many folders lack its weights. Heads do read it.
        takes_pooler = _is_headless(folder) and "add_pooling_layer" in inspect.signature(model_class).parameters
        without_pooler = {"add_pooling_layer": False} if takes_pooler else {}
        if not runs_code:
            check_claimed_size(model_class, config, folder.body, without_pooler)
        model, report = _read_weights(
            model_class,
            folder,
            allow_pickle=allow_pickle,
            config=config,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # transformers only logs these; `_check_loaded` rejects them by name
            **without_pooler,
            **({"trust_remote_code": True} if runs_code else {}),
            **({"key_mapping": dict(ENGINE_NAMES)} if is_engine(folder) else {}),
            **({"key_mapping": dict(KEY_NAMES)} if config.model_type == TEXT else {}),
            **({"key_mapping": dict(names)} if (names := unwrapped_names(folder.body)) else {}),
        )
    if config.model_type == TEXT:
        read = {name for name in report["unexpected_keys"] if not name.removeprefix("model.").startswith(OTHER_PARTS)}
        report = {**report, "unexpected_keys": read}
    return model, report, cleared


def _check_loaded(
    folder: ModelFolder, model: PreTrainedModel, missing: Collection[str], left: Iterable[str], *, own_code: bool
) -> None:
    """Reject weights that do not fit their class, and a class whose attention may differ.

    Args:
        folder: The settings read from the folder.
        model: The loaded model.
        missing: Names of its weights that are missing or of another shape.
        left: Names of the weights that are not weights of the model.
        own_code: True if the folder's own Python code may run.

    Raises:
        ConfigError: Weights are missing, of another shape, or unread; or the folder's own code, which did not run,
            may change the attention mask.
    """
    has_own_code = _has_own_code(folder)
    multimodal = folder.architecture == "vision-language model"
    reads_answers = any(isinstance(spec, LogitScoreSpec) for spec in folder.heads)
    unread = ("pooler.",) if _is_headless(folder) else ("lm_head.",) if multimodal and not reads_answers else ()
    if folder.images is not None and folder.images.tiles is not None:
        unread = (*unread, "vision_model.head.")  # SigLIP's own pooling: tiles are pooled by the language model
    if unfit := sorted(name for name in missing if not any(part in name for part in unread)):
        ran = "ran" if own_code else "was not run"
        hint = f" (its auto_map asks for the folder's own code, which {ran})" if has_own_code else ""
        raise ConfigError(
            f"{folder.body}: the weights are not those of a {type(model).__name__}{hint}: "
            f"{unfit[0]} is missing or of another shape ({len(unfit)} such in all)"
        )
    check_unread_weights(folder, model, _base(folder, model), left)
    if has_own_code and not own_code and _may_be_bidirectional(folder, model):
        raise ConfigError(
            f"config.json: auto_map={folder.config['auto_map']!r} asks for the folder's own code, which may make "
            "attention bidirectional: set is_causal in config.json to true or false, or set trust_remote_code "
            "(--trust-remote-code) to run the code"
        )


def _is_headless(folder: ModelFolder) -> bool:
    return folder.architecture != "vision-language model" and folder.architecture not in _WITH_HEAD


def _read_weights(model_class: Any, folder: ModelFolder, *, allow_pickle: bool, **settings: Any) -> tuple[Any, Any]:
    """Load the weights and transformers' report on them. Pickles are first read as bare tensors, without code.

    Raises:
        ConfigError: A pickle holds more than tensors, and `allow_pickle` is not set.
    """
    read = partial(model_class.from_pretrained, output_loading_info=True, **settings)
    if has_flash_names(folder.config):
        model, report = read(None, state_dict=model_tensors(folder.body, folder.config))
        return model, report
    try:
        model, report = read(folder.body)
    except pickle.UnpicklingError as error:
        found = _UNSAFE.search(str(error))
        if found is None:
            raise
        if not allow_pickle:
            raise ConfigError(
                f"{folder.body}: the weights are pickled (pytorch_model.bin) and hold more than tensors "
                f"({found[1] or 'other objects'}): loading them may run code from the file. Convert them to "
                "model.safetensors, or set allow_pickle (--allow-pickle) if you trust them"
            ) from error
        model, report = read(None, state_dict=_unpickled(folder.body))
    return model, report


def _unpickled(body: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a pickled checkpoint. This unpickles its other objects too, which may run code."""
    tensors: dict[str, torch.Tensor] = {}
    for name in weight_files(body):
        content = torch.load(body / name, map_location="cpu", weights_only=False)
        tensors.update({key: value for key, value in content.items() if isinstance(value, torch.Tensor)})
    return tensors


def _base(folder: ModelFolder, whole: PreTrainedModel) -> PreTrainedModel:
    """The transformer inside a model with a head; for an encoder, the model itself."""
    headed = folder.architecture in _WITH_HEAD or folder.architecture == "vision-language model"
    base: PreTrainedModel = whole.base_model if headed else whole
    if folder.architecture == "image classifier" and base is whole:  # of a model with two towers
        base = getattr(whole, "vision_model", whole)
    return base


def _may_be_bidirectional(folder: ModelFolder, model: PreTrainedModel) -> bool:
    """True if the folder's own code may remove a decoder's causal mask.

    Several embedding models do so, and their weights do not show it.
    """
    own = folder.config["auto_map"]
    causal = any(getattr(module, "is_causal", False) for module in model.modules())
    return causal and "is_causal" not in folder.config and (not isinstance(own, dict) or "AutoModel" in own)


def _has_own_code(folder: ModelFolder) -> bool:
    """True if the folder's own code defines its model class."""
    named = folder.config.get("auto_map")
    return bool(named) and (not isinstance(named, dict) or any(name != "AutoTokenizer" for name in named))


def _model_class(config: PreTrainedConfig, architecture: Architecture) -> type[PreTrainedModel]:
    """The model class of a config; of an encoder-decoder, the class of its encoder."""
    named = config.architectures or []
    if architecture == "vision-language model":
        # Taken by its name: some are in no mapping, and some load all weights only as the class that saved them.
        own: type[PreTrainedModel] = getattr(transformers, named[0])
        if named[0].endswith("ForRetrieval") and own.base_model_prefix != "vlm":
            version = transformers.__version__
            raise ConfigError(f"config.json: {named[0]} needs transformers 5.5 or newer; {version} is installed")
        return own
    if architecture in _WITH_HEAD:
        found = _WITH_HEAD[architecture].get(type(config), None)
        fitting = [choice for choice in _choices(found) if choice.__name__ in named]
        if fitting and fitting[0].__name__ in _READ_BY_DECODERS:
            return fitting[0]
        if config.is_encoder_decoder and fitting:
            raise ConfigError(
                f"config.json: {fitting[0].__name__} computes labels from a decoder, which is not supported"
            )
        if config.is_encoder_decoder or not fitting:
            raise ConfigError(
                f"config.json: architectures={named!r} is not a {architecture} of transformers for "
                f"model_type={config.model_type!r}"
            )
        return fitting[0]
    found = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    if found is None and not config.is_encoder_decoder:
        found = MODEL_MAPPING.get(type(config), None)
    if found is None:
        raise ConfigError(f"config.json: model_type={config.model_type!r} has no encoder in transformers")
    return next((choice for choice in _choices(found) if choice.__name__ in named), _choices(found)[0])


def _choices(found: Any) -> tuple[type[PreTrainedModel], ...]:
    """The classes of a mapping's entry: one class, a tuple of them, or None."""
    return () if found is None else found if isinstance(found, tuple) else (found,)


register_architectures()
