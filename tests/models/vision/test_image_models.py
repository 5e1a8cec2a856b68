"""Models with a tower for images, against transformers and sentence-transformers on the same folder."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
import transformers
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.kernels.linear import PrepackedLinear
from staged_pool.runtime.models.kernels.packed_embeddings import PackedEmbeddings
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.image import ImageTower
from staged_pool.runtime.models.transformer.fused import FusedLayers
from staged_pool.runtime.payloads import PreparedImage, TokenSequence
from staged_pool.runtime.requests import MODEL_MAX, Chat, ClassifyRequest, EmbedRequest, Image, Output, TextInput
from staged_pool.runtime.tasks.plan import plan
from staged_pool.stages.errors import InvalidInput, Unsupported, UnusableMedia
from tests.models import oracle
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.images.drawing import drawing, encode, image
from tests.models.oracle import Array
from tests.models.requests import classify, embed, prepare, score, text_tower
from tests.models.tiny import IMAGE_CLASSIFIERS, IMAGE_ENCODERS, TWO_TOWERS, edit_json
from tests.models.tiny.images import LABELS, PROJECTION

FILES = [
    encode(drawing(640, 480, 1), "JPEG", quality=90),
    encode(drawing(333, 517, 2), "PNG"),
    encode(drawing(300, 90, 3), "WEBP", quality=90),
    encode(drawing(61, 47, 4), "PNG"),
    encode(drawing(1280, 720, 5), "JPEG", quality=75),
]
IMAGES = [Image(file) for file in FILES]

TEXTS = [
    "A man is eating food.",
    "Stock markets FELL sharply today, said Tom, again and again, until nothing was left of them. " * 8,
    "naïve café, Ωmega 🙂",
    "short",
    "what stands <|endoftext|> behind the end </s> is not read",
    "",
]

EXACT = 1e-5
"""Largest distance of values of up to 5 from those of transformers; 3e-6 is seen."""

DRAFT = 0.99
"""Least cosine between a noisy image decoded smaller and the whole; 0.994 is seen."""

FAST = 0.9999
"""Cosine of a fast path's vector with the exact one's: those seen are 0.999998 at least."""


def cosines(found: Array, wanted: Array) -> Array:
    lengths: Array = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    products: Array = np.einsum("ij,ij->i", found, wanted)
    return products / lengths


def unit(vectors: Array) -> Array:
    lengths: Array = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths


def dense(model: Encoder, inputs: Sequence[str | Image], *, alone: bool = False) -> Array:
    found = embed(model, inputs, Output.DENSE, normalize=False, alone=alone).dense
    assert found is not None
    return found


def image_tower(model: Encoder) -> ImageTower:
    tower = model.towers["image"]
    assert isinstance(tower, ImageTower)
    return tower


def body(kind: str) -> str:
    """Return the model's place in its folder."""
    return "0_CLIPModel" if kind == "clip-st-old" else ""


