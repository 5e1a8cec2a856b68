"""Seeds that have found a bug once: they are run first, on both backends.

A seed keeps its world only as long as `world.draw` is left alone, so each has its cause beside it, and a mutation of
`mutations.py` where the cause can be planted again.
"""

FOUND = {
    1: "items of a caller who had left went on changing what admission counts",
    70: "a caller at the door while the engine closed got anyio's error rather than the engine's",
    76: "of two drains at once the first never heard that the engine was empty",
    240: "a broken engine said so only after the preprocess calls that still ran",
    418: "a stop waited for every forward of a batch that was being bisected, rather than for one",
    12331: "a caller who waited for room in front of parse heard of a drain's end only when there was room",
}
