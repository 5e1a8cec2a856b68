"""LLM rerankers: prompt and score tokens of a folder, from a known family or the user's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.folders.classifier import LabelFields, language_model
from staged_pool.runtime.models.folders.reranker_families import (
    FAMILIES,
    QWEN3,
    QWEN3_VL,
    RerankerFamily,
    find_family,
    looks_like_qwen3,
)
from staged_pool.runtime.models.specs.model import LogitScoreSpec
from staged_pool.runtime.models.specs.pair_forms import PairForm, PairTemplate
from staged_pool.runtime.reranking import RerankerPrompt
from staged_pool.stages.errors import ConfigError

_DECODERS: Final = frozenset({"qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "llama", "mistral"})
"""Values of `model_type` of the known reranker families."""


def read_llm_reranker(
    path: Path,
    body: Path,
    config: Mapping[str, Any],
    asked: RerankerPrompt,
    *,
    chat: str | None,
    pair_template: PairTemplate | None,
    is_reranker: bool,
) -> LabelFields:
    """Read an LLM reranker whose folder has no files of sentence-transformers.

    Args:
        path: The model folder.
        body: The folder with the transformer's files.
        config: `config.json`.
        asked: The user's score settings.
        chat: The chat template.
        pair_template: The user's template, else the chat template if it is one for pairs, else None.
        is_reranker: True if the user set task='score'.

    Raises:
        ConfigError: Neither the folder nor the user gives a prompt and score tokens, or the user replaces only
            half of a known family's recipe.
    """
    found = find_family(path, body, config, chat)
    if asked.template is not None and asked.tokens:
        note = f"read as score_template says; score: {asked.score}"
        if found is not None:
            note += f"; this replaces the prompt and tokens that {found[0].name} was trained with"
        return _from_user_settings(asked, pair_template, note)
    if found is not None:
        family, evidence = found
        _check_half_recipe(path, family, evidence, asked)
        return _from_family(family, pair_template, f"read as {family.name}, as {evidence}")
    if asked.tokens and pair_template is not None:
        note = f"read as the chat template says; score: {asked.score}"
        return _from_user_settings(asked, pair_template, note)
    nothing_given = asked.template is None and not asked.tokens and pair_template is None
    if is_reranker and nothing_given and config.get("model_type") == QWEN3_VL.model_type:
        guessed = _from_family(QWEN3_VL, None, "assumed to be a Qwen3-VL-Reranker: the only evidence is task='score'")
        return replace(guessed, notes=(), warnings=guessed.notes)
    if is_reranker and nothing_given and looks_like_qwen3(config, body):
        guessed = _from_family(QWEN3, None, "assumed to be a Qwen3-Reranker: the only evidence is task='score'")
        return replace(guessed, notes=(), warnings=guessed.notes)
    known = ", ".join(family.name for family in FAMILIES)
    settings = (("template", asked.template or pair_template), ("tokens", asked.tokens))
    missing = [name for name, given in settings if not given]
    raise ConfigError(
        f"task='score': {path.name} is a language model, and neither its files nor its name say which prompt it was "
        f"trained with. Set {' and '.join(f'score_{name}' for name in missing)} "
        f"({', '.join(_FLAGS[name] for name in missing)}). Families that need no setting: {known}"
    )


_FLAGS: Final = {
    "template": "--score-template 'Query: {query} Document: {document} Relevant:'",
    "tokens": "--score-tokens yes,no",
}
"""Example flags, by setting."""


def with_user_tokens(label_fields: LabelFields, asked: RerankerPrompt, file: str) -> LabelFields:
    """Replace the score tokens of a LogitScore folder by the user's.

    Args:
        label_fields: The fields read from the folder.
        asked: The user's score settings.
        file: The file that names the folder's own tokens.

    Raises:
        ConfigError: The user set tokens without a template.
    """
    if not asked.tokens:
        return label_fields
    if asked.template is None:
        raise ConfigError(
            f"score_tokens={','.join(asked.tokens)!r}: {file} names the score tokens already: remove score_tokens, or "
            "set score_template (--score-template) too, to replace both"
        )
    note = f"read as score_template says; score: {asked.score}; this replaces the tokens of {file}"
    return replace(label_fields, heads=(_score_head(asked),), notes=(*label_fields.notes, note))


def missing_question_note(
    path: Path, body: Path, config: Mapping[str, Any], chat: str | None, template: PairForm | None
) -> tuple[str, ...]:
    """Warn about an LLM reranker converted to a sequence classifier: its pairs lack its prompt.

    sentence-transformers and other servers read such a model the same way; the client writes the question into the
    texts.

    Args:
        path: The model folder.
        body: The folder with the transformer's files.
        config: `config.json`.
        chat: The chat template.
        template: The form of a pair. None: the texts with special tokens between them.

    Returns:
        One warning for the log, or none.
    """
    if template is not None or config.get("model_type") not in _DECODERS:
        return ()
    try:
        found = find_family(path, body, config, chat)
    except ConfigError:
        return ()
    if found is None:
        return ()
    return (
        f"a sequence classifier converted from {found[0].name}, as {found[1]}: it reads query and document without "
        "the question that it was trained with, unless the texts hold it or score_template (--score-template) adds it",
    )


def _from_user_settings(asked: RerankerPrompt, template: PairTemplate | None, note: str) -> LabelFields:
    return language_model(_score_head(asked), "sigmoid" if len(asked.tokens) > 1 else "identity", template, note)


def _score_head(asked: RerankerPrompt) -> LogitScoreSpec:
    """Score head of the user's tokens: the difference of two logits, or one logit."""
    true, *false = asked.tokens
    return LogitScoreSpec(true_token=true, false_token=false[0] if false else None)


def _from_family(family: RerankerFamily, template: PairTemplate | None, why: str) -> LabelFields:
    """Fields of a known family. A Qwen3 or Qwen3-VL folder's own template for pairs takes the place of the family's."""
    form = template if template is not None and family in (QWEN3, QWEN3_VL) else family.form
    return language_model(family.head, family.activation, form, f"{why}; score: {family.score}, as in {family.source}")


def _check_half_recipe(path: Path, family: RerankerFamily, evidence: str, asked: RerankerPrompt) -> None:
    """Reject a user's template without tokens, or tokens without template, for a known family."""
    answers = (family.head.true_token, family.head.false_token)
    if asked.tokens and asked.tokens != tuple(answer for answer in answers if answer is not None):
        setting, other = f"score_tokens={','.join(asked.tokens)!r}", "score_template (--score-template)"
    elif asked.template is not None:
        setting, other = f"score_template={asked.template!r}", "score_tokens (--score-tokens)"
    else:
        return
    raise ConfigError(
        f"{setting}: {path.name} is {family.name}, as {evidence}, whose own prompt and score tokens are used: "
        f"remove this setting, or set {other} too, to replace both"
    )
