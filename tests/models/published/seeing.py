"""Models of images and of pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.models.published import Layout, served
from tests.models.published.comparisons import all_of, images, pages, texts_of_two_towers
from tests.models.tiny import EVERY, edit_json
from tests.models.tiny.hub import after

_NEW: Final = "5.5"
_CODE: Final = {"AutoModel": "modeling_MMRet_CLIP.CLIPModel"}

LAYOUTS: Final[Mapping[str, Layout]] = {
    "apple/aimv2-large-patch14-224-lit": served(
        EVERY["aimv2"], all_of(images, texts_of_two_towers()), image_path="exact"
    ),
    "facebook/metaclip-2-worldwide-huge-quickgelu": served(EVERY["metaclip2"], images, image_path="exact"),
    "google/siglip2-base-patch16-224": served(
        EVERY["siglip2-fixed"], all_of(images, texts_of_two_towers(fill_to=64, lower=True)), image_path="exact"
    ),
    "google/siglip2-base-patch16-naflex": served(EVERY["siglip2-naflex"], images, needs=_NEW, image_path="exact"),
    "BAAI/BGE-VL-base": served(
        after(EVERY["clip"], lambda folder: edit_json(folder / "config.json", auto_map=_CODE)),
        all_of(images, texts_of_two_towers()),
        image_path="exact",
    ),
    "facebook/dinov2-with-registers-base": served(EVERY["dinov2-registers"], images, image_path="exact"),
    "vidore/colpali-v1.3-hf": served(EVERY["colpali"], pages, needs=_NEW, image_path="exact"),
    "vidore/colqwen2-v1.0-hf": served(EVERY["colqwen2"], pages, needs=_NEW, image_path="exact"),
}
"""Served layouts, by the name of the repository, or of the form."""
