"""Calls for labels, entities and scores: their arguments and their requests. Pure.

`Client` and `AsyncClient` make their methods from these functions. The methods have the same docstrings, and the same
parameters but the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from staged_pool.client import reading
from staged_pool.client.contents import Form, Given, document, options
from staged_pool.client.plans import CallDefaults, CallPlan, batch_requests, batched, source
from staged_pool.client.results import EntitiesResult
from staged_pool.runtime import arguments, joining
from staged_pool.runtime.arguments import Inputs
from staged_pool.runtime.progress import Progress
from staged_pool.runtime.requests import HYPOTHESIS, Aggregation, Content
from staged_pool.runtime.results import ClassifyResult, RerankResult, ScoreResult
from staged_pool.runtime.tasks.score import check_top_n, rank
from staged_pool.stages.errors import InvalidInput

_ANY: Final = Form("queries and documents of any form")


def classify(
    defaults: CallDefaults,
    inputs: Inputs | Sequence[tuple[str, str]],
    *,
    activate: bool = True,
    candidate_labels: str | Sequence[str] | None = None,
    hypothesis_template: str = HYPOTHESIS,
    multi_label: bool = False,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
) -> CallPlan[ClassifyResult, ClassifyResult]:
    """Score the labels for each input or pair of texts; see `Engine.classify` for the result.

    Args:
        inputs: One input, or a list of inputs or of pairs of texts.
        activate: Apply the model's activation to the scores. False: return logits.
        candidate_labels: Labels to choose among, instead of those of the model; for models of natural language
            inference. Inputs are texts then.
        hypothesis_template: Statement that each candidate label completes; `{}` stands for the label.
        multi_label: Score each candidate label by itself. False: the scores of a text add up to 1.
        max_tokens: See `embed`.
        cache_salt: See `embed`.
        model: See `embed`.
        timeout_s: See `embed`.
        progress: See `embed`.

    Raises:
        InvalidInput: An argument or an input is wrong.
    """
    sources = [source(given) for given in arguments.inputs_or_pairs(inputs, max_tokens)]
    labels = arguments.candidate_labels(candidate_labels)
    arguments.text("hypothesis_template", hypothesis_template)
    common = defaults.fields(
        model,
        use_activation=activate,
        candidate_labels=labels,
        hypothesis_template=None if hypothesis_template == HYPOTHESIS else hypothesis_template,
        multi_label=multi_label or None,
        truncate_prompt_tokens=max_tokens,
        cache_salt=arguments.cache_salt(cache_salt),
    )
    return batched(
        defaults,
        "/classify",
        sources,
        common,
        read=reading.read_labels,
        join=joining.join_labels,
        timeout_s=timeout_s,
        progress=progress,
        items_each=len(labels or ("",)),
    )


def classify_tokens(
    defaults: CallDefaults,
    inputs: str | Sequence[str],
    *,
    aggregation: Aggregation = "simple",
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
) -> CallPlan[EntitiesResult, EntitiesResult]:
    """Find the entities in each text; see `Engine.classify_tokens`.

    The result has no scores of single tokens, which the server does not send. For the other arguments see `embed`.

    Args:
        inputs: One text, or a list of texts.
        aggregation: Rule by which tokens become entities.
        max_tokens: See `embed`.
        cache_salt: See `embed`.
        model: See `embed`.
        timeout_s: See `embed`.
        progress: See `embed`.

    Raises:
        InvalidInput: An argument or an input is wrong.
    """
    texts = [source(given) for given in arguments.text_inputs(inputs, max_tokens)]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInput(f"Input {index} is not a text; entities are found only in texts", index=index)
    common = defaults.fields(
        model,
        aggregation_strategy=aggregation,
        truncate_prompt_tokens=max_tokens,
        cache_salt=arguments.cache_salt(cache_salt),
    )
    read, join = reading.read_entities, reading.join_entities
    return batched(
        defaults, "/classify_tokens", texts, common, read=read, join=join, timeout_s=timeout_s, progress=progress
    )


def score(
    defaults: CallDefaults,
    queries: Content | Sequence[Content],
    documents: Content | Sequence[Content],
    *,
    activate: bool = True,
    instruction: str | None = None,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
    logits: bool = False,
) -> CallPlan[ScoreResult, ScoreResult]:
    """Score each document for its query; see `Engine.score` for the result.

    Args:
        queries: One query for all documents, or one for each document.
        documents: One document, or a list of documents.
        activate: Apply the model's activation to the scores. False: return logits.
        instruction: Instruction for models that take one.
        max_tokens: Limit of each pair in tokens. None: truncate long documents to the model's limit.
        cache_salt: See `embed`.
        model: See `embed`.
        timeout_s: See `embed`.
        progress: See `embed`.
        logits: Ask for the logit of each score, too. A server that does not know this option sends none.

    Raises:
        InvalidInput: An argument or an input is wrong.
    """
    arguments.whole_number("max_tokens", max_tokens)
    arguments.text("instruction", instruction)
    asked, given = arguments.contents("queries", queries), arguments.contents("documents", documents)
    if len(asked) not in (1, len(given)):
        found = f"found {len(asked)} and {len(given)}"
        raise InvalidInput(f"queries and documents must be 1:1, 1:N or N:N; {found}", param="queries")
    common = {
        **defaults.fields(
            model,
            use_activation=activate,
            instruction=instruction,
            truncate_prompt_tokens=max_tokens,
            cache_salt=arguments.cache_salt(cache_salt),
        ),
        **options((*asked, *given)),
        **({"return_logits": True} if logits else {}),
    }
    pairs: list[Given] = list(zip(asked, given, strict=True)) if len(asked) > 1 else list(given)

    def fields(some: Sequence[Any]) -> dict[str, object]:
        sides = ([document(pair[0]) for pair in some], [pair[1] for pair in some]) if len(asked) > 1 else (query, some)
        return {**common, "queries": sides[0], "documents": [document(each) for each in sides[1]]}

    query = document(asked[0]) if len(asked) == 1 else None
    return CallPlan(
        total=len(given),
        batches=partial(batch_requests, defaults, "/score", pairs, fields, form_of=lambda given: _ANY),
        read=reading.read_scores,
        join=joining.join_scores,
        timeout_s=timeout_s,
        progress=progress,
    )


def rerank(
    defaults: CallDefaults,
    query: Content,
    documents: Content | Sequence[Content],
    *,
    top_n: int | None = None,
    activate: bool = True,
    instruction: str | None = None,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
) -> CallPlan[ScoreResult, RerankResult]:
    """Rank documents by their scores for a query, the best first; see `Engine.rerank` for the result.

    Args:
        query: The query.
        documents: One document, or a list of documents.
        top_n: Return only this number of documents. None: all.
        activate: See `score`.
        instruction: See `score`.
        max_tokens: See `score`.
        cache_salt: See `embed`.
        model: See `embed`.
        timeout_s: See `embed`.
        progress: See `embed`.

    Raises:
        InvalidInput: An argument or an input is wrong.
    """
    # Ranked here: the server cannot rank a list that is sent in batches.
    arguments.whole_number("top_n", top_n)
    check_top_n(top_n)
    if len(asked := arguments.contents("query", query)) != 1:
        raise InvalidInput(f"query must be a single query, not {len(asked)}.", param="query")
    scored = score(
        defaults,
        query,
        documents,
        activate=activate,
        instruction=instruction,
        max_tokens=max_tokens,
        cache_salt=cache_salt,
        model=model,
        timeout_s=timeout_s,
        progress=progress,
        logits=activate,  # scores near 1 are equal in float32, their logits are not
    )
    return CallPlan(
        total=scored.total,
        batches=scored.batches,
        read=scored.read,
        join=lambda results: rank(scored.join(results), top_n),
        timeout_s=timeout_s,
        progress=progress,
    )
