"""Choice of bfloat16 or float32 on this processor, by measurement or by its features."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import torch

from staged_pool.runtime.models.devices.kernel_choices import capabilities
from staged_pool.runtime.models.kernels.linear import NO_KERNEL, PrepackedLinear, has_prepacked
from staged_pool.runtime.models.kernels.torch_threads import restore_threads
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_TOKENS: Final = 256
_WIDTH: Final = 768
_INNER: Final = 3072
"""Size of the measured product: 256 tokens at the wide layer of a BERT-base. It takes a few milliseconds."""

_TRIES: Final = 5
_LEAST_GAIN: Final = 1.2
"""Speedup that bfloat16 must reach: it rounds to eight bits, so a smaller gain is not worth it."""


def bfloat16_pays(ops: Any = torch.ops) -> bool:
    """Measure whether the CPU multiplies matrices in bfloat16 much faster than in float32.

    Without an instruction for it there is no measurement: emulated bfloat16 is always slower. With one it may still be
    slower: if a hypervisor hides the matrix unit, some processors with `avx512_bf16` reach half the speed of float32.

    Args:
        ops: Operators of this build of torch.
    """
    able = capabilities()
    if not (able.get("avx512_bf16") or able.get("amx_bf16")) or not has_prepacked(torch.bfloat16, ops):
        return False
    try:
        gain = _seconds(torch.float32) / _seconds(torch.bfloat16)
    except NO_KERNEL as error:
        log.info("model.no_bfloat16", reason=str(error))
        return False
    log.debug("model.bfloat16", times_as_quick=round(gain, 2))
    return gain > _LEAST_GAIN


def bfloat16_usually_pays(ops: Any = torch.ops) -> bool:
    """Predict `bfloat16_pays` from processor features, without a measurement.

    It pays with a matrix unit (`amx_bf16`), and where `avx512_bf16` runs at full rate. Elsewhere `avx512_bf16` reaches
    half the speed of float32.

    Args:
        ops: Operators of this build of torch.
    """
    able = capabilities()
    quick = able.get("amx_bf16") or (able.get("avx512_bf16") and "AMD" in str(able.get("cpu_name")))
    return bool(quick) and has_prepacked(torch.bfloat16, ops)


def _seconds(dtype: torch.dtype) -> float:
    """Measure a product with prepacked weights on one thread: the fastest of a few tries, in seconds."""
    linear = PrepackedLinear(torch.randn(_INNER, _WIDTH).to(dtype), None)
    x, quickest = torch.randn(_TOKENS, _WIDTH).to(dtype), math.inf
    with restore_threads(), torch.inference_mode():
        torch.set_num_threads(1)
        for _ in range(_TRIES):
            started = time.perf_counter()
            linear(x)
            quickest = min(quickest, time.perf_counter() - started)
    return quickest
