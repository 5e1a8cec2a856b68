"""Reward models of Qwen2.5-Math, which score a solution (RM) or each of its steps (PRM)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.folders.classifier import class_name, read_labels
from staged_pool.runtime.models.folders.common_files import read_body_config
from staged_pool.runtime.models.folders.engine_retrievers import files_with
from staged_pool.runtime.models.specs.layers import LayersScoreSpec, Projection, StepLabelsSpec
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError

_WHOLE: Final = "Qwen2ForRewardModel"
_STEPS: Final = "Qwen2ForProcessRewardModel"
_TYPE: Final = "qwen2"
_TAG: Final = "<extra_0>"
"""Token behind each step, whose vector has the score of the step.

Classes, tag and labels are those of `modeling_qwen2_rm.py` and the README of
https://huggingface.co/Qwen/Qwen2.5-Math-PRM-7B and https://huggingface.co/Qwen/Qwen2.5-Math-RM-72B.
"""
_LABELS: Final = ("negative", "positive")


def is_reward_model(config: Mapping[str, Any]) -> bool:
    """True for the `config.json` of a reward model of this family."""
    return class_name(config) in (_WHOLE, _STEPS)


def read_reward_model(path: Path) -> ModelFolder:
    """Read a Qwen2 with two linear layers behind some of its vectors.

    They are those of the tags, or that of the last token.

    Raises:
        ConfigError: A file is missing or malformed, or the transformer is of another type.
    """
    config = read_body_config(path, root=path)
    name = class_name(config)
    if (kind := config.get("model_type")) != _TYPE:
        raise ConfigError(f"config.json: {name} is supported with model_type={_TYPE!r}, not {kind!r}")
    layers = tuple(
        Projection(
            files=files_with(path, f"score.{place}.weight"), weight=f"score.{place}.weight", bias=f"score.{place}.bias"
        )
        for place in (0, 2)
    )
    native = {field: value for field, value in config.items() if field != "auto_map"}
    common: Mapping[str, Any] = {
        "path": path,
        "body": path,
        "config": {**native, "architectures": ["Qwen2Model"]},
        "scoring": None,
        "prompts": {},
    }
    if name == _WHOLE:
        return ModelFolder(
            heads=(LayersScoreSpec(layers=layers, offset=0.0),),
            labels=("LABEL_0",),
            activation="identity",
            notes=("read as a reward model, as its class says: its label is the reward of a whole conversation",),
            **common,
        )
    return ModelFolder(
        heads=(StepLabelsSpec(layers=layers, tag=_TAG),),
        labels=read_labels(config) if config.get("id2label") else _LABELS,
        activation="softmax",
        notes=(f"read as a process reward model, as its class says: each {_TAG} of a text has the score of a step",),
        **common,
    )
