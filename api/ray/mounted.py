"""The server of a replica, as Ray Serve mounts it."""

from __future__ import annotations

from staged_pool.api.asgi import Message, Receive, Scope, Send
from staged_pool.api.http.mounted import MountedServer


class MountedOnServe(MountedServer):
    """The server without `X-Request-ID` of its own: Serve adds it, with the same value, to each answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await super().__call__(scope, receive, send_without_id)
