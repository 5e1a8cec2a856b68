"""Requests of plugins: data for `/pooling`, and the routes of plugins below `/plugins/NAME/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

from staged_pool.api.app.call import PLUGINS, Answer, Call
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.asgi import App, Headers, Message, Scope, Send
from staged_pool.api.wire.dialects import plugin
from staged_pool.api.wire.dialects.plugin import PluginChoice
from staged_pool.api.wire.exchange import Body
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import user_code

_NO_PLUGIN: Final = (
    "data: no plugin is served. Start the server with --plugin NAME, or send the fields of another task: `input` or "
    "`messages`"
)


class _RouteCall:
    """One HTTP request to a route of a plugin, and the memory of its results.

    Args:
        call: The request.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self._unsent: list[AnswerMemory] = []
        """Memory of the results that the route has got, and not yet sent."""

    @contextmanager
    def result(self) -> Iterator[AnswerMemory]:
        """Hold memory of one result until a piece of the answer is sent.

        At the latest, the end of the request releases it. A task that the route has left behind may ask even then:
        its result is held by the block alone.
        """
        answer = self.call.answer
        memory = answer.another()
        try:
            yield memory
        except BaseException:
            answer.drop(memory)
            raise
        if answer.is_over:
            memory.give_back()
        else:
            self._unsent.append(memory)

    async def send(self, send: Send, message: Message) -> None:
        """Send a message, and release the results that were there for it."""
        sent, self._unsent = (self._unsent, []) if message.get("body") else ([], self._unsent)
        await send(message)
        for memory in sent:
            self.call.answer.drop(memory)


_CALL: Final[ContextVar[_RouteCall | None]] = ContextVar("plugin_call", default=None)
"""The request that a route of a plugin answers. A task that the route has left behind keeps it."""

log = get_logger("staged_pool.api")


class PluginRoutes:
    """Answers requests with data for a plugin, and finds the routes of plugins.

    Args:
        registry: The engines.
    """

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry
        self._apps: dict[str, tuple[Engine, App | None]] = {}

    def engine_for(self, choice: PluginChoice, placed: str | None) -> Engine:
        """Return the engine of the plugin that a request means.

        Args:
            choice: The fields of the body.
            placed: Name of a model or a plugin in the path. None: the path has none.

        Raises:
            InvalidInput: No plugin is served, or it is not clear which one is meant.
            UnknownModel: The model is not served.
            EngineStopped: The engine takes no requests.
        """
        plugins = self._plugins()
        if not plugins:
            raise InvalidInput(_NO_PLUGIN, param="data")
        name = choice.plugin
        if name is None and (named := placed or choice.model) and named not in plugins:
            plugins = self._registry.enter(named).plugins or plugins
        elif name is None:
            name = placed or choice.model or None
        if name is None and len(plugins) == 1:
            (name,) = plugins
        if name not in plugins:
            what = "several plugins are served" if name is None else "there is no plugin of this name"
            raise InvalidInput(f"plugin: {what}; name one of {', '.join(plugins)}", param="plugin")
        return self._registry.enter(name)

    async def answer(self, call: Call, choice: PluginChoice, body: Body) -> Answer:
        """Take the data of a body through the hooks of its plugin."""
        engine = self.engine_for(choice, call.named_model)
        call.enters(engine.card.name)
        request_id = f"pooling-{call.own_request_id or choice.request_id or call.request_id}"
        content = await engine.submit_data(
            partial(plugin.read_data, body),
            partial(
                plugin.encode_output,
                plugin=engine.card.name,
                request_id=request_id,
                most_bytes=self._registry.answers.most_bytes,
            ),
            body_bytes=len(body),
            timeout_s=call.timeout_s(),
            timeline=call.timeline,
            priority=call.priority(),
            tenant=call.tenant,
            answer=call.answer,
        )
        return Answer(content)

    def _plugins(self) -> Mapping[str, Engine]:
        return {engine.card.name: engine for engine in self._registry.engines if engine.card.is_plugin}

    def app_for(self, path: str) -> tuple[App, str] | None:
        """Return the application of a plugin for a path, and its root path; None if there is none.

        The application is made at its first request.
        """
        if not path.startswith(PLUGINS):
            return None
        name = unquote(path.removeprefix(PLUGINS).split("/", 1)[0])
        engine = self._plugins().get(name)
        if engine is None:
            return None
        if self._apps.get(name, (None, None))[0] is not engine:
            self._apps[name] = engine, engine.plugin_app(partial(self._process, engine))
        app = self._apps[name][1]
        return None if app is None else (app, f"{PLUGINS}{name}")

    async def _process(self, engine: Engine, data: object) -> Any:
        """Take data through the hooks, as the HTTP request asks by its headers and key."""
        answered = _CALL.get()
        if answered is None:
            return await engine.process(data, plugin=engine.card.name)
        call = answered.call
        with answered.result() as memory:
            return await engine.submit_data(
                lambda: data,
                lambda output: output,
                timeout_s=call.timeout_s(),
                priority=call.priority(),
                tenant=call.tenant,
                answer=memory,
            )


class Forwarding:
    """Handler that passes one request on to the application of a plugin.

    Args:
        app: The application.
        root_path: Prefix of its routes.
        send: ASGI's `send` of the request.
        headers: Returns further headers of the answer, from the id of the request.
    """

    def __init__(self, app: App, root_path: str, send: Send, headers: Callable[[str], Headers]) -> None:
        self._app = app
        self._root_path = root_path
        self._send = send
        self._headers = headers
        self._status: int | None = None
        self._sent_bytes = 0

    async def __call__(self, call: Call) -> Answer:
        """Let the application answer, and return the outcome for the log."""
        call.timeout_s()  # these two raise for invalid headers
        call.priority()
        call.route = f"{self._root_path}/"
        scope: Scope = {**call.scope, "path": unquote(call.scope["path"]), "root_path": self._root_path}
        word = None
        answered = _RouteCall(call)
        token = _CALL.set(answered)
        try:
            async with user_code(is_own_task=False):
                await self._app(scope, call.receive, partial(self._sent, answered))
        except Exception:
            if self._status is None:
                raise  # the error is answered like any other
            log.exception("plugin.route_failed", path=call.scope["path"], request_id=call.request_id)
            word = "plugin_failed"
        finally:
            _CALL.reset(token)
        if self._status is None:
            raise RuntimeError(f"the application of {self._root_path} sent no answer")
        return Answer(status=self._status, word=word, sent_bytes=self._sent_bytes)

    async def _sent(self, answered: _RouteCall, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self._headers(answered.call.request_id)]}
        self._sent_bytes += len(message.get("body", b""))
        await answered.send(self._send, message)
