"""Pairs whose pieces are tokenized one by one, for bge-reranker-v2-gemma and mxbai-rerank-v2.

Tokens never span two pieces: a line break at the end of a query does not merge with the one after it. A long query is
cut to a share of the limit and a long document to the rest. The pieces after the document are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.specs.pair_forms import PairPieces
from staged_pool.runtime.models.tokenizing.limits import InputLimits, truncated
from staged_pool.runtime.models.tokenizing.pending_pairs import (
    PendingPair,
    begin_pair,
    no_room_error,
    prepared_pair,
    truncate_texts,
)
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import MODEL_MAX, PairInput
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared

_QUERY_SHARE: Final = (3, 4)
"""A query's largest share of the limit (numerator, denominator), as in both authors' libraries."""


class PieceReader:
    """Tokenizer of pairs by `PairPieces`. `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        limits: The model's limits.
        pieces: The pieces of the prompt.
        first_token: Id of `bos_token`. None: the tokenizer has none, or it is the padding token.

    Raises:
        ConfigError: The pieces leave no room for a pair.
    """

    def __init__(
        self, shared: SharedTokenizer, limits: InputLimits, *, pieces: PairPieces, first_token: int | None
    ) -> None:
        self._shared = shared
        self._limits = limits
        self._pieces = pieces
        self._first: TokenIds = [first_token] if pieces.starts_with_bos and first_token is not None else []
        self._before: TokenIds = [*self._first, *(shared.ids(pieces.before) if pieces.before else [])]
        self._between = shared.ids(pieces.between)
        self._after: TokenIds = [token for piece in pieces.after for token in shared.ids(piece)]
        if self._room(limits.max_tokens) < 4:
            raise ConfigError(
                f"the model takes {limits.max_tokens} tokens, but its prompt around a pair has "
                f"{len(self._before) + len(self._after)}"
            )

    def read(self, inputs: Sequence[tuple[ModelInput, PairInput]]) -> list[Prepared[TokenSequence] | InvalidInput]:
        """Tokenize each pair, or return the error of its request."""
        takes = self._pieces.instruction is not None
        begun = [
            begin_pair(given, pair, self._limits, takes_instruction=takes, instruction=None) for given, pair in inputs
        ]
        entries = [entry for entry in begun if isinstance(entry, PendingPair)]
        truncate_texts(self._shared, entries)
        rooms = [self._room_of(entry) for entry in entries]
        known = [room if entry.side == "right" else None for entry, room in zip(entries, rooms, strict=True)]
        # A query with many documents is tokenized only once.
        wanted = {self._query(entry): room for entry, room in zip(entries, known, strict=True)}
        queries = dict(zip(wanted, self._encode(list(wanted), list(wanted.values())), strict=True))
        documents = self._encode([self._document(entry) for entry in entries], known)
        outcomes = iter(
            self._finish(entry, queries[self._query(entry)], document, room)
            for entry, document, room in zip(entries, documents, rooms, strict=True)
        )
        return [next(outcomes) if isinstance(entry, PendingPair) else entry for entry in begun]

    def _encode(self, texts: Sequence[str], rooms: Sequence[int | None]) -> list[TokenIds]:
        wanted = [None if room is None else max(room, 0) for room in rooms]
        return self._shared.encode_ids(texts, wanted)

    def _query(self, entry: PendingPair) -> str:
        written = self._pieces.query.replace("{query}", entry.query)
        if not entry.instruction or self._pieces.instruction is None:
            return written
        return self._pieces.instruction.replace("{instruction}", entry.instruction) + written

    def _document(self, entry: PendingPair) -> str:
        return self._pieces.document.replace("{document}", entry.document)

    def _room_of(self, entry: PendingPair) -> int | None:
        """Compute the authors' `max_length` for this pair, in tokens. None: do not cut."""
        if entry.limit is None:
            return None
        whole = self._room(entry.limit)
        return min(self._pieces.max_tokens, whole) if entry.pair.max_tokens == MODEL_MAX else whole

    def _room(self, limit: int) -> int:
        """Compute the `max_length` for a whole sequence of `limit` tokens; at most 0 if the prompt does not fit."""
        frame = len(self._before) + len(self._after)
        return limit - frame - (len(self._after) if self._pieces.counts_after else 0)

    def _finish(
        self, entry: PendingPair, query: TokenIds, document: TokenIds, room: int | None
    ) -> Prepared[TokenSequence] | InvalidInput:
        try:
            if room is not None:
                # Same result as `only_second` of transformers with separator and document as the second text.
                share, whole = _QUERY_SHARE
                query = truncated(query, max(room, 0) * share // whole, entry.side)
                document = truncated(document, max(room, 0), entry.side)
                of_pair = room + (len(self._after) if self._pieces.counts_after else 0) - len(self._first)
                left = of_pair - len(query) - len(self._between)
                if left < 1:
                    pieces = (self._before, query, self._between, self._after)
                    raise no_room_error(sum(map(len, pieces)), entry.limit)
                document = truncated(document, left, entry.side)
            ids = [*self._before, *query, *self._between, *document, *self._after]
            if room is None:
                self._limits.check_length(len(ids))
            return prepared_pair(entry, ids, self._limits)
        except InvalidInput as error:
            return error
