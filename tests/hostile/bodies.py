"""`python -m tests.hostile.bodies`: every route, each with the densest JSON of many megabytes in each of its fields.

Routes and fields come from `/openapi.json`, so that none is forgotten. Beside each request `/health` is asked on new
connections. Memory is looked at from outside.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tests.fuzz.run import KINDS
from tests.hostile.attack import ATTACKER_KEY, Setting
from tests.hostile.server import AttackedServer, attacked

PROBE_EVERY_S: Final = 0.01
FREE_BYTES: Final = 96 * 2**20
"""Memory that any body may take, in bytes; growth per byte is checked beyond it."""
MOST_VALUES: Final = 2**20
"""About as many lists, objects and texts as a request may have here."""

LISTS: Final[Mapping[str, bytes]] = {
    "digits": b"1", "ids": b"300", "floats": b"0.12345678901234567890", "integers of 400 digits": b"1" * 400,
    "lists": b"[]", "objects": b"{}", "objects of one field": b'{"a":1}', "texts": b'""', "letters": b'"a"',
    "pairs": b'["a","b"]', "lists of an id": b"[1]", "messages": b'{"role":"","content":""}',
    "objects with a text": b'{"text":"a"}', "nulls": b"null",
}  # fmt: skip
"""Elements of a list, by shape."""

TEXTS: Final[Mapping[str, bytes]] = {
    "words": b"a ", "commas": b",", "brackets": b"[{", "escapes": b"\\u0041", "quotes": b'\\"', "accents": "é".encode(),
}  # fmt: skip
"""Characters of a text, by shape."""

OTHERS: Final = ("one list of ids in a list", "depth", "fields", "the field again and again", "parts of a message")
SHAPES: Final = (*LISTS, *TEXTS, *OTHERS)


def value(shape: str, size: int) -> bytes:
    """JSON of a shape, of about `size` bytes."""
    if shape in LISTS:
        return b"[" + _listed(LISTS[shape], size) + b"]"
    if shape in TEXTS:
        return b'"' + TEXTS[shape] * (size // len(TEXTS[shape])) + b'"'
    match shape:
        case "one list of ids in a list":
            return b"[[" + _listed(b"300", size) + b"]]"
        case "depth":
            return b"[" * (size // 2) + b"]" * (size // 2)
        case "fields":
            return b"{" + b",".join(b'"%x":1' % number for number in range(size // 11)) + b"}"
        case "parts of a message":
            part = b'{"type":"text","text":""}'
            return b'[{"role":"user","content":[' + _listed(part, size) + b"]}]"
    raise ValueError(shape)


def _listed(unit: bytes, size: int) -> bytes:
    return b",".join([unit] * max(1, size // (len(unit) + 1)))


@dataclass(frozen=True)
class Field:
    """A field of a route."""

    path: str
    name: str
    example: Mapping[str, Any]
    """A body that the route takes."""
    is_form: bool = False

    def body(self, shape: str, size: int) -> tuple[str, bytes]:
        """Return a media type and a body of a shape, of about `size` bytes."""
        if shape == "the field again and again":
            dense = _listed(b'"%s":1' % self.name.encode(), size)
        else:
            dense = b'"%s":' % self.name.encode() + value(shape, size)
        if self.is_form:
            head = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n' % self.name.encode()
            return "multipart/form-data; boundary=b", head + dense.partition(b":")[2] + b"\r\n--b--\r\n"
        others = json.dumps({name: given for name, given in self.example.items() if name != self.name}).encode()
        return "application/json", others[:-1] + (b"," if len(others) > 2 else b"") + dense + b"}"


def fields(description: Mapping[str, Any]) -> Iterator[Field]:
    """Every field of every route that takes a body, one after the other."""
    schemas = description["components"]["schemas"]
    for path, methods in description["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for kind, described in content.items():
            examples = content.get("application/json", {}).get("examples", {}).values()
            example = next((each["value"] for each in examples), {"inputs": ["a"]})
            is_form = kind == "multipart/form-data"
            names = ["input"] if is_form else [*example, *_names(described["schema"], schemas), "a field of no meaning"]
            for name in dict.fromkeys(names):
                yield Field(path, name, example, is_form)


def _names(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rsplit("/", 1)[1]]
    yield from schema.get("properties", ())
    for option in schema.get("anyOf", ()):
        yield from _names(option, schemas)


@dataclass(frozen=True)
class Effect:
    """The effect of one request."""

    field: Field
    shape: str
    body_bytes: int
    status: int
    """0: the connection ended without an answer."""
    seconds: float
    health_s: float
    """Longest wait of a probe, in seconds."""
    grown_bytes: int
    """Growth of the peak of the server's resident set."""

    @property
    def growth(self) -> float:
        """Memory taken for each byte of the body."""
        return self.grown_bytes / self.body_bytes

    def __str__(self) -> str:
        where = f"{self.field.path} {self.field.name}{' (form)' if self.field.is_form else ''}"
        return (
            f"{where:48} {self.shape:28} {self.body_bytes / 2**20:5.1f} MiB {self.status:4} {self.seconds:6.2f} s"
            f"  /health {self.health_s * 1e3:5.0f} ms  {self.growth:5.1f} x"
        )


