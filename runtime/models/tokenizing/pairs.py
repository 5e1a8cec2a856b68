"""Turn two texts that the model reads together into one sequence, as the tokenizers of transformers do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from staged_pool.runtime.model import ModelInput, TokenIds, TokenSequence
from staged_pool.runtime.models.tokenizing.limits import InputLimits, check_text, kept, own_limit, token_limit
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer, shared_beginning
from staged_pool.runtime.models.tokenizing.special_tokens import PairSpecialTokens
from staged_pool.runtime.requests import PairInput, Side
from staged_pool.stages.errors import InvalidInput, InvalidSetting
from staged_pool.stages.work import Prepared


@dataclass(slots=True)
class _Reading:
    """One pair on its way."""

    given: ModelInput
    pair: PairInput
    limit: int | None
    written_first: str
    """The first text with its prompt."""
    side: Side
    """The end that is cut off each text."""
    first: TokenIds = field(default_factory=list)
    second: TokenIds = field(default_factory=list)


class PairReader:
    """What `TextTokenizer` does with pairs where no template makes one text of them.

    `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        special: What goes around and between two texts.
        limits: The model's.
    """

    def __init__(self, shared: SharedTokenizer, special: PairSpecialTokens, limits: InputLimits) -> None:
        self._shared = shared
        self._special = special
        self._limits = limits

    def read(self, inputs: Sequence[tuple[ModelInput, PairInput]]) -> list[Prepared[TokenSequence] | InvalidInput]:
        """What the device is to read for each pair, or what is wrong with it."""
        outcomes = [self._begin(given, pair) for given, pair in inputs]
        readings = [reading for reading in outcomes if isinstance(reading, _Reading)]
        self._encode(readings)
        return [self._finish(reading) if isinstance(reading, _Reading) else reading for reading in outcomes]

    def _begin(self, given: ModelInput, pair: PairInput) -> _Reading | InvalidInput:
        try:
            if pair.instruction is not None:
                raise InvalidSetting("The model takes no $instruction.", param="instruction")
            limit = token_limit(pair.max_tokens, self._limits.max_tokens)
            own_limit(pair.max_first_tokens)
            own_limit(pair.max_second_tokens)
            # Before the first text only, as in sentence-transformers.
            first = given.prompt + pair.first
            check_text(first)
            check_text(pair.second)
        except InvalidInput as error:
            return error
        return _Reading(given, pair, limit, first, self._limits.side(pair.truncate_side))

    def _encode(self, readings: Sequence[_Reading]) -> None:
        prompts = list({r.given.prompt for r in readings if r.given.prompt and r.pair.max_first_tokens is not None})
        prompt_ids = dict(zip(prompts, self._shared.encode_ids(prompts), strict=True))
        self._encode_texts(readings, prompt_ids, whole=False)
        # Where each text alone is too long, it matters which of them is the longer one.
        both = [r for r in readings if r.limit is not None and min(len(r.first), len(r.second)) > r.limit]
        self._encode_texts(both, prompt_ids, whole=True)

    def _encode_texts(self, readings: Sequence[_Reading], prompts: Mapping[str, TokenIds], *, whole: bool) -> None:
        """Tokenize both texts, as far as their limits of their own and (unless `whole`) the limit of both look."""
        # Documents that are ranked for one query come with the same first text each.
        wanted: dict[str, int | None] = {}
        for reading in readings:
            text, own = reading.written_first, reading.pair.max_first_tokens
            if own is not None:
                own += len(prompts.get(reading.given.prompt, ()))
            tokens, known = _wanted(reading, own, whole=whole), wanted.get(text, 0)
            wanted[text] = None if tokens is None or known is None else max(tokens, known)
        firsts = dict(zip(wanted, self._shared.encode_ids(list(wanted), list(wanted.values())), strict=True))
        for reading in readings:
            reading.first = firsts[reading.written_first]
            if reading.pair.max_first_tokens is not None:
                own = shared_beginning(reading.first, prompts.get(reading.given.prompt))
                reading.first = [
                    *reading.first[:own],
                    *kept(reading.first[own:], reading.pair.max_first_tokens, reading.side),
                ]
        seconds = self._shared.encode_ids(
            [r.pair.second for r in readings], [_wanted(r, r.pair.max_second_tokens, whole=whole) for r in readings]
        )
        for reading, ids in zip(readings, seconds, strict=True):
            reading.second = kept(ids, reading.pair.max_second_tokens, reading.side)

    def _finish(self, reading: _Reading) -> Prepared[TokenSequence] | InvalidInput:
        first, second, limit = reading.first, reading.second, reading.limit
        tokens = len(first) + len(second) + len(self._special)
        try:
            if limit is None:
                self._limits.check_length(tokens)
            elif tokens > limit:
                room = max(limit - len(self._special), 0)
                n_first, n_second = longest_first(len(first), len(second), room)
                first, second = kept(first, n_first, reading.side), kept(second, n_second, reading.side)
            # A limit below the special tokens leaves no text at all, and not even all of them.
            ids = self._special.join(first, second)[:limit]
            self._limits.check_ids(ids)
        except InvalidInput as error:
            return error
        first_tokens = self._special.first_tokens(first)
        if first_tokens is not None:
            first_tokens = min(first_tokens, len(ids))
        sequence = TokenSequence(ids, reading.given.outputs, first_tokens)
        return Prepared(sequence, cost=len(ids), batch_key=reading.given.outputs)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens are left of two texts of so many when both together may have `room`.

    The longer text is cut to what the other one leaves; where both are longer than half of the room, each gets half of
    it, and the longer one (the second, if they are equal) the odd token. This is `LongestFirst` of the tokenizers
    library (`utils/truncation.rs`).
    """
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(room - min(first, second), min(first, second))
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


def _wanted(reading: _Reading, own: int | None, *, whole: bool) -> int | None:
    """How many leading tokens of a text have to be known; None for all.

    Args:
        reading: The pair that it is of.
        own: To how many the text is cut by itself.
        whole: Whether the limit of both texts does not bound it: which of them is longer is not known from a beginning
            where both go beyond that.
    """
    if reading.side == "left":
        return None
    limit = None if reading.limit is None or whole else reading.limit + 1
    return min((tokens for tokens in (own, limit) if tokens is not None), default=None)
