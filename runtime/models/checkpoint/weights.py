"""Load the transformer of a model folder: local files, and no code of the folder's own unless the user trusts it."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
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
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from staged_pool.runtime.models.checkpoint.experts import run_experts_where_they_can
from staged_pool.runtime.models.checkpoint.quiet_loading import quiet, unusable
from staged_pool.runtime.models.checkpoint.special_ids import check_without_padding, clear_unknown_ids
from staged_pool.runtime.models.checkpoint.unread_weights import check_leftovers
from staged_pool.runtime.models.folders.files import FIRST_VERSION, weight_files
from staged_pool.runtime.models.specs.model import Architecture, ModelFolder
from staged_pool.stages.errors import ConfigError

_WITH_HEAD: Final[Mapping[Architecture, Any]] = {
    "sequence classifier": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "token classifier": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "masked language model": MODEL_FOR_MASKED_LM_MAPPING,
    "causal language model": MODEL_FOR_CAUSAL_LM_MAPPING,
    "image classifier": MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
}
"""Classes of transformers by the class of their config."""

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
"""What finds a class in the folder's own code."""

_UNSAFE: Final = re.compile(r"Unsupported .*?(?:GLOBAL ([\w.]+)|operand|class|function)", re.DOTALL)
"""How torch names an object in a pickle that is not a tensor."""


class Loaded(NamedTuple):
    """A checkpoint, as its own class."""

    whole: PreTrainedModel
    """With the head that the folder's architecture has; the same as `base` for an encoder."""
    base: PreTrainedModel
    """The transformer: of two, the one that reads texts."""
    image: PreTrainedModel | None = None
    """The transformer that looks at images, where they have one to themselves."""

    def image_parameters(self) -> int:
        """How many it has, with those of what follows it in the checkpoint."""
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
    """The folder's transformer, in eval mode, with the head that `ModelFolder.architecture` says.

    Args:
        folder: What was read of it.
        dtype: Of the weights.
        device: Where they go.
        own_code: Whether code of the folder's own may run.
        allow_pickle: Whether pickled weights may run code that is in them. Bare tensors are read without.

    Raises:
        ConfigError: The architecture is not one of transformers; or the weights are not all there, do not fit, or
            hold what nothing reads.
    """
    sees = folder.architecture == "vision-language model"
    bare = not sees and folder.architecture not in _WITH_HEAD
    code = _own_code(folder)
    with quiet(), unusable(folder, "the transformer"):
        config = _config(folder, own_code=own_code)
        text_config = config.get_text_config()
        for each in (config, text_config):
            if hasattr(each, "use_cache"):
                each.use_cache = False
        parts, towers = (config, text_config), folder.architecture == "two towers"
        unknown = {name: i for part in parts for name, i in clear_unknown_ids(part, keeps_end=towers).items()}
        model_class = (
            _AUTO[folder.architecture] if code and own_code and not sees else _model_class(config, folder.architecture)
        )
        wide = text_config if folder.images is not None else config
        if folder.architecture != "two towers" and not hasattr(wide, "hidden_size"):
            raise ConfigError(f"config.json: model_type={config.model_type!r} is not a text model")
        # No pooling here reads BERT's pooler, and many folders lack its weights. A head does read it.
        takes_pooler = bare and "add_pooling_layer" in inspect.signature(model_class).parameters
        model, report = _read_weights(
            model_class,
            folder,
            allow_pickle=allow_pickle,
            config=config,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # refused below, with its name; transformers only logs that
            **({"add_pooling_layer": False} if takes_pooler else {}),
            **({"trust_remote_code": True} if code and own_code else {}),
        )
    reshaped = {name for name, *_ in report["mismatched_keys"]}
    missing = reshaped | set(report["missing_keys"])
    unread = ("pooler.",) if bare else ("lm_head.",) if sees else ()
    if unfit := sorted(name for name in missing if not any(part in name for part in unread)):
        hint = f" (its auto_map asks for code of its own, which {'ran' if own_code else 'was not run'})" if code else ""
        raise ConfigError(
            f"{folder.body}: the weights are not those of a {type(model).__name__}{hint}: "
            f"{unfit[0]} is missing or of another shape ({len(unfit)} such in all)"
        )
    check_leftovers(folder, model, _base(folder, model), report["unexpected_keys"])
    if code and not own_code and _may_read_both_ways(folder, model):
        raise ConfigError(
            f"config.json: auto_map={folder.config['auto_map']!r} asks for code of its own, which may let texts be "
            "read in both directions: set is_causal in config.json to say whether it does, or trust_remote_code "
            "(--trust-remote-code) to run it"
        )
    whole: PreTrainedModel = model.eval().to(device)
    run_experts_where_they_can(whole)
    if folder.architecture == "two towers":
        return Loaded(whole, whole.text_model, whole.vision_model)
    base = _base(folder, whole)
    if "pad_token_id" in unknown:
        check_without_padding(base, unknown["pad_token_id"])
    return Loaded(whole, base, base if folder.image_heads else None)


