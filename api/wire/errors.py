"""Error bodies of dialects whose clients do not read OpenAI's error object."""

from __future__ import annotations

import orjson

from staged_pool.api.status import Problem


def plain_error(problem: Problem) -> tuple[int, bytes]:
    """Return the status and the body for Ollama's and Weaviate's clients: `error` is a text."""
    return problem.status, orjson.dumps({"error": problem.message})


def cohere_error(problem: Problem) -> tuple[int, bytes]:
    """Return the status and the body for Cohere's clients, which read `message`."""
    return problem.status, orjson.dumps({**problem.fields(), "message": problem.message})


def shared_error(problem: Problem) -> tuple[int, bytes]:
    """Return the status and the body for a path that several dialects share.

    The body has the object that OpenAI's clients read, Cohere's `message` and Voyage's `detail`.
    """
    detail = {"detail": problem.message, **problem.fields()}
    return problem.status, orjson.dumps({**detail, "message": problem.message})


def nim_error(problem: Problem) -> tuple[int, bytes]:
    """Return the status and the body for NIM's clients, which read `message` and `detail`."""
    body = {"object": "error", "message": problem.message, "detail": problem.message, "type": problem.kind.type}
    return problem.status, orjson.dumps(body)
