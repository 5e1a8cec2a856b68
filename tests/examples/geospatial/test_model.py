"""The segmentation model: the same everywhere, and of each tile alone."""

from __future__ import annotations

import numpy as np
import torch

from geo_segmentation.model import CLASSES, build_model
from geo_segmentation.tiles import EDGE


def tiles(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).normal(size=(count, 6, EDGE, EDGE)).astype(np.float32))


def test_its_weights_come_from_its_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build_model("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other = build_model("cpu").state_dict()
    assert all(torch.equal(value, other[name]) for name, value in one.state_dict().items())
    assert all(bool(value.isfinite().all()) for value in other.values())


def test_a_tile_has_the_same_classes_in_any_batch() -> None:
    model = build_model("cpu")
    given = tiles(5)
    together = model(given)
    alone = torch.cat([model(tile[None]) for tile in given])
    assert together.shape == (5, CLASSES, EDGE, EDGE)
    assert torch.allclose(together, alone, atol=1e-4)


def test_each_pixel_has_its_own_place() -> None:
    """A change in one patch moves the logits most there: no axis is swapped."""
    model = build_model("cpu")
    given = tiles(1)
    changed = given.clone()
    changed[:, :, 32:48, 80:96] += 5
    difference = (model(changed) - model(given)).abs().sum(1)[0]
    patches = difference.reshape(8, 16, 8, 16).sum((1, 3))
    assert divmod(int(patches.argmax()), 8) == (2, 5)


def test_all_classes_occur() -> None:
    assert set(build_model("cpu")(tiles(2)).argmax(1).unique().tolist()) == set(range(CLASSES))
