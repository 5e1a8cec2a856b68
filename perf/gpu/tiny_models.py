"""Checks of tiny models: each output, in each data type and each way to run a forward, against the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from perf.gpu.findings import Finding, as_rows, compared, failed, guarded
from perf.gpu.inputs import inputs_of
from perf.gpu.loaded import prepared, text_transformer
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import Attention, EngineConfig
from staged_pool.runtime.config import DType as DTypeName
from staged_pool.runtime.models.devices.accelerators import open_devices
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.kernels.attention import takes_varlen
from staged_pool.runtime.models.kernels.self_check import TOLERANCE
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.image import ImageTower
from staged_pool.runtime.models.transformer.cuda_graphs import BUCKETS, bucket_for, cuda_recorder
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.models.transformer.speedups import Speedups
from staged_pool.runtime.payloads import Payload, Row, TokenSequence
from staged_pool.runtime.requests import Output

FASTEST: Final = frozenset({"bert-mean", "modernbert-cls", "qwen3-embed-left"})
"""Kinds that must run packed, attend in one call and be recorded.

Attention in one call needs a GPU with 16 bits, and so do recordings.
"""

KINDS: Final = (
    "bert-mean",
    "modernbert-cls",
    "qwen3-embed-left",
    "ce-qwen3-lm",
    "splade-bert",
    "bge-m3",
    "colbert-pylate",
    "clip",
    "siglip2-naflex",
    "qwen2-vl",
    "colpali",
)
"""Tiny models of the tests: one of each output, layout and kind of input."""

PADDED, IN_GROUPS, IN_ONE_CALL, REPLAYED = WAYS = ("padded", "in groups", "in one call", "replayed")
"""Ways to run a forward: padded, or packed with attention of each length, of all at once, and recorded."""

AGAINST_COMPANY: Final = "alone against company"

Results = Mapping[Output, Tensor]


@dataclass(frozen=True, slots=True)
class TinyModels:
    """Checks of tiny models on one device; for a worker process, with the name of a kind as argument."""

    folder: Path
    """Folder for the models."""
    device: str
    threads: int
    """Threads of torch."""

    def __call__(self, kind: str) -> list[Finding]:
        """Make a model and check it. A check that raises is a finding, and the others go on."""
        from tests.models.tiny import build

        try:
            base = EngineConfig(
                model=str(build(kind, self.folder / kind)),
                offline=True,
                device=self.device,
                torch_threads=self.threads,
            )
            reference = load_model(replace(base, device="cpu", dtype="float32", attention="padded"))
            wanted = {lane: _Inputs.of(reference, lane).in_company() for lane in reference.towers}
            reference.close()
            on_gpu = open_devices(self.device)[0].type == "cuda"
        except Exception as error:  # noqa: BLE001  # models and devices may raise anything, and each error is a finding
            return [failed(kind, "float32 on the CPU", "reference", error)]
        findings: list[Finding] = []
        dtypes: Sequence[DTypeName] = ("float32", "bfloat16", "float16") if on_gpu else ("float32", "bfloat16")
        for dtype in dtypes:
            for attention in cast("Sequence[Attention]", ("padded", "auto")):
                config = replace(base, dtype=dtype, attention=attention)
                layout = PADDED if attention == PADDED else "packed"
                check = partial(_Kind(kind, dtype, wanted).check, config)
                findings += guarded(check, partial(failed, kind, f"{dtype}, {layout}", "load"))
        return findings


@dataclass(frozen=True, slots=True)
class _Kind:
    """Checks of one kind in one data type."""

    name: str
    dtype: DTypeName
    wanted: Mapping[Lane, Results]
    """Results of the reference."""

    def check(self, config: EngineConfig) -> Iterator[Finding]:
        """Load the model in one layout, and check it in each of its ways."""
        model = load_model(config)
        try:
            if config.attention == PADDED:
                yield from self._lanes(PADDED, model, model.towers)
            else:
                yield from self._packed(model)
        finally:
            model.close()

    def _packed(self, model: Encoder) -> Iterator[Finding]:
        """Check the ways of the packed layout, which are switched on the loaded transformer."""
        transformer = text_transformer(model)
        if transformer.layout == PADDED:
            yield self._unused(IN_GROUPS, "it runs padded")
            return
        reading = [lane for lane, tower in model.towers.items() if not isinstance(tower, ImageTower)]
        in_one_call, graphs = transformer.attends_in_one_call, transformer.graphs
        transformer.attends_in_one_call, transformer.graphs = False, None
        yield from self._lanes(IN_GROUPS, model, reading)
        if not in_one_call:
            if takes_varlen(transformer.device, transformer.model.dtype):
                reason = Speedups(transformer, model.towers["text"].max_tokens).attend_in_one_call()
                yield self._unused(IN_ONE_CALL, reason or "it was not chosen at load, and would be now")
            return
        transformer.attends_in_one_call = True
        yield from self._lanes(IN_ONE_CALL, model, reading)
        if graphs is None:
            yield self._unused(REPLAYED, _why_not_recorded(model, transformer))
            return
        transformer.graphs = graphs
        if _is_replayed(transformer, _Inputs.of(model, "text").payloads):
            yield from self._lanes(REPLAYED, model, ["text"])
        else:
            yield self._unused(REPLAYED, "no recorded size holds the batch")

    def _unused(self, way: str, reason: str) -> Finding:
        """Return the finding of a way that the model does not run in: wrong where it must."""
        return Finding(self.name, f"{self.dtype}, {way}", "not in use", right=self.name not in FASTEST, note=reason)

    def _lanes(self, way: str, model: Encoder, lanes: Iterable[Lane]) -> Iterator[Finding]:
        for lane in lanes:
            check = partial(self._lane, f"{self.dtype}, {way}", model, lane)
            yield from guarded(check, partial(failed, self.name, f"{self.dtype}, {way}", f"{lane}s"))

    def _lane(self, way: str, model: Encoder, lane: Lane) -> Iterator[Finding]:
        """Compare all outputs: of one batch, of each input alone, and of both with each other."""
        bound = TOLERANCE[getattr(torch, self.dtype)]
        inputs = _Inputs.of(model, lane)
        together, alone, again = inputs.in_company(), inputs.alone(), inputs.in_company()
        for output, wanted in self.wanted[lane].items():
            for batching, found, expected in (
                ("in company", together[output], wanted),
                ("alone", alone[output], wanted),
                ("in company again", again[output], wanted),
                (AGAINST_COMPANY, alone[output], together[output]),
            ):
                subject = f"{output} of {lane}s, {batching}"
                yield compared(self.name, way, subject, found=found, wanted=expected, bound=bound)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of one lane of a model, ready for the device."""

    model: Encoder
    payloads: Sequence[Payload]

    @classmethod
    def of(cls, model: Encoder, lane: Lane) -> _Inputs:
        return cls(model, prepared(model, inputs_of(lane, frozenset(model.towers[lane].outputs))))

    def in_company(self) -> Results:
        """Run all inputs in one batch."""
        return self._joined(self.model.forward(self.payloads))

    def alone(self) -> Results:
        """Run each input in its own batch."""
        return self._joined([row for payload in self.payloads for row in self.model.forward([payload])])

    def _joined(self, rows: Sequence[object]) -> Results:
        given: list[Row] = []
        for row in rows:
            if not isinstance(row, Row):
                raise RuntimeError(f"the model failed on an input: {row}")
            given.append(row)
        return {
            output: as_rows(output, [row.values[output] for row in given], self.model.card.vocabulary)
            for output in given[0].values
        }


def _is_replayed(transformer: PackedTransformer, payloads: Sequence[Payload]) -> bool:
    """Tell whether a recorded size holds the batch, whose tokens are all attended to."""
    sequences = cast("Sequence[TokenSequence]", payloads)
    size = len(transformer.pack(sequences).ids)
    holds = bucket_for(size, len(sequences), transformer.recorded) is not None
    return holds and not any(sequence.unseen_tokens for sequence in sequences)


def _why_not_recorded(model: Encoder, transformer: PackedTransformer) -> str:
    """Record the smallest size once more, for the reason."""
    replica = next(iter(model.replicas))
    with replica.launching("text"):
        reason = Speedups(transformer, model.towers["text"].max_tokens).record(
            cuda_recorder(replica.device), BUCKETS[:1]
        )
    transformer.graphs = None
    return reason or "it was not recorded at load, and would be now"
