"""First steps of all LLM reranker pairs: check the request, and cut each text to its own limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.tokenizing.limits import (
    InputLimits,
    check_own_limit,
    check_text,
    token_limit,
    truncated,
)
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import PairInput, Side
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import InvalidInput, InvalidSetting
from staged_pool.stages.work import Prepared


@dataclass(slots=True)
class PendingPair:
    """One pair between the steps of its preparation."""

    given: ModelInput
    pair: PairInput
    query: str
    document: str
    instruction: str | None
    limit: int | None
    """Limit of the whole sequence, in tokens. None: do not cut."""
    side: Side
    """The end of a text that is cut off."""
    written: str = ""
    """The rendered prompt."""
    ids: TokenIds = field(default_factory=list)
    """The tokens of `written`."""


def begin_pair(
    given: ModelInput, pair: PairInput, limits: InputLimits, *, takes_instruction: bool, instruction: str | None
) -> PendingPair | InvalidInput:
    """Check a pair, and resolve its limits and instruction.

    Args:
        given: The input.
        pair: Its source.
        limits: The model's limits.
        takes_instruction: True if the prompt has a place for an instruction.
        instruction: The default instruction.

    Returns:
        The pair, or the error of its request.
    """
    try:
        if pair.instruction is not None and not takes_instruction:
            raise InvalidSetting("The model takes no $instruction.", param="instruction")
        if pair.cuts_first_only:
            raise InvalidSetting(
                "The model reads pairs by a template, and takes no $candidate_labels.", param="candidate_labels"
            )
        limit = token_limit(pair.max_tokens, limits.max_tokens)
        check_own_limit(pair.max_first_tokens)
        check_own_limit(pair.max_second_tokens)
        # A prompt takes the place of the instruction, as in sentence-transformers.
        asked = (pair.instruction, given.prompt or None, instruction)
        chosen = next((text for text in asked if text is not None), None)
        for text in (pair.first, pair.second, chosen or ""):
            check_text(text)
    except InvalidInput as error:
        return error
    return PendingPair(given, pair, pair.first, pair.second, chosen, limit, limits.side(pair.truncate_side))


def truncate_texts(shared: SharedTokenizer, entries: Sequence[PendingPair]) -> None:
    """Cut queries and documents to their own limits, before they are put into the prompt."""
    some = [entry for entry in entries if entry.pair.max_first_tokens is not None]
    queries = _kept(shared, [(each.query, each.pair.max_first_tokens, each.side) for each in some])
    for entry, query in zip(some, queries, strict=True):
        entry.query = query
    some = [entry for entry in entries if entry.pair.max_second_tokens is not None]
    documents = _kept(shared, [(each.document, each.pair.max_second_tokens, each.side) for each in some])
    for entry, document in zip(some, documents, strict=True):
        entry.document = document


def prepared_pair(entry: PendingPair, ids: TokenIds, limits: InputLimits) -> Prepared[TokenSequence]:
    """Build the sequence for the device.

    Raises:
        InvalidInput: It is empty, or has ids outside the vocabulary.
    """
    limits.check_ids(ids)
    return Prepared(TokenSequence(ids, entry.given.outputs), tokens=len(ids), batch_key=entry.given.outputs)


def no_room_error(tokens: int, limit: int | None) -> InvalidInput:
    """Error for a pair whose prompt and query exceed the limit without the document.

    Args:
        tokens: Tokens of prompt and query.
        limit: The limit of the whole sequence.
    """
    return InvalidInput(
        f"The prompt without the document takes {tokens} tokens, which is more than the limit of {limit}. "
        "Please shorten the query or the instruction, or raise the limit.",
        param="input",
    )


def _kept(shared: SharedTokenizer, texts: Sequence[tuple[str, int | None, Side]]) -> list[str]:
    """Cut each text at one end to a number of its tokens."""
    if not texts:
        return []
    wanted = [tokens if side == "right" else None for _, tokens, side in texts]
    encodings = shared.encode([text for text, *_ in texts], wanted, offsets=True)
    return [
        _part(text, truncated(encoding.offsets, tokens, side), side)
        for (text, tokens, side), encoding in zip(texts, encodings, strict=True)
    ]


def _part(text: str, offsets: Sequence[tuple[int, int]], side: Side) -> str:
    """The part of a text that tokens at its beginning (side "right") or end cover."""
    if side == "right":
        return text[: max((stop for _, stop in offsets), default=0)]
    return text[min((start for start, _ in offsets), default=len(text)) :]
