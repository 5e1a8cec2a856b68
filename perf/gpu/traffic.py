"""Requests of many clients with known answers; some of the clients leave before theirs."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from perf.gpu.findings import Finding, compared
from perf.tools.client import Connection, Reply, post, retry_after_s

Vectors = NDArray[np.float32]

TIMEOUT_S: Final = 30.0
"""Longest wait for an answer, and for the end of rejections of one request."""

_FAILURES: Final = 2
"""Failed connections after which a client sends no more requests."""

_LEAVES_WITHIN_S: Final = 0.02
"""Longest stay of a client that leaves: about the time of an answer."""

_WORST: Final = 3.0
"""Largest relative difference of one vector, as a multiple of that of all. A vector of another text is beyond it."""
_ERROR_CHARACTERS: Final = 200
_SEED: Final = 23


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    texts: tuple[int, ...]
    """Places of its texts in the list of all texts."""
    leaves_after_s: float | None = None
    """Time until the client closes its connection. None: it waits for the answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one request."""

    ask: Ask
    vectors: Vectors | None = None
    """[texts, width]. None: the client left, or there was no right answer."""
    error: str = ""
    """Status and text of a failure, or the error of the connection."""


@dataclass(frozen=True, slots=True)
class Result:
    """Outcomes of one load."""

    outcomes: Sequence[Outcome]
    seconds: float

    @property
    def rate(self) -> float:
        """Answers a second."""
        return sum(outcome.vectors is not None for outcome in self.outcomes) / self.seconds


def asks(count: int, texts: int, *, most: int = 4, leaving: float = 0.1, seed: int = _SEED) -> list[Ask]:
    """Draw requests: the same for the same seed.

    Args:
        count: Number of requests.
        texts: Number of texts that they choose from.
        most: Most texts of one request.
        leaving: Share of the clients that leave before their answer.
        seed: Seed of all choices.
    """
    draw = random.Random(seed)
    drawn = []
    for _ in range(count):
        chosen = tuple(draw.randrange(texts) for _ in range(draw.randint(1, most)))
        leaves_after_s = draw.uniform(0, _LEAVES_WITHIN_S) if draw.random() < leaving else None
        drawn.append(Ask(chosen, leaves_after_s))
    return drawn


def send(port: int, texts: Sequence[str], given: Sequence[Ask], clients: int) -> Result:
    """Send requests by a number of clients, each one request at a time."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        parts = list(threads.map(lambda first: _client(port, texts, given[first::clients]), range(clients)))
    return Result([outcome for part in parts for outcome in part], time.perf_counter() - started)


def embed(port: int, texts: Sequence[str]) -> Reply:
    """Ask for the vectors of texts on a connection of its own.

    Raises:
        OSError: The connection failed, or there was no answer within `TIMEOUT_S`.
    """
    with closing(Connection(port, timeout_s=TIMEOUT_S)) as connection:
        return connection.exchange(request(texts))


def request(texts: Sequence[str]) -> bytes:
    """Return the bytes of a request for vectors. Texts are cut to the longest input."""
    body = {"input": list(texts), "encoding_format": "base64", "truncate_prompt_tokens": -1}
    return post("/v1/embeddings", json.dumps(body).encode())


def vectors_of(reply: Reply) -> Vectors:
    """Return the vectors of an answer with 200, [texts, width].

    Raises:
        ValueError: The body holds something else.
    """
    try:
        rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in json.loads(reply.body)["data"]]
        return np.stack(rows)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an answer with vectors: {reply.body[:_ERROR_CHARACTERS]!r}") from error