@pytest.mark.parametrize("kind", [*TWO_TOWERS, *(kind for kind in IMAGE_ENCODERS if kind != "vit-st-mean")])
def test_exact_vectors_of_images_are_those_of_transformers(
    kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    wanted = oracle.image_vectors(tiny_folder(kind) / body(kind), FILES)
    model = load_tiny(kind, image_path="exact")
    assert np.abs(dense(model, IMAGES) - wanted).max() < EXACT
    assert np.abs(dense(model, IMAGES, alone=True) - wanted).max() < EXACT


@pytest.mark.parametrize("kind", ["clip-st", "clip-st-old", "vit-st-mean"])
def test_exact_vectors_of_images_are_those_of_sentence_transformers(
    kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    found = embed(load_tiny(kind, image_path="exact"), IMAGES, Output.DENSE).dense
    assert found is not None
    assert np.abs(found - oracle.embedded_images(tiny_folder(kind), FILES)).max() < EXACT


@pytest.mark.parametrize("kind", ["clip", "clip-st", "clip-st-old", "vit-st-mean", "dinov2"])
def test_a_folder_that_sentence_transformers_saves_gives_its_vectors(
    kind: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    oracle.loaded("SentenceTransformer", tiny_folder(kind)).save_pretrained(str(tmp_path), create_model_card=False)
    model = load_model(EngineConfig(model=str(tmp_path), dtype="float32", image_path="exact"))
    found = embed(model, IMAGES, Output.DENSE).dense
    assert found is not None
    assert np.abs(found - oracle.embedded_images(tmp_path, FILES)).max() < EXACT
    if "text" in model.card.lanes:
        found = embed(model, TEXTS, Output.DENSE).dense
        assert found is not None
        assert np.abs(found - oracle.dense(tmp_path, TEXTS)).max() < EXACT


@pytest.mark.parametrize("kind", [*TWO_TOWERS, *IMAGE_ENCODERS])
def test_the_fast_path_gives_nearly_the_same_vectors(kind: str, load_tiny: LoadTiny) -> None:
    exact, fast = load_tiny(kind, image_path="exact"), load_tiny(kind)
    assert [model.images and model.images.path for model in (exact, fast)] == ["exact", "fast"]
    found = dense(fast, IMAGES)
    assert cosines(found, dense(exact, IMAGES)).min() > FAST
    assert np.abs(found - dense(fast, IMAGES, alone=True)).max() < EXACT


@pytest.mark.parametrize("kind", [*TWO_TOWERS, *IMAGE_ENCODERS])
def test_a_draft_gives_nearly_the_same_vectors_and_nobody_gets_one_unasked(kind: str, load_tiny: LoadTiny) -> None:
    files: list[str | Image] = [image(1920, 1080, seed, "JPEG") for seed in range(3)]
    sharp, draft = dense(load_tiny(kind), files), dense(load_tiny(kind, image_draft=True), files)
    assert cosines(sharp, draft).min() > DRAFT
    assert not np.array_equal(sharp, draft)
    assert np.array_equal(sharp, dense(load_tiny(kind, image_draft=False), files))


@pytest.mark.parametrize("kind", [*TWO_TOWERS, *IMAGE_ENCODERS])
def test_bfloat16_gives_nearly_the_same_vectors(kind: str, load_tiny: LoadTiny) -> None:
    inputs: list[str | Image] = [*IMAGES, *(TEXTS if kind in TWO_TOWERS else [])]
    assert cosines(dense(load_tiny(kind, dtype="bfloat16"), inputs), dense(load_tiny(kind), inputs)).min() > 0.999


@pytest.mark.parametrize("kind", TWO_TOWERS)
def test_vectors_of_texts_are_those_of_transformers(kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny) -> None:
    fill_to = 64 if kind.startswith("siglip") else None
    texts = [text.lower() for text in TEXTS] if kind.startswith("siglip2") else TEXTS  # as the authors' code does first
    wanted = oracle.text_features(tiny_folder(kind) / body(kind), texts, fill_to=fill_to)
    model = load_tiny(kind)
    assert np.abs(dense(model, TEXTS) - wanted).max() < EXACT
    assert np.abs(dense(model, TEXTS, alone=True) - wanted).max() < EXACT


@pytest.mark.parametrize(
    ("settings", "lowercased"),
    [
        ({}, True),
        ({"do_lower_case": None}, True),
        ({"do_lower_case": False}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": None}, False),
    ],
)
def test_texts_of_siglip2_are_lowercased_by_its_tokenizer(
    settings: dict[str, Any], lowercased: bool, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("siglip2-fixed"), tmp_path / "model")
    edit_json(folder / "tokenizer_config.json", **settings)
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    capital, small = dense(model, ["Stock Markets FELL", "stock markets fell"])
    assert np.array_equal(capital, small) == lowercased
    assert any("texts are lowercased" in note for note in model.card.notes) == lowercased
    assert not any("which is followed" in note for note in model.card.notes)


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", [kind for kind in TWO_TOWERS if kind.startswith("clip")])
def test_texts_of_clip_may_be_packed_to_a_row_that_is_longer_than_its_table_of_positions(
    kind: str, attention: str, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    assert load_tiny(kind).card.attention == "packed"
    texts = [*TEXTS, "a text of a middle length"] * 3
    wanted = oracle.text_features(tiny_folder(kind) / body(kind), texts, fill_to=None)
    model = load_tiny(kind, attention=attention)
    request = EmbedRequest(inputs=tuple(TextInput(text, MODEL_MAX) for text in texts))
    assert sum(one.payload.tokens for one in prepare(model, request)) > 2 * model.card.max_tokens
    assert np.abs(dense(model, texts) - wanted).max() < EXACT


def test_a_row_that_is_found_to_give_something_else_is_not_used(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, logged: list[structlog.typing.EventDict]
) -> None:
    def wrong(self: PackedEmbeddings, *, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        vectors: Tensor = self.token_embedding(input_ids) + self.position_embedding(position_ids * 0)
        return vectors

    monkeypatch.setattr(PackedEmbeddings, "forward", wrong)
    model = load_model(EngineConfig(model=str(tiny_folder("clip")), dtype="float32"))
    assert model.card.attention == "padded"
    (reason,) = [event["reason"] for event in logged if event["event"] == "model.padded"]
    assert "gives other vectors on a packed batch" in reason
    assert not any(isinstance(module, PackedEmbeddings) for module in text_tower(model).transformer.model.modules())
    assert np.abs(dense(model, TEXTS) - oracle.text_features(tiny_folder("clip"), TEXTS, fill_to=None)).max() < EXACT


@pytest.mark.parametrize("kind", ["clip-st", "clip-st-old"])
def test_vectors_of_texts_are_those_of_sentence_transformers(
    kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    found = embed(load_tiny(kind), TEXTS, Output.DENSE).dense
    assert found is not None
    assert np.abs(found - oracle.dense(tiny_folder(kind), TEXTS)).max() < EXACT


@pytest.mark.parametrize("kind", [kind for kind in TWO_TOWERS if kind.startswith("siglip")])
def test_every_text_of_siglip_is_filled_up(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    request = EmbedRequest(
        inputs=(
            TextInput("short"),
            TextInput("short", 3),
            TextInput((7, 8, 9)),
            TextInput("short", add_special_tokens=False),
        )
    )
    for prepared in prepare(model, request):
        assert isinstance(prepared.payload, TokenSequence)
        assert prepared.tokens == len(prepared.payload.ids) == 64
        assert (prepared.payload.unseen_tokens > 0) == (kind == "siglip-masked")


@pytest.mark.parametrize("kind", IMAGE_CLASSIFIERS)
@pytest.mark.parametrize("activate", [True, False])
def test_labels_of_images_are_those_of_transformers(
    kind: str, activate: bool, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    wanted = oracle.image_labels(tiny_folder(kind), FILES, activate=activate)
    model = load_tiny(kind, image_path="exact")
    found = classify(model, IMAGES, activate=activate)
    assert found.labels == LABELS
    assert np.abs(found.scores - wanted).max() < EXACT
    assert np.abs(classify(model, IMAGES, activate=activate, alone=True).scores - wanted).max() < EXACT
    assert np.abs(classify(load_tiny(kind), IMAGES, activate=activate).scores - wanted).max() < 0.02


def test_a_classifier_gives_vectors_where_that_is_asked_for(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("vit-labels")
    model = load_model(EngineConfig(model=str(folder), dtype="float32", task="embed", image_path="exact"))
    assert model.card.outputs == (Output.DENSE, Output.MULTI_VECTOR)
    found = embed(model, IMAGES, Output.DENSE, normalize=False).dense
    assert found is not None
    bare = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()
    processor = transformers.ViTImageProcessorPil.from_pretrained(folder)
    for vector, file in zip(found, FILES, strict=True):
        with torch.inference_mode():
            pixels = processor(images=Pillow.open(io.BytesIO(file)).convert("RGB"), return_tensors="pt")
            wanted = bare(**pixels).last_hidden_state[0, 0].numpy()
        assert np.abs(vector - wanted).max() < EXACT


@pytest.mark.parametrize("kind", IMAGE_ENCODERS)
def test_patches_have_the_vectors_of_the_last_layer(kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny) -> None:
    found = embed(load_tiny(kind, image_path="exact"), IMAGES, Output.MULTI_VECTOR, normalize=False).multi_vector
    assert found is not None
    for vectors, file in zip(found, FILES, strict=True):
        assert np.abs(vectors - oracle.patch_vectors(tiny_folder(kind), file)).max() < EXACT


@pytest.mark.parametrize("kind", ["clip", "siglip2-naflex"])
def test_texts_and_images_of_one_request_are_as_those_of_two(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    mixed = embed(model, [TEXTS[0], IMAGES[0], IMAGES[1], TEXTS[2]], Output.DENSE)
    texts, images = (embed(model, inputs, Output.DENSE) for inputs in ([TEXTS[0], TEXTS[2]], IMAGES[:2]))
    assert mixed.dense is not None
    assert texts.dense is not None
    assert images.dense is not None
    assert np.abs(mixed.dense[[0, 3]] - texts.dense).max() < EXACT
    assert np.abs(mixed.dense[[1, 2]] - images.dense).max() < EXACT
    assert mixed.usage.prompt_tokens == texts.usage.prompt_tokens + images.usage.prompt_tokens


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_text_and_an_image_are_compared_by_the_cosine_of_their_vectors(
    kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny
) -> None:
    model = load_tiny(kind, image_path="exact")
    fill_to = 64 if kind == "siglip" else None
    text = unit(oracle.text_features(tiny_folder(kind), TEXTS[:1], fill_to=fill_to))
    images = unit(oracle.image_vectors(tiny_folder(kind), FILES))
    assert np.abs(score(model, TEXTS[0], IMAGES).scores - images @ text[0]).max() < EXACT
    both = score(model, IMAGES[0], [IMAGES[1], TEXTS[0]]).scores
    assert np.abs(both - np.stack([images[1], text[0]]) @ images[0]).max() < EXACT


def test_images_of_any_shape_have_as_many_patches_as_they_need(load_tiny: LoadTiny) -> None:
    prepared = prepare(load_tiny("siglip2-naflex"), EmbedRequest(inputs=tuple(IMAGES)))
    payloads = [one.payload for one in prepared if isinstance(one.payload, PreparedImage)]
    grids = [one.pixels.grid for one in payloads]
    assert all(grid is not None and grid[0] * grid[1] <= 30 for grid in grids)
    assert len({one.tokens for one in payloads}) > 1
    assert [one.tokens for one in payloads] == [one.tokens for one in prepared]
    assert len({one.batch_key for one in prepared}) == 1


@pytest.mark.parametrize("kind", ["clip", "siglip2-naflex"])
def test_images_and_texts_in_many_threads_are_as_they_are_alone(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    inputs: list[str | Image] = [*IMAGES, *TEXTS[:4]] * 3
    alone = [dense(model, [one]) for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda one: dense(model, [one]), inputs))
    for one, other in zip(alone, at_once, strict=True):
        assert np.abs(one - other).max() < EXACT


@pytest.mark.parametrize(("kind", "tokens"), [("clip", 17), ("siglip", 16), ("vit", 17), ("dinov2-labels", 17)])
def test_an_image_costs_its_patches_and_what_stands_beside_them(kind: str, tokens: int, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    request = ClassifyRequest(inputs=(IMAGES[0],)) if "labels" in kind else EmbedRequest(inputs=(IMAGES[0],))
    (prepared,) = prepare(model, request)
    assert isinstance(prepared.payload, PreparedImage)
    assert prepared.tokens == prepared.payload.tokens == tokens
    assert prepared.payload.pixels.values.dtype == np.uint8


@pytest.mark.parametrize(
    ("kind", "lanes", "outputs"),
    [
        ("clip", ("text", "image"), (Output.DENSE,)),
        ("siglip2-naflex", ("text", "image"), (Output.DENSE,)),
        ("vit", ("image",), (Output.DENSE, Output.MULTI_VECTOR)),
        ("vit-labels", ("image",), (Output.LABELS,)),
    ],
)
def test_the_card_says_what_is_read(
    kind: str, lanes: tuple[Lane, ...], outputs: tuple[Output, ...], load_tiny: LoadTiny
) -> None:
    model = load_tiny(kind)
    assert model.card.lanes == lanes
    assert model.card.outputs == outputs
    assert model.card.architecture.startswith(("CLIPModel", "Siglip2Model", "ViTModel"))
    assert model.pads("image") == (kind == "siglip2-naflex")
    if lanes == ("image",):
        assert (model.card.vocabulary, model.card.max_tokens) == (0, 17)


def test_a_model_of_images_alone_rejects_texts(load_tiny: LoadTiny) -> None:
    model = load_tiny("vit")
    with pytest.raises(Unsupported, match="reads no texts"):
        embed(model, ["a text"], Output.DENSE)
    with pytest.raises(Unsupported, match="reads no texts, so it has no tokenizer"):
        model.tokenize("a text", add_special_tokens=True)
    with pytest.raises(Unsupported, match="reads no texts, so it has no tokenizer"):
        model.detokenize([1], skip_special_tokens=True)


def test_a_model_of_texts_alone_rejects_images(load_tiny: LoadTiny) -> None:
    with pytest.raises(Unsupported, match="reads no images"):
        embed(load_tiny("bert-mean"), IMAGES, Output.DENSE)


def test_an_image_that_is_damaged_is_rejected_and_the_others_stand(load_tiny: LoadTiny) -> None:
    model = load_tiny("clip")
    inputs = [IMAGES[0], Image(FILES[0][:500]), IMAGES[1]]
    first, bad, last = model.preprocess(plan(EmbedRequest(inputs=tuple(inputs)), model.card).inputs)
    assert isinstance(bad, UnusableMedia)
    assert not isinstance(first, InvalidInput)
    assert not isinstance(last, InvalidInput)


def test_a_conversation_is_read_only_where_it_is_an_image(load_tiny: LoadTiny) -> None:
    model = load_tiny("clip")

    def chat(*parts: str | Image) -> TextInput:
        return TextInput(Chat(({"role": "user", "content": parts},)))

    (alone,) = prepare(model, EmbedRequest(inputs=(chat(IMAGES[0]),)))
    (plain,) = prepare(model, EmbedRequest(inputs=(IMAGES[0],)))
    assert isinstance(alone.payload, PreparedImage)
    assert isinstance(plain.payload, PreparedImage)
    assert np.array_equal(alone.payload.pixels.values, plain.payload.pixels.values)
    for parts in (("What is this?", IMAGES[0]), IMAGES[:2]):
        with pytest.raises(InvalidInput, match="no conversations of both"):
            prepare(model, EmbedRequest(inputs=(chat(*parts),)))


def test_a_prompt_goes_before_texts_and_never_before_images(load_tiny: LoadTiny) -> None:
    model = load_tiny("clip")
    plain, prompted = (
        embed(model, [TEXTS[0], IMAGES[0]], Output.DENSE, prompt=prompt).dense for prompt in ("", "find: ")
    )
    assert plain is not None
    assert prompted is not None
    assert np.abs(plain[0] - prompted[0]).max() > 1e-3
    assert np.array_equal(plain[1], prompted[1])


def test_images_that_options_make_larger_have_batches_of_their_own(load_tiny: LoadTiny) -> None:
    size = {"shortest_edge": 100}
    model = load_tiny("dinov2")
    with pytest.raises(InvalidInput, match="the model takes 64 x 64"):
        prepare(model, EmbedRequest(inputs=(Image(FILES[0], {"size": size, "do_center_crop": False}),)))
    found = dense(model, [IMAGES[0], Image(FILES[0], {"size": size})])
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize("kind", ["clip", "siglip", "vit", "dinov2"])
def test_both_towers_run_on_prepacked_layers(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    parts = [image_tower(model).encoder.image, *([text_tower(model).transformer.model] if kind in TWO_TOWERS else [])]
    for part in parts:
        assert any(isinstance(layer, PrepackedLinear | FusedLayers) for layer in part.modules())
        assert not any(type(layer) is nn.Linear for layer in part.modules())


@pytest.mark.parametrize("kind", TWO_TOWERS)
def test_every_parameter_is_counted_once(kind: str, tiny_folder: TinyFolder, load_tiny: LoadTiny) -> None:
    model, _ = oracle.image_model(tiny_folder(kind) / body(kind))
    assert load_tiny(kind).card.parameters == sum(p.numel() for p in model.parameters())
    assert load_tiny(kind).card.width == PROJECTION


def test_positions_that_old_checkpoints_hold_are_no_weights(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("clip"), tmp_path / "clip")
    tensors = load_file(folder / "model.safetensors")
    for tower in ("text_model", "vision_model"):
        tensors[f"{tower}.embeddings.position_ids"] = torch.arange(17).unsqueeze(0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load_model(EngineConfig(model=str(folder), torch_threads=1)).card.lanes == ("text", "image")


def test_images_of_different_shapes_run_by_themselves_where_padding_is_seen(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be with a vision model that does not look at its mask."""
    folder = tiny_folder("siglip2-naflex")
    wanted = oracle.image_vectors(folder, FILES)
    model_class = transformers.Siglip2VisionModel
    forward = model_class.forward

    def unmasked(self: Any, pixel_values: Any, pixel_attention_mask: Any, spatial_shapes: Any, **others: Any) -> Any:
        return forward(self, pixel_values, torch.ones_like(pixel_attention_mask), spatial_shapes, **others)

    monkeypatch.setattr(model_class, "forward", unmasked)
    model = load_model(EngineConfig(model=str(folder), dtype="float32", image_path="exact"))
    assert not model.pads("image")
    assert np.abs(dense(model, IMAGES) - wanted).max() < EXACT


def test_max_tokens_cuts_a_text_that_is_too_long(load_tiny: LoadTiny) -> None:
    with pytest.raises(InvalidInput, match="maximum context length is 77"):
        embed(load_tiny("clip"), TEXTS[1:2], Output.DENSE, max_tokens=None)
    assert embed(load_tiny("clip"), TEXTS[1:2], Output.DENSE, max_tokens=MODEL_MAX).usage.prompt_tokens == 77
