"""Speed, cosines and found answers of int8, beside float32 and bfloat16."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pydoc_data.topics import topics
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perf.tools import report
from perf.tools.report import number
from perf.tools.servers import Options
from perf.tools.texts import TextSource
from staged_pool.runtime.config import DType
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.payloads import Payload, Row
from staged_pool.runtime.requests import DENSE_ONLY, MODEL_MAX, Output, TextInput
from staged_pool.stages.work import Prepared

DTYPES: Final[tuple[DType, ...]] = ("float32", "bfloat16", "int8")
BATCHES: Final = ((1, 16), (1, 64), (1, 256), (16, 64), (4, 256))
"""Texts of a batch, and tokens of each."""

_AT_ONCE: Final = 32
_FOUND: Final = 10
"""Documents that are looked at, the best first."""

Vectors = NDArray[np.float32]


class Pair(NamedTuple):
    """A query, the first sentence of a paragraph, and its document: the rest of the paragraph."""

    query: str
    document: str


class Quality(NamedTuple):
    """Retrieval by the vectors of a data type, and their nearness to those of float32."""

    cosine_mean: float
    cosine_least: float
    kept: float
    """Share of float32's first ten documents among its own."""
    ndcg: float
    """nDCG of the first ten documents; each query has one right document."""


def run(options: Options, *, rounds: int, seconds: float) -> None:
    """Measure, print and record. Rates are of one process, each round with every data type in turn."""
    from staged_pool.runtime.models.load import load_model

    pairs = paragraphs()
    with report.recording("int8", {"options": options, "rounds": rounds, "seconds": seconds}) as record:
        models = {dtype: load_model(replace(options, dtype=dtype).engine_config()) for dtype in DTYPES}
        compared = qualities(models, pairs)
        record.results["quality"] = compared
        rows = [
            [dtype, f"{q.cosine_mean:.4f}", f"{q.cosine_least:.4f}", f"{q.kept:.3f}", f"{q.ndcg:.4f}",
             f"{1 - q.ndcg / compared['float32'].ndcg:+.2%}"] for dtype, q in compared.items()
        ]  # fmt: skip
        columns = ["", "cosine, mean", "least", f"top {_FOUND} kept", f"nDCG@{_FOUND}", "loss"]
        report.show_table("Beside float32", columns, rows, f"{len(pairs):,} queries and documents")
        speeds = _speeds(models, TextSource(options.model), rounds, seconds)
        record.results["ms of a forward"] = {f"{texts} x {tokens}": by for (texts, tokens), by in speeds.items()}
        rows = [
            [f"{texts} of {tokens} tokens", *(number(median(by[dtype])) for dtype in DTYPES),
             *(f"{_gain(by['float32'], by[dtype]):.2f}" for dtype in DTYPES[1:])]
            for (texts, tokens), by in speeds.items()
        ]  # fmt: skip
        columns = ["texts", *(f"{dtype}, ms" for dtype in DTYPES), *(f"{dtype}, times as fast" for dtype in DTYPES[1:])]
        report.show_table("A forward", columns, rows, "medians of the rounds, and of their ratios")


def paragraphs() -> list[Pair]:
    """Make a retrieval set of Python's own documentation."""
    pairs = []
    for text in topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            first, *rest = re.split(r"(?<=[.!?])\s+", re.sub(r"[\s*`=]+", " ", paragraph).strip())
            if len(rest) >= 2 and len(first) > 30:
                pairs.append(Pair(first, " ".join(rest)))
    return pairs


def qualities(models: Mapping[DType, Encoder], pairs: Sequence[Pair]) -> dict[DType, Quality]:
    """Compare the vectors of each model with those of float32."""
    vectors = {
        dtype: (embed(model, [pair.query for pair in pairs]), embed(model, [pair.document for pair in pairs]))
        for dtype, model in models.items()
    }
    exact = vectors["float32"]
    reference = np.argsort(-exact[0] @ exact[1].T, axis=1, kind="stable")[:, :_FOUND]
    return {dtype: _quality(queries, documents, exact, reference) for dtype, (queries, documents) in vectors.items()}


def _quality(
    queries: Vectors, documents: Vectors, exact: tuple[Vectors, Vectors], reference: NDArray[np.intp]
) -> Quality:
    found = np.argsort(-queries @ documents.T, axis=1, kind="stable")[:, :_FOUND]
    cosines = np.concatenate([(queries * exact[0]).sum(axis=1), (documents * exact[1]).sum(axis=1)])
    kept = [len({*ours} & {*theirs}) / _FOUND for ours, theirs in zip(found.tolist(), reference.tolist(), strict=True)]
    hits = found == np.arange(len(queries))[:, None]
    gains = (hits / np.log2(np.arange(2, _FOUND + 2))).sum(axis=1)  # the best order gains 1
    return Quality(float(cosines.mean()), float(cosines.min()), float(np.mean(kept)), float(gains.mean()))


def embed(model: Encoder, texts: Sequence[str]) -> Vectors:
    """Return normalized vectors: [texts, width]."""
    rows: list[Vectors] = []
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        given = [ModelInput(TextInput(text, max_tokens=MODEL_MAX), DENSE_ONLY) for text in some]
        payloads = [prepared.payload for prepared in model.preprocess(given) if isinstance(prepared, Prepared)]
        rows += [np.asarray(row.values[Output.DENSE]) for row in model.forward(payloads) if isinstance(row, Row)]
    vectors = np.stack(rows)
    normalized: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalized


def _speeds(
    models: Mapping[DType, Encoder], source: TextSource, rounds: int, seconds: float
) -> dict[tuple[int, int], dict[DType, list[float]]]:
    """Time forwards, in ms: for each batch and data type, one figure a round."""
    rng = random.Random(0)
    speeds: dict[tuple[int, int], dict[DType, list[float]]] = {}
    with report.progress("int8", rounds * len(BATCHES)) as bar:
        for batch in BATCHES:
            count, tokens = batch
            texts = [ModelInput(TextInput(source.text(tokens, rng)), DENSE_ONLY) for _ in range(count)]
            speeds[batch] = {dtype: [] for dtype in models}
            for place in range(rounds):
                for dtype, model in list(models.items())[:: -1 if place % 2 else 1]:
                    payloads = [p.payload for p in model.preprocess(texts) if isinstance(p, Prepared)]
                    speeds[batch][dtype].append(_time(model, payloads, seconds))
                bar.advance(bar.task_ids[0])
    return speeds


def _time(model: Encoder, payloads: Sequence[Payload], seconds: float) -> float:
    started, forwards = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < seconds:
        model.forward(payloads)
        forwards += 1
    return spent / forwards * 1e3


def _gain(reference: Sequence[float], found: Sequence[float]) -> float:
    return median(one / other for one, other in zip(reference, found, strict=True))
