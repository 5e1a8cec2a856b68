"""Requests to a real server, and checks that every answer must pass."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np


def answer(client: httpx.Client, path: str, **body: Any) -> Any:
    """Return the answer to a request that must succeed."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def rejection(client: httpx.Client, path: str, status: int, **body: Any) -> Any:
    """Return the error of a request that must fail. Nothing of the machine may stand in it."""
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    assert not any(leak in response.text for leak in ("Traceback", "/tmp", ".py", "0x"))
    return response.json()


def openai_vectors(client: httpx.Client, texts: Any, **fields: Any) -> Any:
    """Return what OpenAI's route answers: [texts, width], float32."""
    got = answer(client, "/v1/embeddings", input=texts, **fields)
    return np.array([row["embedding"] for row in got["data"]], np.float32)
