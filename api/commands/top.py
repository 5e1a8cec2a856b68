"""The command `top`: the stages of a running server, live on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from staged_pool.api.commands.process import EXIT_CONFIG, EXIT_FAILED
from staged_pool.runtime.settings import ENV_PREFIX
from staged_pool.stages import foreign_json

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

    from staged_pool.api.live.feed import LiveEvent

RETRY_S: Final = 1.0
"""Seconds between two attempts to reach a server that does not answer."""

SILENCE_S: Final = 10.0
"""Seconds without an event after which a server counts as gone: events come four times a second."""

FIRST_RATES_S: Final = 2.0
"""Seconds until the first event with rates over the whole window."""

_DATA: Final = "data: "


class Rejected(Exception):
    """The server answered with an error, which another attempt would not change."""


def events(client: httpx.Client) -> Iterator[LiveEvent]:
    """Yield the events of one connection to the live feed, until it ends.

    Raises:
        Rejected: The server does not allow it, or has no live feed.
        httpx.HTTPError: The server does not answer.
    """
    import msgspec

    from staged_pool.api.live.feed import LiveEvent

    decode = msgspec.json.Decoder(LiveEvent).decode
    with client.stream("GET", "stages/live") as response:
        if response.status_code in (401, 403):
            raise Rejected("the server asks for an API key: pass --api-key, or set STAGED_POOL_API_KEY")
        if response.status_code == 404:
            raise Rejected("the server has no /stages/live: it is no staged-pool, or an older one")
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith(_DATA):
                try:
                    yield foreign_json.decode(line.removeprefix(_DATA), decode, most_depth=None)
                except (msgspec.DecodeError, foreign_json.BadJson) as error:
                    raise Rejected(f"the server's version has other events: {error}") from None


def _top(*, url: str, model: str | None, api_key: str | None, once: bool) -> None:
    import httpx

    from staged_pool.api.commands.top_view import render, waiting_for

    base = url if url.startswith(("http://", "https://")) else f"http://{url}"
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        client = httpx.Client(
            base_url=base.rstrip("/") + "/", headers=headers, timeout=httpx.Timeout(SILENCE_S), trust_env=False
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise click.BadParameter(f"{url}: {error}; give the address of a server, such as 127.0.0.1:8000") from None
    with client, suppress(KeyboardInterrupt):
        if once or not sys.stdout.isatty():
            _print_once(client, base, lambda event: render(event, base, model))
        else:
            _watch(client, lambda event: render(event, base, model), lambda why: waiting_for(base, why))


def _print_once(client: httpx.Client, base: str, render: Callable[[LiveEvent], RenderableType]) -> None:
    """Print the first event whose rates are over the whole window."""
    import httpx
    from rich.console import Console

    began_at = time.monotonic()
    try:
        for event in events(client):
            if time.monotonic() - began_at >= FIRST_RATES_S:
                Console().print(render(event))
                return
    except Rejected as error:
        _exit(str(error), EXIT_CONFIG)
    except httpx.HTTPError as error:
        _exit(f"{base} does not answer: {str(error) or type(error).__name__}; is the server running?", EXIT_FAILED)
    _exit(f"{base} ended the stream", EXIT_FAILED)


def _watch(
    client: httpx.Client,
    render: Callable[[LiveEvent], RenderableType],
    waiting_for: Callable[[str], RenderableType],
) -> None:
    """Redraw with each event until the user ends the process."""
    import httpx
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            try:
                for event in events(client):
                    live.update(render(event), refresh=True)
                why = "the stream has ended"
            except Rejected as error:
                live.stop()
                _exit(str(error), EXIT_CONFIG)
            except httpx.HTTPError as error:
                why = str(error) or type(error).__name__
            live.update(waiting_for(why), refresh=True)
            time.sleep(RETRY_S)


def _exit(message: str, code: int) -> None:
    click.echo(f"error: {message}", err=True)
    raise click.exceptions.Exit(code)


def _options() -> list[click.Parameter]:
    key: dict[str, Any] = {"envvar": f"{ENV_PREFIX}API_KEY", "show_envvar": True}
    return [
        click.Argument(["url"], default="127.0.0.1:8000"),
        click.Option(["--model"], metavar="NAME", help="Model to show. Default: all."),
        click.Option(["--api-key"], metavar="KEY", help="API key, if the server asks for one.", **key),
        click.Option(["--once"], is_flag=True, help="Print one view and exit, as without a terminal."),
    ]


top: Final = click.Command(
    "top",
    callback=_top,
    params=_options(),
    help="""Watch the stages of a running server: what is busy, what waits, and what is the bottleneck.

    URL: address of the server.
    """,
)
