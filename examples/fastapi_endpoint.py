"""A FastAPI service with an engine in its lifespan.

It has an endpoint of its own, and the server's routes below `/pool`.

Run it with `uvicorn fastapi_endpoint:app`. `MODEL` is a folder or a hub id.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import staged_pool
from staged_pool import asgi

pool = asgi.app(staged_pool.EngineConfig(model=os.environ.get("MODEL")))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with pool.running():  # loads the model; at the end it finishes requests in flight
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/pool", pool)


class Question(BaseModel):
    query: str
    documents: list[str]


class Best(BaseModel):
    document: str
    score: float


@app.post("/best")
async def best(question: Question) -> Best:
    """Return the document that answers the query best."""
    try:
        result = await pool.engine.rerank(question.query, question.documents, top_n=1, timeout_s=10)
    except staged_pool.InvalidInput as error:  # the message names the input
        raise HTTPException(400, str(error)) from error
    except staged_pool.Overloaded as error:
        raise HTTPException(429, str(error), {"retry-after": f"{error.retry_after_s:.0f}"}) from error
    (first,) = result.ranking
    return Best(document=question.documents[first.index], score=first.score)
