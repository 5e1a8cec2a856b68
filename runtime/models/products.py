"""How fused layers multiply: in which of several ways they are quickest on this processor, found out by trying.

That is asked twice, for a short text and for a batch: MKL lays weights out anew for each product, which counts where
that has few rows. It does so quicker where they lie as [in, out], and not as an `nn.Linear` has them. One core of a
Zen 3, all matrices of MiniLM in float32: 7.4 ms instead of 8.5 for 12 tokens (oneDNN 6.5), 26.3 instead of 27.9 for 96
(28.1), 243 instead of 246 for 1024 (280).

With AVX-512, oneDNN applies an activation, or adds, while it writes a product, and that costs next to nothing. With
AVX2 either costs more than another pass over the values, and the products themselves are slower than those of MKL. One
core of a Zen 3, `up` of MiniLM with its GELU, 512 tokens in float32: 10.7 ms fused, 8.0 ms with oneDNN's product, 7.3
ms with MKL's; `down` and what is added to it: 9.7 ms fused, 6.5 ms with MKL's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache
from typing import Final, Literal, NamedTuple

import structlog
import torch

from staged_pool.runtime.models.linear import prepacked
from staged_pool.runtime.models.stack import Group, Layer, layers_as_one_call, split_layer

log = structlog.get_logger("staged_pool.models")

Product = Literal["fused", "prepacked", "plain", "split"]
"""`fused`: oneDNN's, of weights in its own layout, with activations and sums in it. `prepacked`: the same without them.
`plain`: MKL's, of weights as [in, out]. `split`: the same in parts, of which each is one thread's."""

_LAYOUTS: Final[tuple[Product, ...]] = ("fused", "prepacked", "plain")
_SHARED: Final[tuple[Product, ...]] = ("plain", "split")

_FEW_TOKENS: Final = 32
_FEW_TOKENS_SHARED: Final = 192
"""Of a batch with few rows, by one thread and by several. A Zen 3 multiplies those of MiniLM quicker with oneDNN up to
here, and with MKL beyond, which gains less by a second thread."""

FEW: Final = Group(sequences=1, tokens=16, seen=16)
SHARED: Final = Group(sequences=1, tokens=48, seen=48)
MANY: Final = Group(sequences=8, tokens=64, seen=64)

_TRIES: Final = 5
_LONG_ENOUGH_S: Final = 1.0
"""After which there are no more tries: what takes so long is not easily disturbed."""
_WORTH_IT: Final = 1.05
"""`fused` reads and writes the least, which counts for more when all cores do: another way must be quicker by this."""


class LayerShape(NamedTuple):
    """What the time that a layer takes depends on."""

    width: int
    inner: int
    """Values of a token between the two linear layers behind attention."""
    heads: int
    dtype: torch.dtype
    activation: str
    algorithm: str


@cache
def quickest_product(shape: LayerShape, batch: Group) -> Product:
    """Run a made-up layer on one thread, in each way that has a layout of its own; the quickest of a few tries counts,
    as for the plan of threads.

    A way that this build of torch, or this processor, does not have is not taken.

    Args:
        shape: Of the layer.
        batch: What it is given.
    """
    return _quickest(shape, batch, _LAYOUTS, threads=1)


@cache
def splits_pay(shape: LayerShape, threads: int) -> bool:
    """Whether threads that share a few tokens are quicker with `split` than with `plain`.

    MKL does not cut so few rows well: of ViT-B/32 a picture alone, 50 tokens, takes 103 ms on two cores of a Zen 3 in
    the one way and 71 in the other (oneDNN 70, in a layout of its own); 200 tokens 221 and 210.
    """
    return threads > 1 and _quickest(shape, SHARED, _SHARED, threads=threads) == "split"


def _quickest(shape: LayerShape, batch: Group, products: Sequence[Product], *, threads: int) -> Product:
    layers = {product: layer for product in products if (layer := _made_up(shape, product, threads)) is not None}
    quickest = dict.fromkeys(layers, math.inf)
    x = torch.randn(batch.sequences * batch.tokens, shape.width).to(shape.dtype)
    run, threads_before = layers_as_one_call(), torch.get_num_threads()
    torch.set_num_threads(threads)
    began = time.perf_counter()
    try:
        with torch.inference_mode():
            for turn in range(1 + _TRIES):  # the first one warms up: it is slower, and so does not count
                for product, layer in layers.items():
                    started = time.perf_counter()
                    run(x, [batch], [layer], False)
                    if turn:
                        quickest[product] = min(quickest[product], time.perf_counter() - started)
                if turn and time.perf_counter() - began > _LONG_ENOUGH_S:
                    break
    finally:
        torch.set_num_threads(threads_before)
    best = min(quickest, key=lambda product: quickest[product] * (1 if product == "fused" else _WORTH_IT))
    log.info(
        "model.product",
        product=best,
        tokens=batch.sequences * batch.tokens,
        threads=threads,
        width=shape.width,
        inner=shape.inner,
        dtype=str(shape.dtype),
    )
    return best


def few_tokens() -> int:
    """Up to how many are few, for the calling thread's number of torch threads."""
    return _FEW_TOKENS if torch.get_num_threads() == 1 else _FEW_TOKENS_SHARED


def as_taken(weight: torch.Tensor, product: Product) -> torch.Tensor:
    """[out, in], as the way takes it.

    Raises:
        RuntimeError: This build of torch, or this processor, does not have it.
    """
    return weight.detach().t().contiguous() if product == "plain" else prepacked(weight)


def _made_up(shape: LayerShape, product: Product, threads: int) -> Layer | None:
    """A layer with weights of no meaning; None where it cannot be run in this way."""

    def weight(out: int, into: int) -> torch.Tensor:
        return as_taken((torch.randn(out, into) / math.sqrt(into)).to(shape.dtype), product)

    if product == "split":
        plain = _made_up(shape, "plain", threads)
        return plain and split_layer(plain, threads)
    width, inner = shape.width, shape.inner
    ones, zeros = torch.ones(width, dtype=shape.dtype), torch.zeros(max(3 * width, inner), dtype=shape.dtype)
    try:
        return Layer(
            product=product,
            normed_first=False,
            heads=shape.heads,
            scaling=math.sqrt(shape.heads / width),
            qkv=weight(3 * width, width),
            qkv_bias=zeros[: 3 * width],
            out=weight(width, width),
            out_bias=zeros[:width],
            up=weight(inner, width),
            up_bias=zeros[:inner],
            activation=shape.activation,
            algorithm=shape.algorithm,
            down=weight(width, inner),
            down_bias=zeros[:width],
            first_norm=ones,
            first_norm_bias=zeros[:width],
            first_epsilon=1e-6,
            second_norm=ones,
            second_norm_bias=zeros[:width],
            second_epsilon=1e-6,
        )
    except RuntimeError:
        return None
