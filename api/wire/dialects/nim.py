"""NVIDIA NIM's `/v1/ranking`, and the answers of its health routes."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from staged_pool.api.wire.body_fields import read_body
from staged_pool.api.wire.chunked_json import Pieces, dump_around
from staged_pool.api.wire.exchange import Body, Write
from staged_pool.api.wire.field_errors import field_error
from staged_pool.api.wire.field_names import InputPaths, QueryDocumentPaths
from staged_pool.api.wire.fields import Limit, RequestFields
from staged_pool.api.wire.images import read_image, with_options
from staged_pool.api.wire.parts import document
from staged_pool.api.wire.truncation import TruncatePassages
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import MODEL_MAX, Content, Image, ScoreRequest
from staged_pool.runtime.results import ScoreResult
from staged_pool.runtime.tasks.score import rank
from staged_pool.stages.errors import NoInputs, Words


class Passage(msgspec.Struct):
    """Text, image, or both."""

    text: str | None = None
    image: Any = None
    """A URL, a data URL, or the image in base64."""

    def read(self, where: str, index: int | None) -> Content:
        """Return the text, the image, or both as one document.

        Raises:
            InvalidInput: There is neither.
        """
        parts: list[str | Image] = [self.text] if self.text or (self.text is not None and self.image is None) else []
        if self.image is not None:
            if not isinstance(self.image, str):
                raise field_error(f"{where}.image", "expected a text", index)
            parts.append(read_image(self.image, f"{where}.image", index, bare=True))
        if not parts:
            raise field_error(f"{where}.text", "this field is required", index)
        return document(parts)


class RankingBody(RequestFields, kw_only=True):
    """Body of `/v1/ranking`; fields that are not named here are ignored."""

    query: Passage
    passages: list[Passage]
    truncate: TruncatePassages | None = None
    """END truncates passages that are too long; NONE, the default, rejects them."""
    top_k: Limit | None = None


_BODY: Final = msgspec.json.Decoder(RankingBody)


def read_ranking(body: Body, card: ModelCard) -> tuple[ScoreRequest, Write]:
    """See `Read`."""
    fields = read_body(_BODY, body)
    if not fields.passages:
        raise NoInputs("`passages` is empty; give at least one", param="passages")
    query = fields.query.read("query", None)
    if not query:
        raise field_error("query.text", "the query is empty; expected a text")
    options = fields.media_options()
    passages = [passage.read(f"passages[{index}]", index) for index, passage in enumerate(fields.passages)]
    request = ScoreRequest(
        queries=(with_options(query, options),),
        documents=tuple(with_options(passage, options) for passage in passages),
        names=("query", "passages"),
        words=Words(
            {"input": "passages", "max_tokens": "truncate"},
            QueryDocumentPaths(InputPaths("query", several=False), InputPaths("passages")),
        ),
        model=fields.model,
        cache_salt=fields.cache_salt,
        activate=False,
        max_tokens=MODEL_MAX if fields.truncate == TruncatePassages.END else None,
    )
    return request, partial(encode_ranking, top_k=fields.top_k)


def encode_ranking(result: ScoreResult, /, top_k: int | None, *, request_id: str, created: int) -> Pieces:
    """Write the indexes of the passages and their logits, the best first; see `Write`.

    Args:
        result: Scores of the passages.
        top_k: Number of entries. 0 and None: all.
        request_id: See `Write`.
        created: See `Write`.
    """
    ranking = rank(result, top_k).ranking
    entries = ({"index": ranked.index, "logit": np.float32(ranked.score)} for ranked in ranking)
    tokens = result.usage.prompt_tokens
    usage = {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return dump_around({"model": result.model}, "rankings", entries, usage, item_values=8)
