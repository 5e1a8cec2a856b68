"""Log lines on a terminal: a banner, one short line for each request, and one line for each other event."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from structlog import DropEvent
from structlog.typing import EventDict, WrappedLogger

_COLOURS: Final = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "bold": 1, "dim": 2}

_LEVELS: Final = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "red"}

_HIDDEN: Final = frozenset({"event", "level", "timestamp", "process", "logger", "exception", "exc_info"})


class TerminalRenderer:
    """The last processor of a log for people. It remembers where the server listens, for the banner.

    Args:
        colours: Write ANSI colours. `NO_COLOR` turns them off (https://no-color.org).
    """

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours and not os.environ.get("NO_COLOR")
        self._url = ""

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        """Return the text of one event, without the line end."""
        match event.get("event"):
            case "server.listening":
                self._url = str(event["url"])
                return self._line(event, f"listening on {self._url}, loading the model")
            case "server.ready":
                return self._banner(event)
            case "request.finished":
                return self._request(event)
            case "model.phase_began" if event["phase"] != "download":
                raise DropEvent  # it takes a moment, and its end is told
            case "model.phase_began" | "model.phase_ended":
                return self._line(event, _phase(event))
            case "model.understood":
                raise DropEvent  # the banner has the most of it, and `staged-pool check` all
            case _:
                return self._other(logger, event)

    def _banner(self, event: EventDict) -> str:
        facts = [str(event["model"])]
        if event.get("width"):
            facts.append(f"{event['width']} numbers")
        facts += [str(event[name]) for name in ("dtype", "device") if name in event]
        ready = (
            f"{self._paint('ready', 'green')}   {self._url}   (loaded in {event['load_s']:.1f} s)   page: {self._url}/"
        )
        lines = [f"{self._paint('staged-pool', 'bold')}   {'   '.join(facts)}", f"  {ready}"]
        if event.get("width") and self._url.startswith("http"):
            body = '{"input": "hi"}'
            lines.append(f"  try     curl -s {self._url}/v1/embeddings -H 'content-type: application/json' -d '{body}'")
        else:
            lines.append(f"  try     {self._url}/docs")
        return "\n".join(lines)

    def _request(self, event: EventDict) -> str:
        status = int(event["status"])
        colour = "green" if status < 400 else "yellow" if status in (429, 499) else "red"
        parts = [self._paint(str(status), colour), f"{event['method']} {event['path']}".ljust(26)]
        if event.get("items"):
            parts += [f"{event['items']:>6,} items", f"{event.get('tokens', 0):>8,} tokens"]
        if "error" in event:
            parts.append(str(event["error"]).replace("_", " "))
        if left_out := event.get("rejections_left_out"):
            parts.append(f"and {left_out:,} more")
        parts.append(f"{event['total_ms']:,.1f} ms")
        return self._line(event, "  ".join(parts))

    def _other(self, logger: WrappedLogger, event: EventDict) -> str:
        level = str(event.get("level", "info"))
        name = str(event.get("event", ""))
        words = [name if level == "info" else f"{self._paint(level, _LEVELS.get(level, 'bold'))}  {name}"]
        words += [f"{self._paint(key, 'dim')}={_shown(value)}" for key, value in event.items() if key not in _HIDDEN]
        line = self._line(event, "  ".join(words))
        if "exception" in event:
            line += f"\n{event['exception']}"
        return line

    def _line(self, event: EventDict, text: str) -> str:
        process = f"{event['process']}  " if "process" in event else ""
        return f"{self._paint(_clock(event), 'dim')}  {process}{text}"

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self._colours else text


def _phase(event: Mapping[str, Any]) -> str:
    """Return the words for the beginning of a download, or the end of a phase."""
    model = event["model"]
    if "seconds" not in event:
        return f"downloading {model}"
    done = {
        "download": f"downloaded {model}, {event.get('bytes', 0) / 1e6:,.1f} MB,",
        "weights": f"read the weights of {model}",
        "warm-up": f"warmed {model} up",
    }[event["phase"]]
    return f"{done} in {event['seconds']:.1f} s"


def _clock(event: Mapping[str, Any]) -> str:
    """Return the local time of an event, to the second."""
    stamp = str(event.get("timestamp", ""))
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return stamp


def _shown(value: object) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text
