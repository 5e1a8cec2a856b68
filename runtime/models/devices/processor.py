"""What this processor is quick at, where what it says of itself does not tell."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import torch

from staged_pool.runtime.models.devices.kernel_choices import capabilities
from staged_pool.runtime.models.kernels.linear import NO_KERNEL, PrepackedLinear, has_prepacked
from staged_pool.runtime.models.kernels.torch_threads import threads_kept
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_TOKENS: Final = 256
_WIDTH: Final = 768
_INNER: Final = 3072
"""Of the product that is tried: a batch at the wide layer of a BERT-base. It takes a few milliseconds."""

_TRIES: Final = 5
_WORTH_IT: Final = 1.2
"""bfloat16 rounds to eight bits. For less than this it is not taken."""


def bfloat16_pays(ops: Any = torch.ops) -> bool:
    """Find out, by trying, that the CPU multiplies matrices in bfloat16 much quicker than in float32.

    Where it has no instruction for it, that is not tried: emulated, it is slower than any other. Where it has one, that
    says little: without its matrix unit, which a hypervisor may hide, a processor may do half as much in bfloat16.

    Args:
        ops: The operators of this build of torch.
    """
    able = capabilities()
    if not (able.get("avx512_bf16") or able.get("amx_bf16")) or not has_prepacked(torch.bfloat16, ops):
        return False
    try:
        gain = _seconds(torch.float32) / _seconds(torch.bfloat16)
    except NO_KERNEL as error:
        log.info("model.no_bfloat16", reason=str(error))
        return False
    log.info("model.bfloat16", times_as_quick=round(gain, 2))
    return gain > _WORTH_IT


def bfloat16_usually_pays(ops: Any = torch.ops) -> bool:
    """The same by what the processor says of itself, without a stopwatch: it has a matrix unit, or is an AMD with
    bfloat16.

    Without the matrix unit, Intel's processors multiply at half the speed of float32.

    Args:
        ops: The operators of this build of torch.
    """
    able = capabilities()
    quick = able.get("amx_bf16") or (able.get("avx512_bf16") and "AMD" in str(able.get("cpu_name")))
    return bool(quick) and has_prepacked(torch.bfloat16, ops)


def _seconds(dtype: torch.dtype) -> float:
    """What a product takes on one thread, of weights that were laid out for it; the quickest of a few tries counts."""
    linear = PrepackedLinear(torch.randn(_INNER, _WIDTH).to(dtype), None)
    x, quickest = torch.randn(_TOKENS, _WIDTH).to(dtype), math.inf
    with threads_kept(), torch.inference_mode():
        torch.set_num_threads(1)
        for _ in range(_TRIES):
            started = time.perf_counter()
            linear(x)
            quickest = min(quickest, time.perf_counter() - started)
    return quickest
