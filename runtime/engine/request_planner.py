"""The request planner: it checks a decoded request against the model and the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

from staged_pool.runtime.admission.accounting import Reservation
from staged_pool.runtime.caching.fingerprints import SharingScopes
from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.memory.answers import expected_numbers
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.plugins.request import PluginRequest
from staged_pool.runtime.requests import ClassifyRequest, EmbedRequest, ImagePair, PairInput, TokenClassifyRequest
from staged_pool.stages.errors import EngineStopped, NoInputs, TooLarge, UnknownModel, shortened
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Plan, Request

MAX_REPEATED_CHARACTERS: Final = 2**25
"""Most characters of prompts, queries and instructions in a request.

Each is counted once for each input that it stands before.
"""


class RequestPlanner:
    """Plans decoded requests for the served model; parse calls it.

    Args:
        config: Limits of a request, and `share_between_tenants`.
        card: Description of the served model.
        count_items: Counts the inputs of each lane once they are known; see `Admission.count_items`.
        plan_task: Plans a request by its task.
        secret: See `SharingScopes`.
    """

    def __init__(
        self,
        config: EngineConfig,
        card: ModelCard,
        count_items: Callable[[Ticket, Mapping[Lane, int]], object],
        plan_task: Callable[[Ticket, Request], Plan[ModelInput]],
        secret: bytes | None = None,
    ) -> None:
        self._config = config
        self._plan_task = plan_task
        self._card = card
        self._count_items = count_items
        self._scopes = SharingScopes(between_tenants=config.share_between_tenants, secret=secret)
        self.obstruction: Callable[[Iterable[Lane]], str | None] = lambda lanes: None
        """Returns the reason why nothing gets through these lanes; see `EngineStages.obstruction`."""

    def check_model(self, name: str | None) -> None:
        """Reject the name of a model that is not served. None and "" mean any model.

        Raises:
            UnknownModel: The served model has another name.
        """
        if name and name != self._card.name:
            message = f"The model `{shortened(name)}` does not exist. Served: {self._card.name}"
            raise UnknownModel(message, param="model")

    def plan(self, ticket: Ticket, request: Request) -> Plan[ModelInput]:
        """Plan a request for this model, within the limits of this server.

        Raises:
            StagedPoolError: The request does not fit the model, or exceeds a limit.
        """
        card = self._card
        self.check_model(request.model)
        if isinstance(request, ClassifyRequest) and request.candidate_labels is not None:
            check_pairs(len(request.inputs), len(request.candidate_labels), self._config.max_request_items)
        plan = self._plan_task(ticket, request)
        if not plan.inputs:
            raise NoInputs("The request has no inputs; at least one is needed.", param="input")
        check_repeated(plan.inputs)
        lanes: Mapping[Lane, int] = (
            {card.lanes[0]: len(plan.inputs)} if len(card.lanes) == 1 else Counter(given.lane for given in plan.inputs)
        )
        if len(card.lanes) > 1 and (obstruction := self.obstruction(lanes)):  # with one lane, admission has checked it
            raise EngineStopped(f"The engine takes no requests of this kind: {obstruction}.")
        if "image" in lanes:
            ticket.timeline.images = sum(len(given.images) for given in plan.inputs)
            check_images(ticket.timeline.images, self._config.max_request_items)
        reservation = cast(Reservation, ticket.load)
        if reservation.is_in_flight:
            self._count_items(ticket, lanes)
            if reservation.answer is not None:
                is_answer = isinstance(request, EmbedRequest | TokenClassifyRequest | PluginRequest)
                reservation.answer.expect(expected_numbers(plan.inputs, reservation.tokens, card), in_answer=is_answer)
        ticket.sharing_scope = scope = self._scopes.scope(ticket.tenant, request.cache_salt)
        if scope is None or "image" not in lanes or not self._config.image_cache_mb:
            return plan
        return replace(plan, inputs=[replace(given, sharing_scope=scope) for given in plan.inputs])


def check_pairs(texts: int, labels: int, limit: int) -> None:
    """Reject a request with too many pairs of a text and a label.

    Raises:
        TooLarge: There are more pairs than the limit.
    """
    # Before the plan makes the pairs, which a small body may have millions of.
    if texts * labels > limit:
        raise TooLarge(
            f"{texts} texts with {labels} $candidate_labels are {texts * labels} pairs; a request may have {limit}.",
            param="candidate_labels",
        )


def check_repeated(inputs: Sequence[ModelInput]) -> None:
    """Reject a prompt, query or instruction that is too long for many inputs.

    Raises:
        TooLarge: Their copies have more than `MAX_REPEATED_CHARACTERS`.
    """
    # Preprocess writes a copy for each input, so a body of a megabyte could become gigabytes.
    if len(inputs) == 1:
        return
    characters, query = 0, ""
    for given in inputs:
        characters += len(given.prompt)
        source = given.source
        if isinstance(source, PairInput):
            characters += len(source.instruction or "") + (len(query) if source.first is query else 0)
            query = source.first
        elif isinstance(source, ImagePair):
            characters += len(source.instruction or "")
            characters += sum(len(part) for part in source.first if isinstance(part, str))
    if characters > MAX_REPEATED_CHARACTERS:
        raise TooLarge(
            f"The text that stands before each of {len(inputs)} inputs (a prompt, query or instruction) has "
            f"{characters} characters in all; a request may have {MAX_REPEATED_CHARACTERS}. Please shorten it, or send "
            "fewer inputs.",
            param="input",
        )


def check_images(images: int, limit: int) -> None:
    """Reject a request with too many images: a conversation is one item, and may hold any number of image URLs.

    Raises:
        TooLarge: There are more images than the limit.
    """
    if images > limit:
        raise TooLarge(f"The request has {images} images; at most {limit} are accepted.", param="input")
