"""Read a language model that is asked about pairs: by what its folder is recognised as, or by its user's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.folders.classifier import Labelling, language_model
from staged_pool.runtime.models.folders.reranker_families import FAMILIES, QWEN3, Family, looks_like_qwen3, recognise
from staged_pool.runtime.models.specs.model import LogitScoreSpec, PairForm, PairTemplate
from staged_pool.runtime.reranking import AskedFor
from staged_pool.stages.errors import ConfigError

_DECODERS: Final = frozenset({"qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "llama", "mistral"})
"""Values of model_type that rerankers of the families have."""


def read_asked_model(
    path: Path,
    body: Path,
    config: Mapping[str, Any],
    asked: AskedFor,
    *,
    chat: str | None,
    own: PairTemplate | None,
    said: bool,
) -> Labelling:
    """Read a language model that has no files of sentence-transformers.

    Args:
        path: The folder.
        body: Where the transformer's files lie.
        config: `config.json`.
        asked: What the user says.
        chat: The chat template.
        own: What the chat template makes of a pair, where it is one for pairs; the user's template where there is one.
        said: Whether the user says that it is a reranker.

    Raises:
        ConfigError: It is not known how it is to be asked, or the user says something else than its family.
    """
    found = recognise(path, body, config, chat)
    if asked.template is not None and asked.tokens:
        note = f"read as score_template says; score: {asked.score}"
        if found is not None:
            note += f"; what {found[0].name} is trained for is replaced"
        return _by_the_user(asked, own, note)
    if found is not None:
        family, evidence = found
        _check_alike(path, family, evidence, asked)
        return _of_family(family, own, f"read as {family.name}, as {evidence}")
    if asked.tokens and own is not None:
        note = f"read as the chat template says; score: {asked.score}"
        return _by_the_user(asked, own, note)
    if said and asked.template is None and not asked.tokens and own is None and looks_like_qwen3(config, body):
        guessed = _of_family(QWEN3, None, "assumed to be a Qwen3-Reranker: nothing says it but task='score'")
        return replace(guessed, notes=(), doubts=guessed.notes)
    known = ", ".join(family.name for family in FAMILIES)
    missing = [name for name, given in (("template", asked.template or own), ("tokens", asked.tokens)) if not given]
    raise ConfigError(
        f"task='score': {path.name} is a language model, and nothing says how it is to be asked about a query and a "
        f"document. Set {' and '.join(f'score_{name}' for name in missing)} "
        f"({', '.join(_FLAGS[name] for name in missing)}). Recognised by themselves are {known}"
    )


_FLAGS: Final = {
    "template": "--score-template 'Query: {query} Document: {document} Relevant:'",
    "tokens": "--score-tokens yes,no",
}


def replaced_answers(labelling: Labelling, asked: AskedFor, file: str) -> Labelling:
    """A LogitScore folder with the user's answers instead of its own; they go with a template of the user's.

    Args:
        labelling: What was read of the folder.
        asked: What the user says.
        file: Which file names the folder's own answers.

    Raises:
        ConfigError: There are tokens without a template.
    """
    if not asked.tokens:
        return labelling
    if asked.template is None:
        raise ConfigError(
            f"score_tokens={','.join(asked.tokens)!r}: {file} says which tokens are read; leave this out, or set "
            "score_template (--score-template) too, to replace both"
        )
    note = f"read as score_template says; score: {asked.score}; what {file} says is replaced"
    return replace(labelling, heads=(_answers(asked),), notes=(*labelling.notes, note))


def unasked_note(
    path: Path, body: Path, config: Mapping[str, Any], chat: str | None, template: PairForm | None
) -> tuple[str, ...]:
    """A note on a decoder reranker made a sequence classifier: its pairs are read without its question.

    sentence-transformers and the other servers read it so too; who calls it writes the question into the texts.

    Args:
        path: The folder.
        body: Where the transformer's files lie.
        config: `config.json`.
        chat: The chat template.
        template: What makes one text of a pair. None: nothing does.
    """
    if template is not None or config.get("model_type") not in _DECODERS:
        return ()
    try:
        found = recognise(path, body, config, chat)
    except ConfigError:
        return ()
    if found is None:
        return ()
    return (
        f"a sequence classifier made of {found[0].name}, as {found[1]}: query and document are read without the "
        "question that it was trained with, unless they hold it or score_template (--score-template) writes it",
    )


def _by_the_user(asked: AskedFor, template: PairTemplate | None, note: str) -> Labelling:
    return language_model(_answers(asked), "sigmoid" if len(asked.tokens) > 1 else "identity", template, note)


def _answers(asked: AskedFor) -> LogitScoreSpec:
    """The logits that the user names: two, whose difference counts, or one."""
    true, *false = asked.tokens
    return LogitScoreSpec(true_token=true, false_token=false[0] if false else None)


def _of_family(family: Family, own: PairTemplate | None, why: str) -> Labelling:
    """As its authors ask it; where the chat template is one for pairs of the family, that is theirs too."""
    form = own if own is not None and family is QWEN3 else family.form
    return language_model(family.head, family.activation, form, f"{why}; score: {family.score}, as in {family.source}")


def _check_alike(path: Path, family: Family, evidence: str, asked: AskedFor) -> None:
    """Reject a template or tokens alone where the family has its own: half of one recipe and half of another."""
    answers = (family.head.true_token, family.head.false_token)
    if asked.tokens and asked.tokens != tuple(answer for answer in answers if answer is not None):
        setting, other = f"score_tokens={','.join(asked.tokens)!r}", "score_template (--score-template)"
    elif asked.template is not None:
        setting, other = f"score_template={asked.template!r}", "score_tokens (--score-tokens)"
    else:
        return
    raise ConfigError(
        f"{setting}: {path.name} is {family.name}, as {evidence}, and its authors' question and answer are "
        f"used: leave this out, or set {other} too, to replace both"
    )
