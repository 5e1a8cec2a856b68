"""Plans of requests, by task."""

from __future__ import annotations

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import ClassifyRequest, EmbedRequest, ScoreRequest, TokenClassifyRequest, Video
from staged_pool.runtime.tasks import classify, classify_tokens, embed, score, zero_shot
from staged_pool.stages.errors import Unsupported
from staged_pool.stages.work import Plan, Request


def plan(request: Request, card: ModelCard) -> Plan[ModelInput]:
    """Plan a request for a model.

    Raises:
        InvalidInput: The request does not fit the model; the error names the field.
        Unsupported: The model cannot do the task, or does not read inputs of this kind.
    """
    made = _plan(request, card)
    for given in made.inputs:
        if not card.reads_videos and given.lane == "image" and any(isinstance(each, Video) for each in given.images):
            raise Unsupported(f"The model `{card.name}` reads no videos.")
        if given.lane not in card.lanes:
            what = "images" if given.lane == "image" else "texts"
            raise Unsupported(f"The model `{card.name}` reads no {what}.")
    return made


def _plan(request: Request, card: ModelCard) -> Plan[ModelInput]:
    match request:
        case EmbedRequest():
            return embed.plan(request, card)
        case ScoreRequest():
            return score.plan(request, card)
        case ClassifyRequest() if request.candidate_labels is not None:
            return zero_shot.plan(request, card)
        case ClassifyRequest():
            return classify.plan(request, card)
        case TokenClassifyRequest():
            return classify_tokens.plan(request, card)
        case _:
            raise TypeError(f"{type(request).__name__} is not a request of any task")
