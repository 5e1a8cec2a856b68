"""Pairs for language models whose authors tokenize each piece by itself: bge-reranker-v2-gemma, mxbai-rerank-v2.

Tokens never span two pieces: a query that ends in a line break keeps it apart from the one that follows. A long query
is cut to a share of the room, a long document to what is left, and what stands behind the document always stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from staged_pool.runtime.model import ModelInput, TokenIds, TokenSequence
from staged_pool.runtime.models.specs.model import PairPieces
from staged_pool.runtime.models.tokenizing.limits import InputLimits, kept
from staged_pool.runtime.models.tokenizing.pending_pairs import (
    PairReading,
    begin_pair,
    cut_texts,
    no_room,
    prepared_pair,
)
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.requests import MODEL_MAX, PairInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared

_QUERY_SHARE: Final = (3, 4)
"""The part of the room that a query may take, in both libraries of authors."""


class PieceReader:
    """FileReads pairs as `PairPieces` says. `read` may run in several threads at once.

    Args:
        shared: The tokenizer.
        limits: The model's.
        pieces: What stands where.
        first_token: Id of the token that begins a sequence. None: the tokenizer has none, or it is its padding.

    Raises:
        ConfigError: The pieces alone leave no room for a pair.
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
                f"the model takes {limits.max_tokens} tokens, and what it reads around a pair takes "
                f"{len(self._before) + len(self._after)} of them"
            )

    def read(self, inputs: Sequence[tuple[ModelInput, PairInput]]) -> list[Prepared[TokenSequence] | InvalidInput]:
        """What the device is to read for each pair, or what is wrong with it."""
        takes = self._pieces.instruction is not None
        begun = [
            begin_pair(given, pair, self._limits, takes_instruction=takes, instruction=None) for given, pair in inputs
        ]
        readings = [reading for reading in begun if isinstance(reading, PairReading)]
        cut_texts(self._shared, readings)
        rooms = [self._room_of(reading) for reading in readings]
        known = [room if reading.side == "right" else None for reading, room in zip(readings, rooms, strict=True)]
        # A query that is ranked against many documents is tokenized once.
        wanted = {self._query(reading): room for reading, room in zip(readings, known, strict=True)}
        queries = dict(zip(wanted, self._encode(list(wanted), list(wanted.values())), strict=True))
        documents = self._encode([self._document(reading) for reading in readings], known)
        outcomes = iter(
            self._finish(reading, queries[self._query(reading)], document, room)
            for reading, document, room in zip(readings, documents, rooms, strict=True)
        )
        return [next(outcomes) if isinstance(reading, PairReading) else reading for reading in begun]

    def _encode(self, texts: Sequence[str], rooms: Sequence[int | None]) -> list[TokenIds]:
        wanted = [None if room is None else max(room, 0) for room in rooms]
        return self._shared.encode_ids(texts, wanted)

    def _query(self, reading: PairReading) -> str:
        written = self._pieces.query.replace("{query}", reading.query)
        if not reading.instruction or self._pieces.instruction is None:
            return written
        return self._pieces.instruction.replace("{instruction}", reading.instruction) + written

    def _document(self, reading: PairReading) -> str:
        return self._pieces.document.replace("{document}", reading.document)

    def _room_of(self, reading: PairReading) -> int | None:
        """Tokens that the authors' `max_length` would be for this pair. None: nothing is cut."""
        if reading.limit is None:
            return None
        whole = self._room(reading.limit)
        return min(self._pieces.max_tokens, whole) if reading.pair.max_tokens == MODEL_MAX else whole

    def _room(self, limit: int) -> int:
        """The `max_length` with which a whole sequence has at most so many tokens; 0 or less where there is none."""
        frame = len(self._before) + len(self._after)
        return limit - frame - (len(self._after) if self._pieces.counts_after else 0)

    def _finish(
        self, reading: PairReading, query: TokenIds, document: TokenIds, room: int | None
    ) -> Prepared[TokenSequence] | InvalidInput:
        try:
            if room is not None:
                # As `only_second` of transformers cuts a pair whose second part is the separator and the document.
                most, of = _QUERY_SHARE
                query = kept(query, max(room, 0) * most // of, reading.side)
                document = kept(document, max(room, 0), reading.side)
                of_pair = room + (len(self._after) if self._pieces.counts_after else 0) - len(self._first)
                left = of_pair - len(query) - len(self._between)
                if left < 1:
                    raise no_room(len(self._before) + len(query) + len(self._between) + len(self._after), reading.limit)
                document = kept(document, left, reading.side)
            ids = [*self._before, *query, *self._between, *document, *self._after]
            if room is None:
                self._limits.check_length(len(ids))
            return prepared_pair(reading, ids, self._limits)
        except InvalidInput as error:
            return error
