"""Requests before the load: they find out whether the server can be measured, and how it counts tokens."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import anyio
import orjson

from staged_pool.api.bench.address import Address
from staged_pool.api.bench.connection import BrokenAnswer, HttpConnection, Reply, get, post, with_body
from staged_pool.api.bench.records import tokens_of
from staged_pool.api.bench.sizes import Kind
from staged_pool.api.bench.texts import WORDS, TokenRate
from staged_pool.api.bench.workload import QUERY_WORDS, MixedMaker, Target, rerank_body, texts_body
from staged_pool.stages import foreign_json
from staged_pool.stages.errors import ConfigError

CALIBRATION_WORDS: Final = (20, 60)
"""Words of the two texts from which the tokens of a word follow."""

SAID_CHARACTERS: Final = 300
"""Most characters of a server's own message that an error repeats."""

_KEY: Final = "give it by --api-key or the variable STAGED_POOL_API_KEY"


@dataclass(slots=True)
class Findings:
    """Findings of the requests before a load."""

    target: Target
    rates: dict[Kind, TokenRate] = field(default_factory=dict)
    """Tokens of a word, by kind."""
    answer_s: float = 0.0
    """Seconds of the last probing answer."""
    models: Sequence[str] = ()
    """Models that the server lists."""
    statuses: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of probing requests by path and status."""


class Probe:
    """Sends the requests before a load, one after another on one connection.

    Args:
        address: Address of the server.
        target: Server side of the requests.
        timeout_s: Limit for each answer.
    """

    def __init__(self, address: Address, target: Target, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._connection = HttpConnection(address.connect, whole=True)
        self.findings = Findings(target)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def find_model(self) -> None:
        """Look up the served models. If there is only one and none is named, requests name it.

        Raises:
            ConfigError: The named model is not served, or the server cannot be reached.
        """
        found, target = self.findings, self.findings.target
        reply = await self.get("/v1/models")
        if reply.status in (401, 403):
            raise ConfigError(_no_access(self._address, reply, target.api_key))
        listed = _json(reply).get("data") if reply.status == 200 else None
        names = [each["id"] for each in listed or () if isinstance(each, dict) and isinstance(each.get("id"), str)]
        found.models = names
        if target.model is None and len(names) == 1:
            found.target = replace(target, model=names[0])
        elif target.model is not None and names and target.model not in names:
            raise ConfigError(
                f"model={target.model!r}: {self._address} does not serve it; it serves {', '.join(names[:10])}"
            )

    async def try_request(self, make: MixedMaker, kind: Kind) -> None:
        """Send one request of a kind of the load.

        Raises:
            ConfigError: The answer is no success; says why, and the next step.
        """
        path = self.findings.target.path_of(kind)
        before = time.perf_counter()
        reply = await self._exchange(path, make.one(kind).content)
        self.findings.answer_s = time.perf_counter() - before
        if reply.status != 200:
            raise ConfigError(self._no_success(path, reply))

    async def calibrate(self, kind: Kind) -> None:
        """Find the tokens of a word, by the usage of answers or else by `/tokenize`."""
        counts: list[int] = []
        source = "usage"
        for words in CALIBRATION_WORDS:
            tokens = await self._usage(kind, words)
            if tokens < 0:
                source = "/tokenize"
                tokens = await self._tokenized(words)
            counts.append(tokens)
        if min(counts) < 0:
            self.findings.rates[kind] = TokenRate()
            return
        first, second = CALIBRATION_WORDS
        per_word = (counts[1] - counts[0]) / (second - first)
        if per_word > 0:
            rate = TokenRate(per_word, counts[0] - per_word * first, source)
            self.findings.rates[kind] = rate
        else:
            self.findings.rates[kind] = TokenRate()

    async def _usage(self, kind: Kind, words: int) -> int:
        target, text = self.findings.target, _text(words)
        inputs = rerank_body(_text(QUERY_WORDS), [text]) if kind == "rerank" else texts_body([text])
        path = target.path_of(kind)
        reply = await self._exchange(path, with_body(target.head(kind), target.body(kind, inputs)))
        if reply.status != 200:
            raise ConfigError(self._no_success(path, reply))
        return tokens_of(reply)

    async def _tokenized(self, words: int) -> int:
        target = self.findings.target
        model = {} if target.model is None else {"model": target.model}
        body = orjson.dumps({**model, "prompt": _text(words)})
        head = post(target.authority, f"{target.prefix}/tokenize", target.api_key)
        reply = await self._exchange("/tokenize", with_body(head, body))
        count = _json(reply).get("count") if reply.status == 200 else None
        return count if isinstance(count, int) else -1

    async def get(self, path: str) -> Reply:
        """Send a GET request.

        Raises:
            ConfigError: The server cannot be reached, or does not answer.
        """
        target = self.findings.target
        return await self._exchange(path, get(target.authority, target.prefix + path, target.api_key))

    async def _exchange(self, path: str, request: bytes) -> Reply:
        address = self._address
        try:
            with anyio.fail_after(self._timeout_s):
                reply = await self._connection.exchange(request)
        except TimeoutError:
            await self._connection.close()
            message = f"{address} gave no answer to {path} within {self._timeout_s:g} s"
            raise ConfigError(f"{message}; see whether it is busy, or give a longer --timeout") from None
        except ssl.SSLError as error:
            reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason or error
            message = f"no TLS with {address}: {reason}"
            raise ConfigError(f"{message}; give its authority by --ca-file, or http:// if it has no TLS") from None
        except OSError as error:
            message = f"no server answers at {address}: {_reason(error)}"
            raise ConfigError(f"{message}; start it (`staged-pool serve`), or correct the address") from None
        except BrokenAnswer as error:
            raise ConfigError(f"{address} does not speak HTTP/1.1: {error}; correct the address") from None
        by_status = self.findings.statuses.setdefault(path, {})
        by_status[str(reply.status)] = by_status.get(str(reply.status), 0) + 1
        return reply

    def _no_success(self, path: str, reply: Reply) -> str:
        """Return the message for an answer that is no success, with the next step."""
        found, address = self.findings, self._address
        said = said_by(reply)
        match reply.status:
            case 401 | 403:
                return _no_access(address, reply, found.target.api_key)
            case 404 | 405 | 501:
                named = f" for the model {found.target.model!r}" if found.target.model else ""
                served = f"; it serves the models {', '.join(found.models[:10])}" if found.models else ""
                step = "give another --model, or the route by --path or --route"
                return f"{address} has no {path}{named} ({reply.status}{said}){served}: {step}"
            case 429:
                return f"{address} is overloaded before the load begins (429{said}): wait until it is idle"
            case 503:
                return f"{address} is not ready (503{said}): wait until it is"
            case 400 | 413 | 415 | 422:
                step = "give other sizes of inputs, or another --model"
                return f"{address} does not accept such a request ({reply.status}{said}): {step}"
            case _:
                return f"{address} answers {path} with {reply.status}{said}: see its log"


def _no_access(address: Address, reply: Reply, key: str | None) -> str:
    if key is None:
        return f"{address} asks for an API key ({reply.status}): {_KEY}"
    return f"{address} does not accept the API key ({reply.status}): {_KEY}"


def said_by(reply: Reply) -> str:
    """Return the message in the body of an error, after a colon; empty if there is none."""
    error: Any = _json(reply)
    for name in ("error", "message", "detail"):
        error = error.get(name, error) if isinstance(error, dict) else error
    if not isinstance(error, str):
        return ""
    line = " ".join(error.split())
    shown = "".join(character if character.isprintable() else "?" for character in line)
    return f": {shown[:SAID_CHARACTERS].rstrip('.')}"


def _json(reply: Reply) -> Mapping[str, Any]:
    try:
        value = foreign_json.decode(reply.body, orjson.loads)
    except foreign_json.BadJson:
        return {}
    return value if isinstance(value, dict) else {}


def _reason(error: OSError) -> str:
    """Return the reason of the system; anyio has an error for each address of a name before it."""
    cause: BaseException = error
    while (inner := cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__) is not None:
        cause = inner
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, socket.gaierror):
        return os.strerror(cause.errno)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _text(words: int) -> str:
    return " ".join(WORDS[:words])
