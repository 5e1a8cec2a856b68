"""Read what the folder of a model that gives labels says of them: names, activation, and what pairs look like.

Such folders are written by transformers (a checkpoint with a head), by the CrossEncoder of sentence-transformers (the
same with an activation; since version 6 also a language model whose answer is read), or by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from staged_pool.runtime.model import Activation, Scoring
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import (
    Architecture,
    HeadSpec,
    LabelsSpec,
    LogitScoreSpec,
    PairForm,
    TokenLabelsSpec,
)
from staged_pool.stages.errors import ConfigError

CLASSIFIERS: Final[Mapping[str, Architecture]] = {
    "ForSequenceClassification": "sequence classifier",
    "ForTokenClassification": "token classifier",
}
"""How the classes of transformers that give labels end."""

_ACTIVATIONS: Final[Mapping[str, Activation]] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
"""Classes of `torch.nn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """The fields of a `ModelFolder` that are about labels."""

    architecture: Architecture
    heads: tuple[HeadSpec, ...]
    scoring: Scoring | None
    labels: tuple[str, ...]
    activation: Activation
    pair_template: PairForm | None = None
    notes: tuple[str, ...] = ()
    """What had to be assumed, for the log."""
    doubts: tuple[str, ...] = ()
    """What was assumed on little evidence, for the log as a warning."""

    def fields(self) -> dict[str, Any]:
        """By name."""
        return {name: getattr(self, name) for name in self.__slots__}


def class_name(config: Mapping[str, Any]) -> str:
    """The class of transformers that wrote a `config.json`; empty where it is not said.

    Raises:
        ConfigError: `architectures` is not a list of names.
    """
    names = JsonFile("config.json", config).get("architectures", list, [])
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: architectures={names!r} must be a list of names")
    return names[0] if names else ""


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a model that continues texts, such as `Qwen3ForCausalLM` or `GPT2LMHeadModel`.

    Raises:
        ConfigError: See `class_name`.
    """
    return class_name(config).endswith(("ForCausalLM", "LMHeadModel"))


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether it is a language model that reads from left to right.

    Raises:
        ConfigError: See `class_name`.
    """
    return is_language_model(config) and config.get("is_causal", True) is not False


def classifier_kind(config: Mapping[str, Any]) -> Architecture | None:
    """Which kind of classifier a `config.json` is of; None where it is of none.

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
) -> Labelling:
    """Read a sequence or token classifier.

    Args:
        kind: Which of them.
        config: `config.json`.
        settings: `config_sentence_transformers.json`.
        pair_template: What makes one text of a pair. None: the tokenizer's special tokens do.

    Raises:
        ConfigError: The labels cannot be read, or the activation is not known.
    """
    labels = _labels(config)
    if kind == "token classifier":
        return Labelling(
            architecture=kind, heads=(TokenLabelsSpec(),), scoring=None, labels=labels, activation="softmax"
        )
    return Labelling(
        architecture=kind,
        heads=(LabelsSpec(),),
        scoring="cross-encoder" if len(labels) == 1 else None,
        labels=labels,
        activation=_named_activation(config, settings) or _usual_activation(config, len(labels)),
        pair_template=pair_template,
    )


def read_image_classifier(config: Mapping[str, Any]) -> tuple[tuple[str, ...], Activation]:
    """Names of the labels of a classifier of images, in the order of their logits, and what makes scores of logits.

    Raises:
        ConfigError: The labels cannot be read.
    """
    labels = _labels(config)
    return labels, _usual_activation(config, len(labels))


def read_logit_score(
    config: Mapping[str, Any],
    settings: JsonFile,
    transformer: JsonFile,
    score: JsonFile,
    *,
    pair_template: PairForm | None,
) -> Labelling:
    """Read a language model whose answer is the score, as the CrossEncoder of sentence-transformers saves it.

    Args:
        config: `config.json`.
        settings: `config_sentence_transformers.json`.
        transformer: `sentence_bert_config.json`.
        score: `config.json` of its LogitScore.
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
        raise ConfigError(f"{score.name}: module_input_name={logits!r} is not what the Transformer gives: {output!r}")
    return language_model(
        LogitScoreSpec(true_token=true, false_token=false),
        _named_activation(config, settings) or "sigmoid",
        pair_template,
    )


def language_model(head: LogitScoreSpec, activation: Activation, template: PairForm | None, *notes: str) -> Labelling:
    """A language model whose answer to a pair is the score.

    Args:
        head: Which logits the score is made of.
        activation: What makes a score of them.
        template: What the model reads of a pair.
        notes: What had to be assumed.
    """
    return Labelling(
        architecture="causal language model",
        heads=(head,),
        scoring="cross-encoder",
        labels=("LABEL_0",),
        activation=activation,
        pair_template=template,
        notes=notes,
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the labels in the order of their logits; LABEL_0 and so on where they have none."""
    file = JsonFile("config.json", config)
    names, count = file.get("id2label", dict, None), file.positive("num_labels")
    if names is None:
        return tuple(f"LABEL_{place}" for place in range(2 if count is None else count))
    places = {str(place): place for place in range(len(names))}
    if not names or set(map(str, names)) != set(places):
        raise ConfigError(f"config.json: id2label must have the keys 0 to {max(len(names) - 1, 0)}, one a label")
    if count is not None and count != len(names):
        raise ConfigError(f"config.json: num_labels={count}, but id2label names {len(names)} labels")
    return tuple(str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0])))


def _named_activation(config: Mapping[str, Any], settings: JsonFile) -> Activation | None:
    """The activation that sentence-transformers has written down; None where it has not."""
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
    """What transformers' text classification does: it goes by the problem that the model was trained for."""
    problem = JsonFile("config.json", config).get("problem_type", str, None)
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
