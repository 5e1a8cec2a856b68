"""The interface of a plugin: its hooks, its setup, and the context of one request."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Awaitable, Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import Abandoned, ConfigError, StagedPoolError
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.user_code import as_text, user_code

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Isolation: TypeAlias = Literal["thread", "process"]

Message: TypeAlias = MutableMapping[str, Any]
AsgiApp: TypeAlias = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
"""An ASGI application, such as one of Starlette or FastAPI."""

Process: TypeAlias = Callable[[object], Awaitable[object]]
"""Takes the data of one request through all hooks, and returns the output."""

Fetch: TypeAlias = Callable[[str], Awaitable[bytes]]
"""Fetches a URL under the server's rules: `--allow-media-domain`, `--allow-media-path`, its limits of size and time."""


class PluginContext:
    """One request on its way through the hooks of a plugin. No other request sees it.

    It is released when the request ends in any way, after the hook that runs at that moment.
    """

    __slots__ = ("_clock", "_ticket", "hook", "id", "state")

    def __init__(self, id: str, ticket: Ticket | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.id = id
        """Unique id of the request, made by the engine and never by a client."""
        self.state: Any = None
        """Free for the plugin. None before the first hook, and again at the end."""
        self.hook = ""
        """Name of the hook that runs, or that ran last."""
        self._ticket = ticket
        self._clock = clock

    def check(self) -> None:
        """Raise if nobody waits for the request any more. Call it in a thread that works for long.

        In a process of its own (`isolation`) it does nothing: such a hook is ended from outside.

        Raises:
            Abandoned: The caller has left, or the deadline has passed.
        """
        if self._ticket is not None and self._ticket.settled:
            raise Abandoned("the caller has left")

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the request; infinite without one, and in a process of its own."""
        return math.inf if self._ticket is None else self._ticket.deadline - self._clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSetup:
    """Facts about the engine, for the constructor of a plugin."""

    config: EngineConfig
    """Settings of the engine."""
    card: ModelCard | None
    """Description of the served model; None if the plugin is served without one."""
    fetch: Fetch
    """Fetches a URL under the server's rules. Use it for URLs that requests name."""
    folder: str | None = None
    """Folder of the served model on this machine; None without one."""

    @property
    def device(self) -> str:
        """Device for the plugin's own weights: that of the model, else of `--device`, such as `cpu` or `cuda:0`.

        If that is `auto` and there is no model, it imports torch to look for a GPU.
        """
        if self.card is not None:
            return self.card.device.split(",")[0]
        if self.config.device != "auto":
            return self.config.device.split(",")[0]
        import torch

        return "cuda:0" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Model inputs with the outputs that they need of the served model. `preprocess` may return it."""

    inputs: Sequence[Any]
    outputs: Sequence[str] = ()
    """Such as `dense`. Empty: the first output of the model."""


class Processor:
    """Base class of plugins: the hooks that a request passes, in this order.

    `preprocess` must be overridden, and the others may be. A hook takes the result of the one before and the
    `PluginContext`, which it may leave out. It is a plain function or a coroutine function:

    - A coroutine function is awaited in its stage, `--media-limit` of them at once. It must not block the event loop.
    - A plain function runs in a thread, `--preprocess-limit` of them at once. With `isolation = "process"` it runs in a
      process of its own, for pure Python code that would hold the interpreter's lock. The plugin is pickled for it.

    An error that is no `StagedPoolError` is logged, and the caller gets `PluginFailed`. Raise `InvalidInput` for data
    that is wrong: the caller gets its message.

    `cls(setup)` makes the plugin of an entry point, or `cls()` if the constructor takes no argument.
    """

    name: str = ""
    """Name of the plugin in requests. Empty: that of its entry point, else of its class."""
    isolation: Isolation | None = None
    """Place of plain hooks: threads of this process, or processes of their own. `forward` always runs in a thread.

    None: as `--preprocess-workers` says, which is in threads by default."""
    outputs: Sequence[str] = ()
    """Outputs of the served model, such as `dense`. Empty: its first one. Without use if there is a `forward`."""
    max_batch_items: int | None = None
    """Most items of one call of `forward`. None: the engine's limit."""

    def parse(self, data: Any, context: PluginContext) -> Any:
        """Check the data of a request, and return the prompt. By default, the data."""
        return data

    def load(self, prompt: Any, context: PluginContext) -> Any:
        """Fetch what the prompt names, such as files. By default, return the prompt."""
        return prompt

    def preprocess(self, loaded: Any, context: PluginContext) -> Any:
        """Return a sequence of model inputs, which may be empty.

        Each becomes an item of a batch. With `forward` they are of any kind. Otherwise they are inputs of the served
        model: texts, lists of token ids, `Image`, or `Chat`.
        """
        raise NotImplementedError

    def forward(self, batch: Any) -> Any:
        """Run a batch of model inputs, of several requests, in a device thread; return one row for each.

        Without an override, the served model runs them. It must be a plain function.
        """
        raise NotImplementedError

    def postprocess(self, rows: Any, context: PluginContext) -> Any:
        """Make the output from a list of rows, one for each model input, in order. By default, return the rows.

        The rows are those of `forward`, or a `Row` of the served model with vectors as `Engine.embed` gives them. Over
        HTTP, the output becomes JSON.
        """
        return rows

    def cancelled(self, context: PluginContext) -> Any:
        """Note that the caller has left, or that the deadline has passed. It is called once, and has a second."""

    def release(self, context: PluginContext) -> None:
        """Drop what the plugin keeps of a request outside its context. It is called at the end of each request.

        It runs on the event loop, and must not wait.
        """

    def aclose(self) -> Any:
        """Release the plugin's resources, when the engine has ended."""

    def tokens(self, item: Any) -> int | None:
        """Return the cost of a model input for `forward`, which the scheduler counts as tokens.

        None: one for each 4 KiB of an array, and one for anything else.
        """
        return None

    def batch_key(self, item: Any) -> Hashable:
        """Return the key of a model input. Only inputs of equal keys share a batch, such as arrays of one shape."""
        return None

    def routes(self, process: Process) -> AsgiApp | None:
        """Return an application for the paths below `/plugins/NAME/`; None: there is none.

        Args:
            process: Takes data through all hooks, as a request of `/pooling` does.
        """
        return None


@dataclass(frozen=True, slots=True)
class PluginClass:
    """A plugin that is made when its engine opens."""

    name: str
    """Name in requests."""
    make: Callable[..., Any]
    """Makes the plugin, from a `PluginSetup` or from nothing."""

    def __call__(self, setup: PluginSetup) -> PluginLike:
        """Make the plugin.

        Raises:
            ConfigError: The constructor takes other arguments, or fails.
        """
        try:
            arguments = (setup,) if takes(self.make, 1) else ()
            with user_code():
                made: PluginLike = self.make(*arguments)
        except StagedPoolError:
            raise
        except Exception as error:
            raise ConfigError(f"plugin {self.name!r}: it could not be made: {as_text(error)}") from error
        return made


class PluginLike(Protocol):
    """Any object with the hook `preprocess`; `Processor` has the other hooks."""

    @property
    def preprocess(self) -> Callable[..., Any]: ...


Plugin: TypeAlias = PluginLike | type[PluginLike] | PluginClass
"""A plugin, its class, or a `PluginClass` that makes it."""


def takes(function: Callable[..., Any], arguments: int) -> bool:
    """Return True if a function may be called with a number of positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def name_of(plugin: PluginLike | type) -> str:
    """Return the name of a plugin in requests.

    Raises:
        ConfigError: It cannot stand in a path.
    """
    kind = plugin if isinstance(plugin, type) else type(plugin)
    given = getattr(plugin, "name", "") or kind.__name__.lower()
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        raise ConfigError(f"plugin name {given!r}: expected letters, digits, '-', '_' and '.', such as my-plugin")
    return given
