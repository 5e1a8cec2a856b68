"""Pairs of texts with special tokens between them, as in transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.tokenizing.limits import (
    InputLimits,
    check_own_limit,
    check_text,
    token_limit,
    truncated,
)
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer, common_prefix
from staged_pool.runtime.models.tokenizing.special_tokens import PairSpecialTokens
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import PairInput, Side
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import InvalidInput, InvalidSetting
from staged_pool.stages.work import Prepared


@dataclass(slots=True)
class _PendingPair:
    """One pair between the steps of its preparation."""

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
    """Tokenizer of pairs without a template. `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        special: The special tokens around and between two texts.
        limits: The model's limits.
    """

    def __init__(self, shared: SharedTokenizer, special: PairSpecialTokens, limits: InputLimits) -> None:
        self._shared = shared
        self._special = special
        self._limits = limits

    def read(self, inputs: Sequence[tuple[ModelInput, PairInput]]) -> list[Prepared[TokenSequence] | InvalidInput]:
        """Tokenize each pair, or return the error of its request."""
        outcomes = [self._begin(given, pair) for given, pair in inputs]
        entries = [entry for entry in outcomes if isinstance(entry, _PendingPair)]
        self._encode(entries)
        return [self._finish(entry) if isinstance(entry, _PendingPair) else entry for entry in outcomes]

    def _begin(self, given: ModelInput, pair: PairInput) -> _PendingPair | InvalidInput:
        try:
            if pair.instruction is not None:
                raise InvalidSetting("The model takes no $instruction.", param="instruction")
            limit = token_limit(pair.max_tokens, self._limits.max_tokens)
            check_own_limit(pair.max_first_tokens)
            check_own_limit(pair.max_second_tokens)
            # The prompt stands before the first text only, as in sentence-transformers.
            first = given.prompt + pair.first
            check_text(first)
            check_text(pair.second)
        except InvalidInput as error:
            return error
        return _PendingPair(given, pair, limit, first, self._limits.side(pair.truncate_side))

    def _encode(self, entries: Sequence[_PendingPair]) -> None:
        prompts = list({r.given.prompt for r in entries if r.given.prompt and r.pair.max_first_tokens is not None})
        prompt_ids = dict(zip(prompts, self._shared.encode_ids(prompts), strict=True))
        self._encode_texts(entries, prompt_ids, whole=False)
        # If each text alone exceeds the limit, the cut depends on which one is longer.
        both = [r for r in entries if r.limit is not None and min(len(r.first), len(r.second)) > r.limit]
        self._encode_texts(both, prompt_ids, whole=True)

    def _encode_texts(self, entries: Sequence[_PendingPair], prompts: Mapping[str, TokenIds], *, whole: bool) -> None:
        """Tokenize both texts, up to their own limits and (unless `whole`) the pair's limit."""
        # All documents of one query have the same first text, which is tokenized once.
        wanted: dict[str, int | None] = {}
        for entry in entries:
            text, own = entry.written_first, entry.pair.max_first_tokens
            if own is not None:
                own += len(prompts.get(entry.given.prompt, ()))
            tokens, known = _wanted(entry, own, whole=whole), wanted.get(text, 0)
            wanted[text] = None if tokens is None or known is None else max(tokens, known)
        firsts = dict(zip(wanted, self._shared.encode_ids(list(wanted), list(wanted.values())), strict=True))
        for entry in entries:
            entry.first = firsts[entry.written_first]
            if entry.pair.max_first_tokens is not None:
                own = common_prefix(entry.first, prompts.get(entry.given.prompt))
                entry.first = [
                    *entry.first[:own],
                    *truncated(entry.first[own:], entry.pair.max_first_tokens, entry.side),
                ]
        seconds = self._shared.encode_ids(
            [r.pair.second for r in entries], [_wanted(r, r.pair.max_second_tokens, whole=whole) for r in entries]
        )
        for entry, ids in zip(entries, seconds, strict=True):
            entry.second = truncated(ids, entry.pair.max_second_tokens, entry.side)

    def _finish(self, entry: _PendingPair) -> Prepared[TokenSequence] | InvalidInput:
        first, second, limit = entry.first, entry.second, entry.limit
        tokens = len(first) + len(second) + len(self._special)
        try:
            if limit is None:
                if entry.pair.cuts_first_only and tokens > self._limits.max_tokens:  # shorter texts may not help
                    first_only(len(second), max(self._limits.max_tokens - len(self._special), 0))
                self._limits.check_length(tokens)
            elif tokens > limit:
                room = max(limit - len(self._special), 0)
                if entry.pair.cuts_first_only:
                    n_first, n_second = first_only(len(second), room)
                else:
                    n_first, n_second = longest_first(len(first), len(second), room)
                first, second = truncated(first, n_first, entry.side), truncated(second, n_second, entry.side)
            # A limit below the special tokens leaves no text at all, and not even all of them.
            ids = self._special.join(first, second)[:limit]
            self._limits.check_ids(ids)
        except InvalidInput as error:
            return error
        first_tokens = self._special.first_tokens(first)
        if first_tokens is not None:
            first_tokens = min(first_tokens, len(ids))
        sequence = TokenSequence(ids, entry.given.outputs, first_tokens)
        return Prepared(sequence, tokens=len(ids), batch_key=entry.given.outputs)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Divide `room` tokens between two texts; returns the tokens to keep of each.

    The longer text is cut to what the shorter one leaves. If both exceed half of the room, each gets half; the longer
    one (the second, if they are equal) gets the odd token. This is `LongestFirst` of the tokenizers library
    (`utils/truncation.rs`).
    """
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(room - min(first, second), min(first, second))
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


def first_only(second: int, room: int) -> tuple[int, int]:
    """Divide `room` tokens between two texts of which the second is kept whole; returns the tokens to keep of each.

    This is `OnlyFirst` of the tokenizers library (`utils/truncation.rs`).

    Raises:
        InvalidSetting: The second text leaves no token for the first.
    """
    if second >= room:
        raise InvalidSetting(
            f"One of $candidate_labels has at least {second} tokens in its template, and a text with it has room for "
            f"{room}. Please shorten the label, or raise the limit.",
            param="candidate_labels",
        )
    return room - second, second


def _wanted(entry: _PendingPair, own: int | None, *, whole: bool) -> int | None:
    """Count the leading tokens of a text that are needed. None: all.

    Args:
        entry: The text's pair.
        own: The text's own limit, in tokens.
        whole: Ignore the pair's limit. If both texts exceed it, only their full lengths show which one is longer.
    """
    if entry.side == "left":
        return None
    limit = None if entry.limit is None or whole else entry.limit + 1
    return min((tokens for tokens in (own, limit) if tokens is not None), default=None)
