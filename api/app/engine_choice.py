"""Choice of the model for a request, and the errors if none is suitable."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from staged_pool.api import status
from staged_pool.api.app.tasks import Task
from staged_pool.api.status import HttpError, Problem
from staged_pool.api.wire.dialects.plugin import PLUGIN_TASK
from staged_pool.api.wire.dialects.pooling import POOLING_TASKS, Narrowed
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.errors import InvalidInput, Unsupported, shortened

MOST_NAMED: Final = 8
"""Maximum number of models that one message lists."""


def pick(task: Task, engines: Sequence[Engine], narrowed: Narrowed | None = None) -> Engine:
    """Return the engine for a request that names no model.

    Rankings go to rerankers and labels to classifiers, even if other models support these tasks, too.

    Args:
        task: Task of the request.
        engines: All engines of the server.
        narrowed: Further requirements of the request. None: it has none.

    Raises:
        HttpError: No model supports the task.
        InvalidInput: Several models support it, and none is preferred.
    """
    can = [engine for engine in engines if task.able(engine.card) and (narrowed is None or narrowed.able(engine.card))]
    prefers = task.meant if narrowed is None else narrowed.meant
    meant = [engine for engine in can if prefers(engine.card)] or can
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise no_model(task, engines)
    names = _named([f"`{engine.card.name}`" for engine in meant])
    message = (
        f"model: several served models give {task.gives}: {names}. Name one of them in `model`, or put /m/NAME before "
        "the path."
    )
    raise InvalidInput(message, param="model")


def check_able(task: Task, engine: Engine, engines: Sequence[Engine]) -> None:
    """Reject a task that the named model does not support.

    Raises:
        Unsupported: The model does not support it; the message lists what the served models can do.
    """
    if not task.able(engine.card):
        message = f"The model does not support {task.name} API: `{engine.card.name}` gives no {task.gives}"
        raise Unsupported(f"{message}; served: {served(engines)}")


def no_model(task: Task, engines: Sequence[Engine]) -> HttpError:
    """Return the error for a task that no served model supports: 404, as for a route that does not exist."""
    return HttpError(status.NO_ROUTE, f"No served model gives {task.gives}; served: {served(engines)}")


def no_route(method: str, path: str, routes: Sequence[str]) -> Problem:
    """Return the problem of a path that is not a route.

    Args:
        method: Method of the request.
        path: Path of the request as sent.
        routes: Paths of all routes, for suggestions.
    """
    near = get_close_matches(path[:64], routes, n=2, cutoff=0.7)
    nearest = f" Did you mean {' or '.join(near)}?" if near else ""
    message = f"There is no route {method} {shortened(path)}.{nearest} GET /openapi.json lists the routes."
    return Problem(kind=status.NO_ROUTE, message=message)


def served(engines: Sequence[Engine]) -> str:
    """List the served models, each with its abilities."""
    return _named([f"{engine.card.name} ({', '.join(abilities(engine.card))})" for engine in engines])


def abilities(card: ModelCard) -> Sequence[str]:
    """Return the abilities of a model: the names of its tasks in `/pooling`, and `score`."""
    if card.is_plugin:
        return [PLUGIN_TASK]
    found = list(dict.fromkeys(POOLING_TASKS[output] for output in card.outputs))
    return found if card.scoring is None else [*found, "score"]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