@contextmanager
def attacked_on_every_route() -> Iterator[AttackedServer]:
    """A server of tiny models that between them have every route."""
    from tests.models.tiny import build  # torch: seconds to import

    with tempfile.TemporaryDirectory() as folder:
        models = [f"{name}={build(kind, Path(folder) / name)}" for name, kind in KINDS.items()]
        flags = ("--dtype", "float32", *(part for model in models for part in ("--model", model)))
        with attacked(Setting(flags, model=None)) as server:
            yield server


def described(server: AttackedServer) -> Mapping[str, Any]:
    """The server's own description."""
    status, found = server.ask("/openapi.json")
    assert status == 200, found
    described: Mapping[str, Any] = found
    return described


def attack(server: AttackedServer, field: Field, shape: str, size: int) -> Effect:
    """Send one body, and measure its effect on the server."""
    kind, body = field.body(shape, size)
    before = server.resident_bytes
    server.forget_peak()
    began = time.monotonic()
    with _probing(server.port) as waits:
        status = _send(server.port, field.path, kind, body)
    ended = time.monotonic()
    return Effect(field, shape, len(body), status, ended - began, max(waits), server.peak_bytes - before)


def _send(port: int, path: str, kind: str, body: bytes) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {**_authorized(), "content-type": kind})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


def _authorized() -> dict[str, str]:
    return {"authorization": f"Bearer {ATTACKER_KEY}"}


@contextmanager
def _probing(port: int) -> Iterator[list[float]]:
    """Ask `/health` on new connections, and note the seconds that each takes; at least one."""
    waits: list[float] = []
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set() or not waits:
            began = time.monotonic()
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, HTTPException):
                waits.append(60.0)  # as bad as none
            finally:
                connection.close()
            waits.append(time.monotonic() - began)
            stop.wait(PROBE_EVERY_S)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield waits
    finally:
        stop.set()
        thread.join()


def sizes(shape: str, size: int) -> Sequence[int]:
    """A whole body; and, where that is rejected unread, one of as many values as may be read."""
    if shape not in LISTS or size // (len(LISTS[shape]) + 1) <= MOST_VALUES:
        return (size,)
    marks = sum(map(LISTS[shape].count, (b",", b":", b"[", b"{"))) + 1
    return (size, min(size, MOST_VALUES // marks * (len(LISTS[shape]) + 1)))


def chosen(
    description: Mapping[str, Any], *, every_shape: bool = False, most_fields: int | None = None
) -> Iterator[tuple[Field, str]]:
    """Choose fields and shapes.

    Args:
        description: Of the server.
        every_shape: Each field with each shape. False: each with the next one in turn.
        most_fields: Of one path. None: all.
    """
    shapes, of_path = cycle(SHAPES), Counter[str]()
    for field in fields(description):
        of_path[field.path] += 1
        if most_fields is not None and of_path[field.path] > most_fields and not field.is_form:
            continue
        for shape in SHAPES if every_shape else (next(shapes),):
            if not (field.is_form and shape == "the field again and again"):
                yield field, shape


def main(
    mebibytes: Annotated[float, typer.Option(help="Of each body.")] = 31.0,
    only: Annotated[str, typer.Option(help="Part of the paths. Default: all.")] = "",
    every_shape: Annotated[bool, typer.Option(help="Each field with each shape, which takes an hour.")] = False,
    health: Annotated[float, typer.Option(help="Seconds that /health may take.")] = 0.25,
    growth: Annotated[float, typer.Option(help="Memory that a byte of a body may take.")] = 10.0,
) -> None:
    """Send dense bodies to every route; fail if a probe waits or memory grows."""
    wrong = 0
    with attacked_on_every_route() as server:
        for field, shape in chosen(described(server), every_shape=every_shape):
            if only not in field.path:
                continue
            for size in sizes(shape, int(mebibytes * 2**20)):
                seen = attack(server, field, shape, size)
                is_wrong = seen.health_s > health or seen.status in (0, 500)
                is_wrong = is_wrong or seen.grown_bytes > max(growth * seen.body_bytes, FREE_BYTES)
                wrong += is_wrong
                typer.echo(f"{seen}{'  <- wrong' if is_wrong else ''}")
    typer.echo(f"{wrong} are wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
