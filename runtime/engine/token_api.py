"""The token API of an engine: tokenize and detokenize, in preprocess threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from staged_pool.runtime import arguments
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.request_planner import check_images
from staged_pool.runtime.model import Preparer
from staged_pool.runtime.requests import Chat, content_bytes
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import InvalidInput, TooLarge

A = TypeVar("A")
R = TypeVar("R")


class TokenApi(ABC):
    """Methods of an engine that turn texts into tokens and back. No stage takes part in them."""

    _config: EngineConfig
    _model: Preparer

    @abstractmethod
    async def _run_preprocess(self, call: Callable[[A], R], argument: A, body_bytes: int, lane: Lane) -> R:
        """Run a call of no task in a preprocess thread of a lane."""

    async def tokenize(self, source: str | Chat, *, add_special_tokens: bool = True) -> Tokens:
        """Tokenize a text or a conversation, under the preprocess limit of its lane.

        An image token is repeated once for each vector of its image.

        Raises:
            InvalidInput: It cannot be tokenized, or holds the URL of an image: nothing is fetched for this.
            Unsupported: The model makes no tokens of texts, or of images.
            Overloaded, EngineStopped: As for `Engine.submit`.
        """
        arguments.source("source", source)
        tokenize = partial(self._model.tokenize, add_special_tokens=add_special_tokens)
        images = source.images if isinstance(source, Chat) else ()
        if any(isinstance(image.source, str) for image in images):
            message = "Images are not fetched to count their tokens. Send the file itself, as a data URL."
            raise InvalidInput(message, param="messages")
        check_images(len(images), self._config.max_request_items)
        return await self._run_preprocess(tokenize, source, content_bytes(source), "image" if images else "text")

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, under the preprocess limit. Special tokens stay unless they are skipped.

        Raises:
            InvalidInput: They are no ids, or one is not in the model's vocabulary.
            TooLarge: There are more ids than the engine holds at once, and than the model reads.
            Overloaded, EngineStopped: As for `Engine.submit`.
        """
        arguments.token_ids("tokens", ids)
        if len(ids) > (most := max(self._config.waiting_tokens, self._model.card.max_tokens)):
            message = f"There are {len(ids)} token ids; at most {most} become one text."
            raise TooLarge(message, param="tokens")
        detokenize = partial(self._detokenize, skip_special_tokens=skip_special_tokens)
        return await self._run_preprocess(detokenize, ids, len(ids), "text")

    def _detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self._model.card.vocabulary:
                raise InvalidInput(f"Token id {token} is out of vocabulary", param="tokens")
        return self._model.detokenize(ids, skip_special_tokens=skip_special_tokens)
