"""Error formats of the dialects, and their routes about served models and health."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from staged_pool.api.app.call import Answer, Call, ErrorFormat, Handler
from staged_pool.api.app.engine_registry import RETRY_AFTER_S, EngineRegistry
from staged_pool.api.status import Problem
from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.dialects import ollama, weaviate
from staged_pool.api.wire.dialects.tei_tokens import tei_error
from staged_pool.api.wire.errors import cohere_error, nim_error, plain_error, shared_error
from staged_pool.stages.errors import TooLarge, Unsupported

TEI_PATHS: Final = frozenset({
    "/", "/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/info",
})  # fmt: skip
"""Paths of text-embeddings-inference alone, with its error format."""

OLLAMA_PATHS: Final = frozenset({"/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show", "/api/version"})
WEAVIATE_PATHS: Final = frozenset({"/vectors", "/vectors/", "/vectorize", "/meta"})
COHERE_PATHS: Final = frozenset({"/v1/embed", "/v2/embed", "/v2/rerank"})
SHARED_PATHS: Final = frozenset({"/v1/embeddings", "/embeddings", "/v1/rerank", "/v1/multimodalembeddings"})
"""Paths that several dialects share: an error has the fields of each, since the dialect is known only from the body."""

ERROR_FORMATS: Final[Mapping[str, ErrorFormat]] = {
    **dict.fromkeys(TEI_PATHS, tei_error),
    **dict.fromkeys(OLLAMA_PATHS | WEAVIATE_PATHS, plain_error),
    **dict.fromkeys(COHERE_PATHS, cohere_error),
    **dict.fromkeys(SHARED_PATHS, shared_error),
    "/v1/ranking": nim_error,
}
"""Error formats by path; every other path has OpenAI's format."""


def error_format_of(path: str) -> ErrorFormat:
    """Return the error format of a path, which need not exist."""
    return ERROR_FORMATS.get(path, plain_error if path.startswith("/api/") else Problem.answer)


class Listings:
    """Handlers of a dialect's routes about served models and health.

    Args:
        registry: The engines.
    """

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry
        self._started = time.time()

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            "/api/tags": {"GET": self._tags},
            "/api/ps": {"GET": self._running},
            "/api/show": {"POST": self._show},
            "/api/version": {"GET": _version},
            "/meta": {"GET": self._meta},
            "/.well-known/live": {"GET": _live},
            "/.well-known/ready": {"GET": self._ready},
            "/v1/health/live": {"GET": _nim_live},
            "/v1/health/ready": {"GET": self._nim_ready},
            "/embeddings_audio": {"POST": _no_audio},
        }

    async def _tags(self, call: Call) -> Answer:
        cards = [engine.card for engine in self._registry.listed(call.named_model)]
        return Answer(ollama.encode_tags(cards, started=self._started))

    async def _running(self, call: Call) -> Answer:
        return Answer(ollama.encode_running([engine.card for engine in self._registry.listed(call.named_model)]))

    async def _show(self, call: Call) -> Answer:
        cards = [engine.card for engine in self._registry.listed(call.named_model)]
        body = await call.json_body(any_type=True)
        if len(body) > NAME_BYTES:
            raise TooLarge(f"The body has {len(body)} bytes; a body that names a model may have {NAME_BYTES}")
        return Answer(ollama.encode_show(body, cards, started=self._started))

    async def _meta(self, call: Call) -> Answer:
        return Answer(weaviate.encode_meta(self._registry.enter(call.named_model).card))

    async def _ready(self, call: Call) -> Answer:
        return self._not_ready(call) or NO_CONTENT

    async def _nim_ready(self, call: Call) -> Answer:
        return self._not_ready(call) or Answer(_health("Service is ready."))

    def _not_ready(self, call: Call) -> Answer | None:
        if not (reason := self._registry.unready(call.named_model)):
            return None
        retry = [(b"retry-after", str(int(RETRY_AFTER_S)).encode())]
        return Answer(_health(f"Service is not ready: {reason}."), 503, headers=retry)


NO_CONTENT: Final = Answer(status=204)

NAME_BYTES: Final = 2**16
"""Maximum bytes of a body that names a model; it is decoded on the event loop."""


def _health(message: str) -> bytes:
    return dump({"object": "health-response", "message": message})


async def _live(call: Call) -> Answer:
    return NO_CONTENT


async def _nim_live(call: Call) -> Answer:
    return Answer(_health("Service is live."))


async def _version(call: Call) -> Answer:
    return Answer(dump({"version": ollama.API_VERSION}))


async def _no_audio(call: Call) -> Answer:
    raise Unsupported("No model here reads audio; /embeddings takes texts, and /embeddings_image images")