def _config(folder: ModelFolder, *, own_code: bool) -> PreTrainedConfig:
    """The config as its class in transformers has it, or a class of the folder's own."""
    if folder.config.get("model_type") == "gte":  # the file may be one that asks for code of its own
        if (native := getattr(transformers, "GteConfig", None)) is None:
            known = f"transformers {transformers.__version__}, but to {FIRST_VERSION['gte']} and newer"
            raise ConfigError(f"config.json: model_type='gte' is not known to {known}")
        config: PreTrainedConfig = native.from_dict(dict(folder.config))
        config._name_or_path = str(folder.body)
        return config
    found: PreTrainedConfig = AutoConfig.from_pretrained(folder.body, local_files_only=True, trust_remote_code=own_code)
    return found


def _read_weights(model_class: Any, folder: ModelFolder, *, allow_pickle: bool, **settings: Any) -> tuple[Any, Any]:
    """The model, and what transformers reports of its weights. Pickles are read as bare tensors, which runs no code.

    Raises:
        ConfigError: They hold more than that, and `allow_pickle` is not set.
    """
    read = partial(model_class.from_pretrained, output_loading_info=True, **settings)
    try:
        model, report = read(folder.body)
    except pickle.UnpicklingError as error:
        found = _UNSAFE.search(str(error))
        if found is None:
            raise
        if not allow_pickle:
            raise ConfigError(
                f"{folder.body}: the weights are pickled (pytorch_model.bin) and hold more than tensors "
                f"({found[1] or 'other objects'}): loading them may run code that is in them. Convert them to "
                "model.safetensors, or set allow_pickle (--allow-pickle) if you trust them"
            ) from error
        model, report = read(None, state_dict=_unpickled(folder.body))
    return model, report


def _unpickled(body: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickled checkpoint; whatever else is in it is made, too, and may run code."""
    tensors: dict[str, torch.Tensor] = {}
    for name in weight_files(body):
        content = torch.load(body / name, map_location="cpu", weights_only=False)
        tensors.update({key: value for key, value in content.items() if isinstance(value, torch.Tensor)})
    return tensors


def _base(folder: ModelFolder, whole: PreTrainedModel) -> PreTrainedModel:
    """The transformer of a model with a head; an encoder is its own."""
    headed = folder.architecture in _WITH_HEAD or folder.architecture == "vision-language model"
    base: PreTrainedModel = whole.base_model if headed else whole
    return base


def _may_read_both_ways(folder: ModelFolder, model: PreTrainedModel) -> bool:
    """Whether the folder's own code may take the mask from a decoder, as several embedding models' does: the weights
    do not tell."""
    own = folder.config["auto_map"]
    causal = any(getattr(module, "is_causal", False) for module in model.modules())
    return causal and "is_causal" not in folder.config and (not isinstance(own, dict) or "AutoModel" in own)


def _own_code(folder: ModelFolder) -> bool:
    """Whether the folder wants a model class of its own."""
    named = folder.config.get("auto_map")
    return bool(named) and (not isinstance(named, dict) or any(name != "AutoTokenizer" for name in named))


def _model_class(config: PreTrainedConfig, architecture: Architecture) -> type[PreTrainedModel]:
    """The class that reads this config; only the encoder where there is a decoder beside it."""
    named = config.architectures or []
    if architecture == "vision-language model":  # some are in no mapping, some find all weights by their own name only
        own: type[PreTrainedModel] = getattr(transformers, named[0])
        if named[0].endswith("ForRetrieval") and own.base_model_prefix != "vlm":
            version = transformers.__version__
            raise ConfigError(f"config.json: {named[0]} of transformers {version} is not supported, that of 5.5 on is")
        return own
    if architecture in _WITH_HEAD:
        found = _WITH_HEAD[architecture].get(type(config), None)
        fitting = [choice for choice in _choices(found) if choice.__name__ in named]
        if config.is_encoder_decoder and fitting:
            raise ConfigError(
                f"config.json: {fitting[0].__name__} reads its labels off a decoder, which is not supported"
            )
        if config.is_encoder_decoder or not fitting:
            raise ConfigError(
                f"config.json: architectures={named!r} is not a {architecture} that transformers has for "
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
    """The classes of an entry of a mapping, which is one, several, or None."""
    return () if found is None else found if isinstance(found, tuple) else (found,)
