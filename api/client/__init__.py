"""Typed clients of the server: `Client` for blocking programs, `AsyncClient` for asyncio and trio.

Pure functions decide what a call sends (`embedding_calls.py`, `scoring_calls.py`, `server_calls.py`), how an answer is
read (`reading.py`, `streaming.py`) and when a request is retried (`exchange.py`, `retry.py`). The two clients only send
bytes and wait.
"""

if __name__ != "staged_pool.client":
    raise ImportError("import staged_pool.client, not " + __name__)

from staged_pool.client.asynchronous import AsyncClient, AsyncEmbeddingStream
from staged_pool.client.blocking import Client, EmbeddingStream
from staged_pool.client.errors import BadAnswer, ClientError, ConnectionFailed, ServerFailed, Unauthorized
from staged_pool.client.results import EntitiesResult, Readiness, ServedModel, TokensResult
from staged_pool.client.retry import RetryPolicy

__all__ = [
    "AsyncClient",
    "AsyncEmbeddingStream",
    "BadAnswer",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "EmbeddingStream",
    "EntitiesResult",
    "Readiness",
    "RetryPolicy",
    "ServedModel",
    "ServerFailed",
    "TokensResult",
    "Unauthorized",
]
