"""The words in which clients of a path are told of a problem, where those of OpenAI and vLLM are not theirs."""

from __future__ import annotations

import orjson

from staged_pool.api.status import Problem


def plain_error(problem: Problem) -> tuple[int, bytes]:
    """The status and the body for Ollama's and Weaviate's clients: `error` is a text."""
    return problem.status, orjson.dumps({"error": problem.message})


def cohere_error(problem: Problem) -> tuple[int, bytes]:
    """The same for Cohere's clients, which read `message`."""
    return problem.status, orjson.dumps({**problem.fields(), "message": problem.message})


def shared_error(problem: Problem) -> tuple[int, bytes]:
    """The same for a path that several dialects share: the object that OpenAI's clients read, Cohere's `message`, and
    Voyage's `detail`."""
    detail = {"detail": problem.message, **problem.fields()}
    return problem.status, orjson.dumps({**detail, "message": problem.message})


def nim_error(problem: Problem) -> tuple[int, bytes]:
    """The same for NIM's clients, which read `message` and `detail`."""
    told = {"object": "error", "message": problem.message, "detail": problem.message, "type": problem.row.type}
    return problem.status, orjson.dumps(told)
