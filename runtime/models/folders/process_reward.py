"""Process reward models: Qwen2.5-Math-PRM, which scores each step of a solution."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.folders.classifier import class_name, read_labels
from staged_pool.runtime.models.folders.common_files import read_body_config
from staged_pool.runtime.models.folders.engine_retrievers import files_with
from staged_pool.runtime.models.specs.layers import Projection, StepLabelsSpec
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

_CLASS: Final = "Qwen2ForProcessRewardModel"
_TYPE: Final = "qwen2"
_TAG: Final = "<extra_0>"
"""Token behind each step, whose vector has the score of the step.

Class, tag and labels are those of `modeling_qwen2_rm.py` and the README of
https://huggingface.co/Qwen/Qwen2.5-Math-PRM-7B.
"""
_LABELS: Final = ("negative", "positive")


def is_process_reward(config: Mapping[str, Any]) -> bool:
    """True for the `config.json` of a process reward model."""
    return class_name(config) == _CLASS


def read_process_reward(path: Path) -> ModelFolder:
    """Read a process reward model: a Qwen2 whose vectors of step tags go through two layers.

    Raises:
        ConfigError: A file is missing or malformed, or the transformer is of another type.
    """
    config = read_body_config(path, root=path)
    if (kind := config.get("model_type")) != _TYPE:
        raise ConfigError(f"config.json: {_CLASS} is supported with model_type={_TYPE!r}, not {kind!r}")
    layers = tuple(
        Projection(
            files=files_with(path, f"score.{place}.weight"), weight=f"score.{place}.weight", bias=f"score.{place}.bias"
        )
        for place in (0, 2)
    )
    native = {name: value for name, value in config.items() if name != "auto_map"}
    return ModelFolder(
        path=path,
        body=path,
        config={**native, "architectures": ["Qwen2Model"]},
        heads=(StepLabelsSpec(layers=layers, tag=_TAG),),
        scoring=None,
        labels=read_labels(config) if config.get("id2label") else _LABELS,
        activation="softmax",
        prompts={},
        notes=(f"read as a process reward model, as its class says: each {_TAG} of a text has the score of a step",),
    )
