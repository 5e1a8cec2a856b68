"""What all readers of pairs for language models do first: check what was asked, and cut each text by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from staged_pool.runtime.model import ModelInput, TokenIds, TokenSequence
from staged_pool.runtime.models.tokenizing.limits import InputLimits, check_text, kept, own_limit, token_limit
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.requests import PairInput, Side
from staged_pool.stages.errors import InvalidInput, InvalidSetting
from staged_pool.stages.work import Prepared


@dataclass(slots=True)
class PairReading:
    """One pair on its way."""

    given: ModelInput
    pair: PairInput
    query: str
    document: str
    instruction: str | None
    limit: int | None
    """Tokens of the whole sequence. None: nothing is cut."""
    side: Side
    """The end of a text that is cut off."""
    written: str = ""
    ids: TokenIds = field(default_factory=list)


def begin_pair(
    given: ModelInput, pair: PairInput, limits: InputLimits, *, takes_instruction: bool, instruction: str | None
) -> PairReading | InvalidInput:
    """A pair with its limits and instruction, or what is wrong with it.

    Args:
        given: The input.
        pair: Its source.
        limits: The model's.
        takes_instruction: Whether the template has a place for one.
        instruction: The one that counts where the request has none.
    """
    try:
        if pair.instruction is not None and not takes_instruction:
            raise InvalidSetting("The model takes no $instruction.", param="instruction")
        limit = token_limit(pair.max_tokens, limits.max_tokens)
        own_limit(pair.max_first_tokens)
        own_limit(pair.max_second_tokens)
        # A prompt takes the place of the instruction, as in sentence-transformers.
        asked = (pair.instruction, given.prompt or None, instruction)
        chosen = next((text for text in asked if text is not None), None)
        for text in (pair.first, pair.second, chosen or ""):
            check_text(text)
    except InvalidInput as error:
        return error
    return PairReading(given, pair, pair.first, pair.second, chosen, limit, limits.side(pair.truncate_side))


def cut_texts(shared: SharedTokenizer, readings: Sequence[PairReading]) -> None:
    """Cut queries and documents to their own limits, as texts: what is dropped is never written."""
    some = [reading for reading in readings if reading.pair.max_first_tokens is not None]
    queries = _kept(shared, [(each.query, each.pair.max_first_tokens, each.side) for each in some])
    for reading, query in zip(some, queries, strict=True):
        reading.query = query
    some = [reading for reading in readings if reading.pair.max_second_tokens is not None]
    documents = _kept(shared, [(each.document, each.pair.max_second_tokens, each.side) for each in some])
    for reading, document in zip(some, documents, strict=True):
        reading.document = document


def prepared_pair(reading: PairReading, ids: TokenIds, limits: InputLimits) -> Prepared[TokenSequence]:
    """The sequence that the device reads.

    Raises:
        InvalidInput: It is empty, or has ids that the model does not know.
    """
    limits.check_ids(ids)
    return Prepared(TokenSequence(ids, reading.given.outputs), cost=len(ids), batch_key=reading.given.outputs)


def no_room(tokens: int, limit: int | None) -> InvalidInput:
    """The rejection of a pair of which all but the document is too long already, by its `tokens`."""
    return InvalidInput(
        f"What the model reads beside the document takes {tokens} tokens, which is more than the limit of {limit}. "
        "Please shorten the query or the instruction, or raise the limit.",
        param="input",
    )


def _kept(shared: SharedTokenizer, texts: Sequence[tuple[str, int | None, Side]]) -> list[str]:
    """The part of each text that so many of its tokens stand for, without what is cut off one end."""
    if not texts:
        return []
    wanted = [tokens if side == "right" else None for _, tokens, side in texts]
    encodings = shared.encode([text for text, *_ in texts], wanted, offsets=True)
    return [
        _part(text, kept(encoding.offsets, tokens, side), side)
        for (text, tokens, side), encoding in zip(texts, encodings, strict=True)
    ]


def _part(text: str, offsets: Sequence[tuple[int, int]], side: Side) -> str:
    """What tokens at one end of a text stand for, from or up to that end's character."""
    if side == "right":
        return text[: max((stop for _, stop in offsets), default=0)]
    return text[min((start for start, _ in offsets), default=len(text)) :]
