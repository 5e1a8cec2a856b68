"""The words in which clients of a path are told of a problem, where those of OpenAI and vLLM are not theirs."""

from __future__ import annotations

import orjson

from staged_pool.api.status import Problem


def plain_error(problem: Problem) -> tuple[int, bytes]:
    """The status and the body for Ollama's and Weaviate's clients: `error` is a text."""
    return problem.status, orjson.dumps({"error": problem.message})


def shared_error(problem: Problem) -> tuple[int, bytes]:
    """The same for a path that several dialects share: the object that OpenAI's clients read, and Voyage's `detail`."""
    body = problem.body()
    return problem.status, body[:-1] + b',"detail":' + orjson.dumps(problem.message) + b"}"


def nim_error(problem: Problem) -> tuple[int, bytes]:
    """The same for NIM's clients, which read `message` and `detail`."""
    told = {"object": "error", "message": problem.message, "detail": problem.message, "type": problem.row.type}
    return problem.status, orjson.dumps(told)
