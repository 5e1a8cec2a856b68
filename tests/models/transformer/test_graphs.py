"""Recorded forwards (graphs): the size for each batch, and replays equal to computed rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.transformer.cuda_graphs import BUCKETS, Bucket, bucket_for, cuda_recorder
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.models.transformer.speedups import Speedups
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY
from tests.models.conftest import TinyFolder
from tests.models.requests import text_tower

SMALL = (Bucket(64, 8), Bucket(128, 16))


class Rerun:
    """A double of a CUDA graph: runs the recorded call again on the same buffers."""

    def __init__(self) -> None:
        self.replays = 0
        self.error: Exception | None = None
        self.spoil = False
        self.sticks = False
        """A replay gives what the first one gave."""
        self.fails_at: int | None = None
        """Call that fails, counted from 0."""
        self.calls = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        if self.error is not None:
            raise self.error
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise RuntimeError("out of memory")
        output, replayed = run().clone(), 0

        def replay() -> None:
            nonlocal replayed
            self.replays += 1
            replayed += 1
            if replayed == 1 or not self.sticks:
                output.copy_(run())
            if self.spoil:
                output.add_(torch.randn_like(output) * 10)

        return replay, output


def sequences(*lengths: int, pairs: bool = False) -> list[TokenSequence]:
    random = np.random.default_rng(lengths)
    return [
        TokenSequence(
            random.integers(5, 60, size=length).tolist(), DENSE_ONLY, first_tokens=length // 2 if pairs else None
        )
        for length in lengths
    ]


@pytest.fixture
def transformer(tiny_folder: TinyFolder, varlen_on_cpu: None) -> PackedTransformer:
    return text_tower(load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32"))).transformer


@pytest.mark.parametrize(
    ("tokens", "count", "bucket"),
    [
        (1, 1, Bucket(64, 8)),
        (64, 8, Bucket(64, 8)),
        (65, 8, Bucket(128, 16)),
        (64, 9, Bucket(128, 16)),
        (129, 1, None),
        (17, 17, None),
    ],
)
def test_a_batch_takes_the_smallest_size_that_holds_it(tokens: int, count: int, bucket: Bucket | None) -> None:
    assert bucket_for(tokens, count, SMALL) == bucket


def test_sizes_grow() -> None:
    assert sorted(BUCKETS) == [*BUCKETS]


@torch.inference_mode()
def test_what_is_replayed_is_what_is_computed(transformer: PackedTransformer) -> None:
    batches = [
        transformer.pack(given)
        for given in (
            sequences(5, 5, 1, 16),
            sequences(30, 9),
            sequences(1),
            sequences(3, 4, pairs=True),
            sequences(3, 4),
            sequences(*[16] * 7),
            sequences(*[2] * 16),
        )
    ]
    computed = [transformer.hidden(batch) for batch in batches]
    recorder = Rerun()
    assert Speedups(transformer, 64).record(recorder, SMALL) is None
    assert transformer.recorded == SMALL
    recorder.replays = 0
    for batch, wanted in zip(batches, computed, strict=True):
        torch.testing.assert_close(transformer.hidden(batch), wanted)
    assert recorder.replays == len(batches)


@torch.inference_mode()
def test_a_batch_that_fits_no_size_is_computed(transformer: PackedTransformer) -> None:
    recorder = Rerun()
    assert Speedups(transformer, 64).record(recorder, SMALL) is None
    recorder.replays = 0
    for given in (sequences(*[20] * 7), sequences(*[1] * 17)):
        assert len(transformer.hidden(transformer.pack(given))) == sum(len(one.ids) for one in given)
    assert recorder.replays == 0


@torch.inference_mode()
def test_a_query_whose_expansion_nobody_sees_is_computed(transformer: PackedTransformer) -> None:
    recorder = Rerun()
    assert Speedups(transformer, 64).record(recorder, SMALL) is None
    recorder.replays = 0
    given = [TokenSequence([5, 6, 7, 8], DENSE_ONLY, unseen_tokens=2), *sequences(4)]
    found = transformer.hidden(transformer.pack(given))
    torch.testing.assert_close(found[4:], transformer.hidden(transformer.pack(given[1:])))
    assert recorder.replays == 1


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"spoil": True}, "recorded for 128 tokens, gives other vectors"),
        ({"sticks": True}, "recorded for 128 tokens, gives other vectors"),
        ({"error": RuntimeError("operation not permitted when stream is capturing")}, "not permitted"),
    ],
    ids=["wrong", "wrong for other data", "fails"],
)
@torch.inference_mode()
def test_a_recording_that_is_not_right_is_left_off(
    transformer: PackedTransformer, broken: dict[str, Any], reason: str
) -> None:
    batch = transformer.pack(sequences(5, 7))
    computed = transformer.hidden(batch)
    recorder = Rerun()
    for name, value in broken.items():
        setattr(recorder, name, value)
    why = Speedups(transformer, 64).record(recorder, SMALL)
    assert why is not None
    assert reason in why
    assert not transformer.recorded
    recorder.replays = 0
    torch.testing.assert_close(transformer.hidden(batch), computed)
    assert recorder.replays == 0


@pytest.mark.parametrize(("fails_at", "tokens"), [(0, 256), (1, 128), (2, 64)])
@torch.inference_mode()
def test_the_other_sizes_stay_where_one_fails(transformer: PackedTransformer, fails_at: int, tokens: int) -> None:
    batch = transformer.pack(sequences(5, 7))
    computed = transformer.hidden(batch)
    buckets = (*SMALL, Bucket(256, 32))
    recorder = Rerun()
    recorder.fails_at = fails_at
    why = Speedups(transformer, 64).record(recorder, buckets)
    assert why is not None
    assert f"recorded for {tokens} tokens, fails: out of memory" in why
    assert transformer.recorded == tuple(bucket for bucket in buckets if bucket.tokens != tokens)
    recorder.replays = 0
    torch.testing.assert_close(transformer.hidden(batch), computed)
    assert recorder.replays == 1


@torch.inference_mode()
def test_a_sequence_that_is_longer_than_the_recorded_ones_is_computed(
    transformer: PackedTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.runtime.models.transformer.cuda_graphs.LONGEST", 20)
    recorder = Rerun()
    assert Speedups(transformer, 64).record(recorder, SMALL) is None
    recorder.replays = 0
    transformer.hidden(transformer.pack(sequences(21, 4)))
    assert recorder.replays == 0
    transformer.hidden(transformer.pack(sequences(20, 4)))
    assert recorder.replays == 1


def test_a_large_batch_computes_at_most_a_quarter_more() -> None:
    sizes = [bucket.tokens for bucket in BUCKETS]
    assert sizes[0] == 64
    assert sizes[-1] == 16_384
    assert max(after / before for before, after in pairwise(sizes) if before >= 1024) == 1.25


def test_without_one_call_for_all_sequences_nothing_is_recorded(tiny_folder: TinyFolder) -> None:
    transformer = text_tower(load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32"))).transformer
    recorder = Rerun()
    recorder.error = AssertionError("shapes of groups differ from batch to batch")
    assert Speedups(transformer, 64).record(recorder, SMALL) is None


@pytest.mark.parametrize("kind", ["bert-mean", "modernbert-cls", "qwen3-embed-left"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs are of CUDA")
@torch.inference_mode()
def test_a_graph_gives_what_a_forward_gives(kind: str, tiny_folder: TinyFolder) -> None:
    config = EngineConfig(model=str(tiny_folder(kind)), device="cuda", cuda_graphs=False)
    transformer = text_tower(load_model(config)).transformer
    batches = [transformer.pack(sequences(*lengths)) for lengths in ((5, 5, 1), (30, 9), (16,) * 7)]
    computed = [transformer.hidden(batch).float() for batch in batches]
    assert Speedups(transformer, 64).record(cuda_recorder(transformer.model.device)) is None
    for batch, wanted in zip(batches, computed, strict=True):
        torch.testing.assert_close(transformer.hidden(batch).float(), wanted, atol=0.02, rtol=0.05)
