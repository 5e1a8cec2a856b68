"""A replica whose engine breaks when a client asks for it."""

from __future__ import annotations

from staged_pool.api.asgi import Receive, Scope, Send
from staged_pool.ray.deployment import Replica
from staged_pool.ray.mounted import MountedOnServe


class _Breakable(MountedOnServe):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/break":
            await super().__call__(scope, receive, send)
            return
        self.engine._life._break(RuntimeError("a test broke it"))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
        await send({"type": "http.response.body", "body": b"broken"})


class Breakable(Replica):
    """`POST /break` ends the engine, as the failure of a stage does."""

    def __serve_build_asgi_app__(self) -> MountedOnServe:
        return _Breakable(*self._settings.models, server=self._settings.server)
