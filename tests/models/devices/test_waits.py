"""While a forward is launched on a GPU nobody waits for the device: the next one can begin before it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import pytest
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.kernels import transfer
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.tower import Tower
from staged_pool.runtime.models.transformer import speedups
from staged_pool.runtime.models.vision.image_embedder import ImageEmbedder
from staged_pool.runtime.models.vision.image_encoder import ImageEncoder
from staged_pool.runtime.payloads import Payload, TokenSequence
from tests.models.conftest import TinyFolder
from tests.models.meta import META, NoMark, Waits, to_meta

TEXTS: Final = (
    "bert-mean", "bert-max-dense", "bert-other-means", "bert-mean-cls", "xlmr-prompt", "modernbert-cls", "qwen3-last",
    "seqcls-multiclass", "reward-qwen3", "ce-xlmr-reranker", "ce-modernbert-mean", "ce-qwen3-lm", "tokcls-ner",
    "splade-bert", "splade-sum", "colbert-pylate", "colbert-hf", "gemma3-embed", "nomic-matryoshka", "deberta-mean",
    "bge-m3", "t5-mean", "mpnet-mean",
)  # fmt: skip
IMAGES: Final = (
    "vit", "vit-st-mean", "dinov2", "vit-labels", "clip", "clip-old-end", "siglip", "siglip2-fixed", "siglip2-naflex",
    "colpali", "qwen2-vl",
)  # fmt: skip

_THEIRS: Final = ("masking_utils.py", "modeling_deberta_v2.py")
"""Files of transformers that wait by themselves where batches are padded: for a mask that may hide nothing, and for
numbers that are copied. They cannot be told not to."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Lay nothing out for a CPU, and tell copies apart by their source memory."""
    for kind, names in (
        (speedups.Speedups, ("fuse", "prepack", "call_parts")),
        (ImageEncoder, ("fuse", "prepack")),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, lambda *_: None)
    for name in ("fuse", "prepack"):
        monkeypatch.setattr(ImageEmbedder, name, lambda _: None)
    watch = Waits()
    monkeypatch.setattr(transfer, "pinned", watch.pinned)
    monkeypatch.setattr(transfer, "StreamEvent", NoMark)
    return watch


def ours(waits: Waits) -> list[list[str]]:
    """The waits that are not in the code of transformers."""
    return [lines for lines in waits.found if not any(name in line for line in lines for name in _THEIRS)]


def varied(tower: Tower) -> Sequence[Payload]:
    """Inputs of several lengths, with pairs, prompts left out of pooling, and unseen expansions."""
    payloads = tower.sample_batch([5, 9, 1, 5])
    if not all(isinstance(one, TokenSequence) for one in payloads):
        return payloads
    first, second, *others = cast("Sequence[TokenSequence]", payloads)
    if first.images:
        return payloads
    return [replace(first, prompt_tokens=2), replace(second, unseen_tokens=1, first_tokens=3), *others]


@pytest.mark.parametrize("kind", [*TEXTS, *IMAGES])
def test_nobody_waits_for_the_device_while_a_forward_is_launched(
    kind: str, tiny_folder: TinyFolder, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(EngineConfig(model=str(tiny_folder(kind)), dtype="float32", device="cpu"))
    if kind == "qwen2-vl":  # whose transformer of images reads the size of each on the host, in transformers' code
        looking: Any = model.towers["image"]
        with torch.inference_mode():
            seen = [looking.image_embedder._features([looking.image_embedder._sample] * count) for count in range(1, 5)]
        monkeypatch.setattr(
            ImageEmbedder,
            "_features",
            lambda self, given: [torch.empty_like(each, device=META) for each in seen[len(given) - 1]],
        )
    for tower in model.towers.values():
        payloads = varied(tower)
        to_meta(tower)
        with torch.inference_mode(), waits.counted():
            begun = tower.launch(payloads)
        assert set(begun) == set(tower.outputs)
        assert ours(waits) == []
        assert tower.pads or waits.found == []
        waits.found.clear()


@pytest.mark.parametrize("way", ["padded", "by_length", "one_by_one"])
@pytest.mark.parametrize("kind", ["bert-mean", "qwen2-vl"])
def test_rows_of_their_own_are_laid_out_without_waiting(
    way: str, kind: str, tiny_folder: TinyFolder, waits: Waits
) -> None:
    config = EngineConfig(model=str(tiny_folder(kind)), dtype="float32", device="cpu", attention="padded")
    tower: Any = load_model(config).towers["text"]
    tower.transformer.run_rows = getattr(tower.transformer.rows, way)
    payloads = varied(tower)
    to_meta(tower)
    with torch.inference_mode(), waits.counted():
        tower.launch(payloads)
    assert ours(waits) == []


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda x: x.cpu(), id="a copy to the host"),
        pytest.param(lambda x: x.sum().item(), id="a number"),
        pytest.param(lambda x: bool(x.any()), id="a truth"),
        pytest.param(lambda x: x.tolist(), id="a list"),
        pytest.param(lambda x: x[x > 0], id="a mask that picks"),
        pytest.param(lambda x: x.nonzero(), id="places"),
        pytest.param(lambda x: torch.tensor([1, 2], device=x.device), id="numbers that are not pinned"),
        pytest.param(lambda x: torch.ones(2).to(x.device), id="a copy that is not pinned"),
        pytest.param(lambda x: x.copy_(torch.ones(3)), id="a copy in place"),
        pytest.param(lambda x: x.new_ones(3).repeat_interleave(x.long()), id="repeats whose number is not told"),
    ],
)
def test_every_wait_is_noticed(wait: Any, inference: bool) -> None:
    waits = Waits()
    try:
        with torch.inference_mode(inference), waits.counted():
            wait(torch.ones(3, device=META))
    except (RuntimeError, NotImplementedError):
        return
    assert waits.found