def judge(model: str, way: str, outcomes: Sequence[Outcome], wanted: Vectors, bound: float) -> list[Finding]:
    """Count lost answers and answers of other texts, and compare all vectors.

    Args:
        model: Name of the model, for the findings.
        way: Name of the load, for the findings.
        outcomes: Those of all requests.
        wanted: Vectors of all texts by the reference, [texts, width].
        bound: Largest relative difference of all vectors.
    """
    stayed = [outcome for outcome in outcomes if outcome.ask.leaves_after_s is None]
    answered = [outcome for outcome in stayed if outcome.vectors is not None]
    errors = sorted({outcome.error for outcome in stayed if outcome.vectors is None})
    counted = f"{len(answered)} of {len(stayed)} answered, {len(outcomes) - len(stayed)} clients left"
    findings = [Finding(model, way, counted, right=len(answered) == len(stayed), note="; ".join(errors[:3]))]
    rows = [(place, row) for one in answered for place, row in zip(one.ask.texts, one.vectors, strict=True)]  # type: ignore[arg-type]
    if not rows:
        return [*findings, Finding(model, way, "vectors", right=False, note="there is no answer to compare")]
    places = np.array([place for place, _ in rows])
    found = np.stack([row for _, row in rows])
    if found.shape[1] != wanted.shape[1]:
        note = f"vectors have {found.shape[1]} numbers instead of {wanted.shape[1]}"
        return [*findings, Finding(model, way, "vectors", right=False, note=note)]
    others = int(answers_of_others(found, places, wanted, bound).sum())
    findings.append(Finding(model, way, f"{others} of {len(rows)} vectors are those of other texts", right=not others))
    worst = float(row_differences(found, wanted[places], wanted).max())
    most = bound * _WORST
    subject = f"the worst of {len(rows)} vectors"
    findings.append(Finding(model, way, subject, right=worst <= most, difference=worst, bound=most))
    everything = torch.from_numpy(found), torch.from_numpy(wanted[places])
    return [*findings, compared(model, way, "all vectors", found=everything[0], wanted=everything[1], bound=bound)]


def answers_of_others(found: Vectors, places: NDArray[np.int64], wanted: Vectors, bound: float) -> NDArray[np.bool_]:
    """Tell for each vector if it is that of another text.

    Two texts whose references differ by no more than rounding cannot be told apart, and count as one.

    Args:
        found: [rows, width].
        places: Place of each row's own text in `wanted`.
        wanted: Vectors of all texts by the reference, [texts, width].
        bound: Largest relative difference that is rounding; see `row_differences`.
    """
    closest = nearest(found, wanted)
    apart = row_differences(wanted[closest], wanted[places], wanted) > bound
    others: NDArray[np.bool_] = (closest == -1) | ((closest != places) & apart)
    return others


def nearest(found: Vectors, wanted: Vectors) -> NDArray[np.int64]:
    """Return the place of the nearest reference for each vector; -1 for one with NaN."""
    distances = torch.cdist(torch.from_numpy(found), torch.from_numpy(wanted))
    places = distances.argmin(dim=1).numpy()
    return np.where(np.isfinite(found).all(axis=1), places, -1)


def row_differences(found: Vectors, own: Vectors, wanted: Vectors) -> Vectors:
    """Return the relative difference of each vector: its error over the usual deviation from the mean.

    Args:
        found: [rows, width].
        own: The reference of each, [rows, width].
        wanted: Vectors of all texts by the reference.
    """
    usual = np.sqrt(np.square(wanted - wanted.mean(axis=0)).sum(axis=1).mean())
    differences: Vectors = np.linalg.norm(found - own, axis=1) / usual
    return differences


def _client(port: int, texts: Sequence[str], given: Sequence[Ask]) -> list[Outcome]:
    """Send requests one after the other."""
    outcomes: list[Outcome] = []
    failures, broken = 0, False
    with closing(Connection(port, timeout_s=TIMEOUT_S)) as connection:
        for ask in given:
            if failures == _FAILURES:
                outcomes.append(Outcome(ask, error="not sent, because connections of the client failed"))
                continue
            try:
                if broken:
                    connection.reopen()
                broken = False
                outcomes.append(_outcome(connection, texts, ask))
            except OSError as error:
                failures, broken = failures + 1, True
                outcomes.append(Outcome(ask, error=f"{type(error).__name__}: {error}"))
            except ValueError as error:
                outcomes.append(Outcome(ask, error=str(error)))
    return outcomes


def _outcome(connection: Connection, texts: Sequence[str], ask: Ask) -> Outcome:
    message = request([texts[place] for place in ask.texts])
    if ask.leaves_after_s is not None:
        connection.send(message)
        time.sleep(ask.leaves_after_s)
        connection.reopen()
        return Outcome(ask)
    reply = connection.exchange(message)
    until = time.perf_counter() + TIMEOUT_S
    while (pause_s := retry_after_s(reply)) is not None and time.perf_counter() < until:  # rejected under load
        time.sleep(pause_s)
        reply = connection.exchange(message)
    if reply.status != 200:
        return Outcome(ask, error=f"{reply.status} {reply.body[:_ERROR_CHARACTERS].decode(errors='replace')}")
    vectors = vectors_of(reply)
    if len(vectors) != len(ask.texts):
        return Outcome(ask, error=f"{len(vectors)} vectors for {len(ask.texts)} texts")
    return Outcome(ask, vectors)
