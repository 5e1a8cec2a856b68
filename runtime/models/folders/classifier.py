"""Label settings of a classifier or reranker folder: names, activation and pair form.

transformers writes such folders (a checkpoint with a head). So does the CrossEncoder of sentence-transformers: it adds
an activation, and since version 6 it also saves LLM rerankers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.card import Activation, Scoring
from staged_pool.runtime.models.folders.common_files import read_dense, required
from staged_pool.runtime.models.folders.pooling_modules import read_head, read_pooling_modes
from staged_pool.runtime.models.folders.transformer_settings import check_modalities
from staged_pool.runtime.models.specs.json_file import MOST_LABELS, JsonFile
from staged_pool.runtime.models.specs.model import (
    Architecture,
    HeadSpec,
    LabelsSpec,
    LogitScoreSpec,
    Normalize,
    PooledLabelsSpec,
    TokenLabelsSpec,
)
from staged_pool.runtime.models.specs.pair_forms import PairForm
from staged_pool.stages.errors import ConfigError

CLASSIFIERS: Final[Mapping[str, Architecture]] = {
    "ForSequenceClassification": "sequence classifier",
    "ForTokenClassification": "token classifier",
}
"""Name endings of the transformers classes that compute labels."""

_ACTIVATIONS: Final[Mapping[str, Activation]] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
"""Activations by their class in `torch.nn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFields:
    """The fields of a `ModelFolder` that concern labels and scores."""

    architecture: Architecture
    heads: tuple[HeadSpec, ...]
    scoring: Scoring | None
    labels: tuple[str, ...]
    activation: Activation
    pair_template: PairForm | None = None
    notes: tuple[str, ...] = ()
    """Assumptions, for the log."""
    warnings: tuple[str, ...] = ()
    """Assumptions on little evidence, logged as warnings."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def class_name(config: Mapping[str, Any]) -> str:
    """Name of the class in `architectures` of a `config.json`; empty if there is none.

    Raises:
        ConfigError: `architectures` is not a list of names.
    """
    names = JsonFile("config.json", config).get("architectures", list, [])
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: architectures={names!r} must be a list of names")
    return names[0] if names else ""


def is_language_model(config: Mapping[str, Any]) -> bool:
    """True for a model that continues texts, such as `Qwen3ForCausalLM` or `GPT2LMHeadModel`.

    Raises:
        ConfigError: See `class_name`.
    """
    return class_name(config).endswith(("ForCausalLM", "LMHeadModel"))


def is_causal(config: Mapping[str, Any]) -> bool:
    """True for a language model with causal attention.

    Raises:
        ConfigError: See `class_name`.
    """
    return is_language_model(config) and config.get("is_causal", True) is not False


def classifier_kind(config: Mapping[str, Any]) -> Architecture | None:
    """The kind of classifier that a `config.json` names; None if it names none.

    Raises:
        ConfigError: See `class_name`.
    """
    name = class_name(config)
    return next((kind for ending, kind in CLASSIFIERS.items() if name.endswith(ending)), None)


def read_classifier(
    kind: Architecture,
    config: Mapping[str, Any],
    settings: JsonFile,
    *,
    pair_template: PairForm | None,
) -> LabelFields:
    """Read a sequence or token classifier.

    Args:
        kind: "sequence classifier" or "token classifier".
        config: `config.json`.
        settings: `config_sentence_transformers.json`.
        pair_template: The prompt of a pair. None: two texts with the tokenizer's special tokens.

    Raises:
        ConfigError: The labels are malformed, or the activation is not known.
    """
    labels = read_labels(config)
    if kind == "token classifier":
        return LabelFields(
            architecture=kind, heads=(TokenLabelsSpec(),), scoring=None, labels=labels, activation="softmax"
        )
    return LabelFields(
        architecture=kind,
        heads=(LabelsSpec(),),
        scoring="cross-encoder" if len(labels) == 1 else None,
        labels=labels,
        activation=_named_activation(config, settings) or _usual_activation(config, len(labels)),
        pair_template=pair_template,
    )


def read_modular_reranker(
    chain: Sequence[tuple[str, Path]],
    config: Mapping[str, Any],
    settings: JsonFile,
    transformer: JsonFile,
    *,
    pair_template: PairForm | None,
    root: Path,
) -> LabelFields:
    """Read a cross-encoder whose scores come from modules after a pooling.

    Args:
        chain: Name and folder of each module: Transformer, Pooling, others, and a Dense that gives the scores.
        config: `config.json`.
        settings: `config_sentence_transformers.json`.
        transformer: `sentence_bert_config.json`.
        pair_template: As for `read_classifier`.
        root: The model folder.

    Raises:
        ConfigError: A module is not supported, or one of its files is malformed.
    """
    if transformer.get("transformer_task", str, "feature-extraction") != "feature-extraction":
        raise ConfigError(f"{transformer.name}: transformer_task must be feature-extraction before a Pooling")
    if transformer.get("processing_kwargs", dict, {}):
        raise ConfigError(f"{transformer.name}: processing_kwargs is not supported")
    check_modalities(transformer, output="last_hidden_state")
    pooling = required(chain[1][1] / "config.json", root=root)
    if not pooling.get("include_prompt", bool, True):
        raise ConfigError(f"{pooling.name}: include_prompt=false is not supported for a cross-encoder")
    modules, normalized = read_head([*chain[2:-1]], root=root)
    scores = read_dense(chain[-1][1], root=root, output="scores")
    named, count = read_labels(config), scores.out_features
    return LabelFields(
        architecture="encoder",
        heads=(
            PooledLabelsSpec(
                pooling=read_pooling_modes(pooling), modules=(*modules, *([Normalize()] if normalized else []), scores)
            ),
        ),
        scoring="cross-encoder" if count == 1 else None,
        labels=named if len(named) == count and "id2label" in config else unnamed_labels(count),
        activation=_named_activation(config, settings) or ("sigmoid" if count == 1 else "identity"),
        pair_template=pair_template,
    )


def read_image_classifier(config: Mapping[str, Any]) -> tuple[tuple[str, ...], Activation]:
    """Read the labels and the activation of an image classifier, labels in logit order.

    Raises:
        ConfigError: The labels are malformed.
    """
    labels = read_labels(config)
    return labels, _usual_activation(config, len(labels))


def read_logit_score(
    config: Mapping[str, Any],
    settings: JsonFile,
    transformer: JsonFile,
    score: JsonFile,
    *,
    pair_template: PairForm | None,
) -> LabelFields:
    """Read an LLM reranker as the CrossEncoder of sentence-transformers saves it.

    Args:
        config: `config.json`.
        settings: `config_sentence_transformers.json`.
        transformer: `sentence_bert_config.json`.
        score: `config.json` of the LogitScore module.
        pair_template: As for `read_classifier`.

    Raises:
        ConfigError: A field is malformed.
    """
    true, false = score.get("true_token_id", int, None), score.get("false_token_id", int, None)
    if true is None:
        raise ConfigError(f"{score.name}: true_token_id is missing")
    logits, output = (
        file.get(field, str, "causal_logits")
        for file, field in ((score, "module_input_name"), (transformer, "module_output_name"))
    )
    if logits != output:
        raise ConfigError(f"{score.name}: module_input_name={logits!r} is not the Transformer's output, {output!r}")
    return language_model(
        LogitScoreSpec(true_token=true, false_token=false),
        _named_activation(config, settings) or "sigmoid",
        pair_template,
    )


def language_model(head: LogitScoreSpec, activation: Activation, template: PairForm | None, *notes: str) -> LabelFields:
    """Fields of an LLM reranker.

    Args:
        head: The logits of the score.
        activation: Maps their difference to the score.
        template: The prompt of a pair.
        notes: Assumptions, for the log.
    """
    return LabelFields(
        architecture="causal language model",
        heads=(head,),
        scoring="cross-encoder",
        labels=("LABEL_0",),
        activation=activation,
        pair_template=template,
        notes=notes,
    )


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the names of the labels in the order of their logits; LABEL_0, LABEL_1, ... if the config has none.

    Raises:
        ConfigError: The labels are malformed.
    """
    file = JsonFile("config.json", config)
    names, count = file.get("id2label", dict, None), file.positive("num_labels", MOST_LABELS)
    if names is None:
        return unnamed_labels(2 if count is None else count)
    places = {str(place): place for place in range(len(names))}
    if not names or set(map(str, names)) != set(places):
        raise ConfigError(f"config.json: id2label must have the keys 0 to {max(len(names) - 1, 0)}, one per label")
    if count is not None and count != len(names):
        raise ConfigError(f"config.json: num_labels={count}, but id2label names {len(names)} labels")
    return tuple(str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0])))


def unnamed_labels(count: int) -> tuple[str, ...]:
    """Names of labels that have none, as in transformers."""
    return tuple(f"LABEL_{place}" for place in range(count))


def _named_activation(config: Mapping[str, Any], settings: JsonFile) -> Activation | None:
    """The activation that sentence-transformers saved with the model; None if it saved none."""
    file = JsonFile("config.json", config)
    inner = JsonFile("config.json: sentence_transformers", file.get("sentence_transformers", dict, {}))
    for place, field in (
        (settings, "activation_fn"),
        (inner, "activation_fn"),
        (file, "sbert_ce_default_activation_function"),
    ):
        if (name := place.get(field, str, None)) is None:
            continue
        activation = _ACTIVATIONS.get(name.rpartition(".")[2])
        if activation is None or not name.startswith("torch.nn."):
            known = ", ".join(f"torch.nn.{kind}" for kind in _ACTIVATIONS)
            raise ConfigError(f"{place.name}: {field}={name!r} is not known, only {known}")
        return activation
    return None


def _usual_activation(config: Mapping[str, Any], labels: int) -> Activation:
    """The activation of transformers' text classification pipeline, chosen by `problem_type`."""
    problem = JsonFile("config.json", config).get("problem_type", str, None)
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
