"""A typed client of the server, for programs that block (`Client`) and for asyncio and trio (`AsyncClient`).

What a call sends, how an answer is read and when a request is sent again is decided by plain functions without input or
output (`calls.py`, `exchange.py`, `retry.py`, `streaming.py`); the two clients only carry bytes and wait.
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
