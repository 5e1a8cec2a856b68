"""How fused layers multiply: in which of several ways they are quickest on this processor, found out by trying.

That is asked twice, for a few short texts and for a batch: MKL lays weights out anew for each product, which counts
where that has few rows. It does so quicker where they lie as [in, out], and not as an `nn.Linear` has them. One core of
a Zen 3, all matrices of MiniLM in float32: 7.4 ms instead of 8.5 for 12 tokens (oneDNN 6.5), 26.3 instead of 27.9 for
96 (28.1), 243 instead of 246 for 1024 (280).

Up to how many tokens a batch has few is tried, too, on one thread and on several. Layers of MiniLM on a Xeon of the
fifth generation without its matrix unit, float32, texts of 12 tokens, MKL and oneDNN: on one thread 3.6 and 3.9 ms for
one of them, 11.9 and 13.7 for 6, 22.0 and 23.6 for 11, 34.1 and 32.5 for 16; on two threads 2.2 and 2.4 for one, but
7.9 and 7.4 for 6.

With AVX-512, oneDNN applies an activation, or adds, while it writes a product, and that costs next to nothing. With
AVX2 either costs more than another pass over the values, and the products themselves are slower than those of MKL. One
core of a Zen 3, `up` of MiniLM with its GELU, 512 tokens in float32: 10.7 ms fused, 8.0 ms with oneDNN's product, 7.3
ms with MKL's; `down` and what is added to it: 9.7 ms fused, 6.5 ms with MKL's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final, Literal, NamedTuple

import torch

from staged_pool.runtime.models.linear import NO_KERNEL, prepacked
from staged_pool.runtime.models.stack import Group, Layer, layers_as_one_call, split_layer
from staged_pool.runtime.models.threads import threads_kept
from staged_pool.runtime.models.tuning import has_wide_vectors
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

Product = Literal["fused", "prepacked", "plain", "split"]
"""`fused`: oneDNN's, of weights in its own layout, with activations and sums in it. `prepacked`: the same without them.
`plain`: MKL's, of weights as [in, out]. `split`: the same in parts, of which each is one thread's."""

LAYOUTS: Final[tuple[Product, ...]] = ("fused", "prepacked", "plain")
"""The ways that have a layout of their own."""

_PARTED: Final[tuple[Product, ...]] = ("plain", "split")

FEW: Final = (Group(sequences=1, tokens=16, seen=16), Group(sequences=4, tokens=16, seen=16))
MANY: Final = (Group(sequences=8, tokens=64, seen=64),)
"""What is tried for a few tokens, and for many."""

_SHARED: Final = Group(sequences=1, tokens=48, seen=48)
_SPLIT_TOKENS: Final = 192
"""What is tried for a few tokens that threads share, and up to how many a Zen 3 gains by it."""

_FEW_AT_MOST: Final = (1, 2, 4, 8, 12)
"""Texts of 16 tokens that may be few."""

_FEW_LAYERS: Final = 3
"""What few tokens take depends on where the weights of a layer happen to lie, and on that they are in no cache."""

_TRIES: Final = 3
_LONG_ENOUGH_S: Final = 1.0
"""After which there are no more tries: what takes so long is not easily disturbed."""
_IN_A_ROW: Final = 2
"""Runs of one way before the next has its turn. The first of them finds the weights of the other in the caches."""
_WORTH_IT: Final = 1.05
"""`fused` reads and writes the least, which counts for more when all cores do: for many tokens another way must be
quicker by this."""
_SOONER: Final = 1.02
"""The same for a few tokens, whose weights are most of what is read in any way."""


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
def quickest_product(shape: LayerShape, batches: tuple[Group, ...]) -> Product:
    """Run a made-up layer on one thread, in each way that has a layout of its own; the quickest of a few tries counts,
    as for the plan of threads.

    A way that this build of torch, or this processor, does not have is not taken.

    Args:
        shape: Of the layer.
        batches: What it is given; of several, each counts as much as the others (the geometric mean).
    """
    return _quickest(shape, batches, LAYOUTS, threads=1, worth_it=_WORTH_IT if batches == MANY else _SOONER)


@cache
def few_tokens(shape: LayerShape, few: Product, many: Product, threads: int) -> int:
    """Up to how many tokens are quicker with `few` than with `many`: 0, or one of the sizes that are tried.

    Args:
        shape: Of the layer.
        few: The quickest way for a few tokens on one thread.
        many: That for many.
        threads: That share the tokens.
    """
    if few == "split":
        return _SPLIT_TOKENS if threads > 1 else 0
    layers = _made_up_each(shape, (few, many), threads, _FEW_LAYERS)
    most, gained, most_gained = 0, 0.0, 0.0
    for sequences in _FEW_AT_MOST:
        batch = Group(sequences=sequences, tokens=FEW[0].tokens, seen=FEW[0].seen)
        seconds = _seconds(layers, batch, shape, threads)
        # Of all sizes up to here, for one may have been disturbed; what is hardly quicker is no gain.
        gained += math.log(seconds[many] / seconds[few] / _SOONER)
        if gained > most_gained:
            most, most_gained = batch.sequences * batch.tokens, gained
    log.info("model.few_tokens", product=few, up_to=most, threads=threads, width=shape.width, inner=shape.inner)
    return most


@cache
def splits_pay(shape: LayerShape, threads: int) -> bool:
    """Whether threads that share a few tokens are quicker with `split` than with `plain`.

    MKL does not cut so few rows well: of ViT-B/32 a picture alone, 50 tokens, takes 103 ms on two cores of a Zen 3 in
    the one way and 71 in the other (oneDNN 70, in a layout of its own); 200 tokens 221 and 210.
    """
    return threads > 1 and _quickest(shape, (_SHARED,), _PARTED, threads=threads, worth_it=_SOONER) == "split"


def usual_product() -> Product:
    """The way that is the quickest on most processors of a kind: see the measurements above."""
    return "fused" if has_wide_vectors() else "plain"


def _quickest(
    shape: LayerShape, batches: Sequence[Group], products: Sequence[Product], *, threads: int, worth_it: float
) -> Product:
    """The first of these ways, unless another is quicker by so much."""
    layers = _made_up_each(shape, products, threads, _FEW_LAYERS if batches == FEW else 1)
    tried = [_seconds(layers, batch, shape, threads) for batch in batches]
    cost = {product: math.prod(seconds[product] for seconds in tried) ** (1 / len(tried)) for product in tried[0]}
    best = min(cost, key=lambda product: cost[product] * (1 if product == products[0] else worth_it))
    log.info(
        "model.product",
        product=best,
        tokens=[batch.sequences * batch.tokens for batch in batches],
        threads=threads,
        width=shape.width,
        inner=shape.inner,
        dtype=str(shape.dtype),
    )
    return best


def _seconds(
    layers: Mapping[Product, list[Layer]], batch: Group, shape: LayerShape, threads: int
) -> dict[Product, float]:
    """What each takes; they are tried in turns."""
    quickest = dict.fromkeys(layers, math.inf)
    x = torch.randn(batch.sequences * batch.tokens, shape.width).to(shape.dtype)
    run = layers_as_one_call()
    began = time.perf_counter()
    with threads_kept(), torch.inference_mode():
        torch.set_num_threads(threads)
        for _ in range(_TRIES):
            for product, those in layers.items():
                for run_before in range(_IN_A_ROW):
                    started = time.perf_counter()
                    run(x, [batch], those, False)
                    if run_before:
                        quickest[product] = min(quickest[product], time.perf_counter() - started)
            if time.perf_counter() - began > _LONG_ENOUGH_S:
                break
    return quickest


def as_taken(weight: torch.Tensor, product: Product) -> torch.Tensor:
    """[out, in], as the way takes it.

    Raises:
        RuntimeError: This build of torch, or this processor, does not have it.
    """
    return weight.detach().t().contiguous() if product == "plain" else prepacked(weight)


def _made_up_each(
    shape: LayerShape, products: Sequence[Product], threads: int, count: int
) -> dict[Product, list[Layer]]:
    """So many layers for each way that there is."""
    made = {product: [_made_up(shape, product, threads) for _ in range(count)] for product in products}
    return {product: layers for product in products if (layers := [one for one in made[product] if one is not None])}


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
    except NO_KERNEL:
        return None
