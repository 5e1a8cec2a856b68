"""A client of files and batches, for the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import httpx

ENDED = ("completed", "failed", "expired", "cancelled")


def request(custom_id: str, body: object, **fields: object) -> bytes:
    """Make one line of a batch."""
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}
    return json.dumps(line | fields).encode()


def requests(count: int) -> bytes:
    """Make the file of a batch: one text a request, each with a text of its own."""
    return b"\n".join(request(f"r{number}", {"input": f"text {number}"}) for number in range(count)) + b"\n"


class Asking:
    """Requests of one client about files and batches.

    Args:
        client: Sends them.
        headers: Headers of all requests, such as a key.
    """

    def __init__(self, client: httpx.AsyncClient, headers: Mapping[str, str] | None = None) -> None:
        self._client = client
        self._headers = headers or {}

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send any request."""
        return await self._client.request(method, path, headers=self._headers, **more)

    async def get(self, path: str) -> Any:
        """Return the JSON of a path."""
        return (await self.send("GET", path)).raise_for_status().json()

    async def post(self, path: str, body: object = None) -> Any:
        """Return the JSON of the answer to a body."""
        return (await self.send("POST", path, json=body)).raise_for_status().json()

    async def upload(self, content: bytes, name: str = "lines.jsonl", **fields: str) -> Any:
        """Upload a file; return the object of it."""
        data = {"purpose": "batch"} | fields
        answer = await self.send("POST", "/v1/files", files={"file": (name, content)}, data=data)
        return answer.raise_for_status().json()

    async def create(self, content: bytes, **fields: object) -> Any:
        """Upload a file, and make a batch of it; return the object of the batch."""
        file = await self.upload(content)
        body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        return await self.post("/v1/batches", body | fields)

    async def content(self, file_id: str | None) -> Sequence[Any]:
        """Return the lines of a file."""
        if file_id is None:
            return []
        answer = (await self.send("GET", f"/v1/files/{file_id}/content")).raise_for_status()
        return [json.loads(line) for line in answer.content.splitlines()]

    async def until(self, batch_id: str, found: Callable[[Any], bool]) -> Any:
        """Ask for a batch until it is as wanted; return it."""
        with anyio.fail_after(60):
            while True:
                batch = await self.get(f"/v1/batches/{batch_id}")
                if found(batch):
                    return batch
                await anyio.sleep(0.03)

    async def ended(self, batch_id: str) -> Any:
        """Wait until a batch has ended; return it."""
        return await self.until(batch_id, lambda batch: batch["status"] in ENDED)
