"""Page retrievers that see an image in tiles have the vectors of transformers: ColModernVBERT, ColIdefics3, ColSmol."""

from __future__ import annotations

import functools
import io
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.images.exact_processor import read_exact
from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.settings import load_processor, read_image_settings
from staged_pool.runtime.models.images.sizes import TileGrid
from staged_pool.runtime.models.images.tiles import read_tiles
from staged_pool.runtime.models.images.to_device import to_device
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.preparation import ImagePreparation
from staged_pool.runtime.models.tokenizing.images import MultimodalReader
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, Output, TextInput
from staged_pool.stages.errors import ConfigError, InvalidInput, InvalidSetting
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Array, as_array
from tests.models.oracle import apart
from tests.models.requests import embed, prepare, score
from tests.models.tiny import TILED_PAGES, edit_json, write_json

EXACT = 1e-4
MULTI = frozenset({Output.MULTI_VECTOR})
WIDE, TALL, SMALL, LINE = encode(100, 80), encode(70, 150, "PNG", 1), encode(31, 47, "PNG", 3), encode(90, 3, "PNG", 4)
IMAGES = [WIDE, TALL, SMALL, LINE, encode(110, 120, "WEBP", 5)]
TILES = [10, 7, 7, 4, 10]
"""Tiles of each image, those of the grid and the whole image: together more than are encoded at once."""
QUERIES = ["A function call with many arguments", "naïve café, Ωmega 🙂", "short"]
PAGE = "User:<image>Describe the image.<end_of_utterance>\nAssistant:"
BEGIN = {"colmodernvbert": "<|begin_of_text|>", "colidefics3": "<|im_start|>"}
LAYER = {"colmodernvbert": "embedding_proj_layer", "colidefics3": "linear"}

Load = Callable[..., Encoder]


@pytest.fixture(scope="module")
def load(tiny_folder: TinyFolder) -> Load:
    @functools.cache
    def loaded(kind: str, attention: str = "packed", image_path: str = "fast") -> Encoder:
        return opened(tiny_folder(kind), attention=attention, image_path=image_path)

    return loaded


def opened(folder: Path, **settings: Any) -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32", **settings))


class Oracle:
    """A processor and a model of transformers, which see one input at a time.

    Args:
        folder: The folder, with the weights of a body and of a linear layer.
        weights: Weights of the body and of the layer, instead of those of the folder.
    """

    def __init__(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        torch.set_num_threads(1)
        own = json.loads((folder / "config.json").read_text())["model_type"] == "colmodernvbert"
        self.kind = "colmodernvbert" if own else "colidefics3"
        tokenizer = hf.AutoTokenizer.from_pretrained(folder)
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        count = json.loads((folder / "processor_config.json").read_text())["image_seq_len"]
        processor = hf.ColModernVBertProcessor if own else hf.Idefics3Processor
        self.processor = processor(images, tokenizer, image_seq_len=count)
        stored = weights or load_file(folder / "model.safetensors")
        if own:
            self.model: Any = hf.ColModernVBertForRetrieval.from_pretrained(folder).eval()
            return
        with warnings.catch_warnings(action="ignore"):
            self.body = hf.Idefics3Model(hf.Idefics3Config.from_pretrained(folder)).eval()
        left = self.body.load_state_dict(
            {name.removeprefix("model."): value for name, value in stored.items() if name.startswith("model.")}
        )
        assert not left.missing_keys
        self.layer = stored["linear.weight"], stored["linear.bias"]

    def given(self, text: str, *images: bytes, **options: Any) -> dict[str, Tensor]:
        shown = [Pillow.open(io.BytesIO(image)).convert("RGB") for image in images]
        more = {"images": [shown], **options} if shown else {}
        given = self.processor(text=[text], return_tensors="pt", **more)
        return {name: given[name] for name in ("input_ids", "attention_mask", "pixel_values") if name in given}

    def vectors(self, text: str, *images: bytes, **options: Any) -> Array:
        given = self.given(text, *images, **options)
        with torch.inference_mode():
            if self.kind == "colmodernvbert":
                return as_array(self.model(**given).embeddings[0])
            projected = torch.nn.functional.linear(self.body(**given).last_hidden_state[0], *self.layer)
            return as_array(torch.nn.functional.normalize(projected, dim=-1))

    def page(self, image: bytes, **options: Any) -> Array:
        return self.vectors(BEGIN[self.kind] + PAGE, image, **options)


@functools.cache
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def sequence(model: Encoder, given: TextInput | Image, **others: Any) -> TokenSequence:
    (prepared,) = prepare(model, EmbedRequest(inputs=(given,), outputs=MULTI, **others))
    assert isinstance(prepared.payload, TokenSequence)
    return prepared.payload


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", TILED_PAGES)
def test_pages_and_queries_have_the_oracles_vectors(
    kind: str, attention: str, tiny_folder: TinyFolder, load: Load
) -> None:
    model, asked = load(kind, attention), oracle(tiny_folder(kind))
    assert (model.card.attention, model.card.scoring) == (attention, "late-interaction")
    pages = [asked.page(image) for image in IMAGES]
    queries = [asked.vectors(query + "<end_of_utterance>" * 10) for query in QUERIES]
    texts = [asked.vectors(query) for query in QUERIES]
    shown = [Image(image) for image in IMAGES]
    for alone in (False, True):
        assert apart(embed(model, shown, Output.MULTI_VECTOR, alone=alone).multi_vector, pages) < EXACT
        found = embed(model, QUERIES, Output.MULTI_VECTOR, alone=alone, prompt_name="query")
        assert apart(found.multi_vector, queries) < EXACT
        assert apart(embed(model, QUERIES, Output.MULTI_VECTOR, alone=alone).multi_vector, texts) < EXACT
    scores = score(model, QUERIES[0], shown).scores
    assert np.abs(scores - [(queries[0] @ page.T).max(axis=1).sum() for page in pages]).max() < EXACT
    assert np.ptp(scores) > 100 * EXACT


@pytest.mark.parametrize("kind", TILED_PAGES)
def test_a_page_has_the_tokens_of_the_processor(kind: str, tiny_folder: TinyFolder, load: Load) -> None:
    """Tiles of the third row have no token of their own: their names are words."""
    model, asked = load(kind), oracle(tiny_folder(kind))
    for image, tiles in zip(IMAGES, TILES, strict=True):
        wanted = asked.given(BEGIN[kind] + PAGE, image)
        found = sequence(model, Image(image))
        assert found.ids == wanted["input_ids"][0].tolist()
        assert [*found.images[0].values.shape] == [*wanted["pixel_values"].shape[1:]]
        assert [*found.images[0].values.shape] == [tiles, 3, 32, 32]
        asking = Chat(({"role": "user", "content": (Image(image),)},))
        assert model.tokenize(asking, add_special_tokens=True).ids == found.ids
    chat = Chat(({"role": "user", "content": (Image(TALL),)},))
    assert "<row_3_col_1>" not in model.tokenize(chat, add_special_tokens=True).strings
    asking = Chat(({"role": "user", "content": (Image(WIDE), "Describe the image.")},))
    assert sequence(model, TextInput(asking)).ids == sequence(model, Image(WIDE)).ids
    with pytest.raises(InvalidInput, match="one image or one text at a time"):
        sequence(model, TextInput(Chat(({"role": "user", "content": (Image(WIDE), "Which one?")},))))


def test_a_query_is_cut_before_its_end(load: Load) -> None:
    whole = sequence(load("colmodernvbert"), TextInput("word " * 60), prompt_name="query").ids
    cut = sequence(load("colmodernvbert"), TextInput("word " * 60, 40), prompt_name="query").ids
    assert cut == whole[:29] + whole[-11:]


def test_the_exact_path_gives_the_same_tiles(tiny_folder: TinyFolder, load: Load) -> None:
    exact = load("colidefics3", image_path="exact")
    assert exact.images is not None
    assert (exact.images.path, load("colidefics3").images.path) == ("exact", "fast")  # type: ignore[union-attr]
    pages = [oracle(tiny_folder("colidefics3")).page(image) for image in IMAGES]
    assert apart(embed(exact, list(map(Image, IMAGES)), Output.MULTI_VECTOR).multi_vector, pages) < EXACT
    chat = Chat(({"role": "user", "content": (Image(TALL),)},))
    assert exact.tokenize(chat, add_special_tokens=True).ids == sequence(exact, Image(TALL)).ids


@pytest.mark.parametrize(
    "options", [{"do_image_splitting": False}, {"size": {"longest_edge": 33}}, {"size": {"longest_edge": 20}}]
)
def test_options_of_an_image_are_the_processors(options: Any, tiny_folder: TinyFolder, load: Load) -> None:
    model, asked = load("colidefics3"), oracle(tiny_folder("colidefics3"))
    given = dict(options)
    found = embed(model, [Image(image, given) for image in IMAGES], Output.MULTI_VECTOR).multi_vector
    assert apart(found, [asked.page(image, **options) for image in IMAGES]) < EXACT


@pytest.mark.parametrize("options", [{"size": {"longest_edge": 81}}, {"size": {"height": 3}}, {"max_pixels": 3}])
def test_other_options_of_an_image_are_rejected(options: Any, load: Load) -> None:
    with pytest.raises(InvalidSetting, match="image option"):
        sequence(load("colidefics3"), Image(WIDE, options))


SIZES = [(1, 1), (3, 90), (90, 3), (80, 80), (81, 33), (31, 32), (333, 240), (240, 334), (1, 700), (79, 160)]
RULES: list[dict[str, Any]] = [
    {},
    {"do_resize": False},
    {"size": {"longest_edge": 4100}, "max_image_size": {"longest_edge": 1500}},
    {"size": {"longest_edge": 33}, "resample": 2},
    {"do_image_splitting": False, "resample": 3},
]


@pytest.mark.parametrize("changes", RULES, ids=["folder", "own-size", "large", "bilinear", "whole"])
def test_tiles_are_those_of_transformers_to_the_last_bit(
    changes: dict[str, Any], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    shutil.copy(tiny_folder("colidefics3") / "preprocessor_config.json", tmp_path)
    edit_json(tmp_path / "preprocessor_config.json", **changes)
    settings, processor = read_image_settings(tmp_path), load_processor(tmp_path, trust_remote_code=False)
    assert settings.unknown is None
    assert isinstance(settings.resize, TileGrid)
    for height, width in SIZES[1:2] if settings.resize.longest > 4096 else SIZES:
        random = np.random.default_rng(height * width)
        image = Pillow.fromarray(random.integers(256, size=(height, width, 3), dtype=np.uint8))
        found, wanted = read_tiles(image, settings.resize), read_exact(image, processor, settings, {})
        assert found.grid == wanted.grid
        assert found.values.shape == wanted.values.shape
        assert len(found.values) == math.prod(found.grid or ()) + (math.prod(found.grid or ()) > 1)
        scaled = to_device([found], Scale(settings.scale.factor, settings.scale.bias, "tiles"), "cpu", torch.float32)
        assert np.abs(scaled.numpy() - wanted.values).max() < 1e-6


def test_a_process_without_weights_makes_the_same_tiles(load: Load) -> None:
    model = load("colidefics3")
    assert model.images is not None
    assert isinstance(model.image_inputs, MultimodalReader)
    described = ImagePreparation.of(model.images, model.image_inputs)
    assert described.settings() == model.images.settings
    assert described.embedded == (model.image_inputs.spec, model.image_inputs.layout)


def copied(tiny_folder: TinyFolder, kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(kind), tmp_path / "model"))


def test_prompts_of_the_folder_are_used(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder, "colmodernvbert", tmp_path)
    edit_json(folder / "processor_config.json", visual_prompt_prefix="See <image> here:", query_prefix="Find: ")
    model, asked = opened(folder), Oracle(folder)
    found = embed(model, [Image(TALL)], Output.MULTI_VECTOR).multi_vector
    assert apart(found, [asked.vectors("See <image> here:", TALL)]) < EXACT
    found = embed(model, QUERIES, Output.MULTI_VECTOR, prompt_name="query").multi_vector
    assert apart(found, [asked.vectors(f"Find: {text}{'<end_of_utterance>' * 10}") for text in QUERIES]) < EXACT


def test_colmodernvbert_of_colpali_engine_is_read(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder, "colmodernvbert", tmp_path)
    names = {"vlm.": "model.", "embedding_proj_layer.": "custom_text_proj."}
    weights = load_file(folder / "model.safetensors")
    for old, new in names.items():
        weights = {name.replace(old, new, 1): value for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())["vlm_config"]
    write_json(folder / "config.json", {**config, "architectures": ["ColModernVBert"]})
    found = embed(opened(folder), [Image(TALL)], Output.MULTI_VECTOR).multi_vector
    assert apart(found, [oracle(tiny_folder("colmodernvbert")).page(TALL)]) < EXACT


def test_an_adapter_of_colsmol_is_merged(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base, folder = tiny_folder("colidefics3"), tmp_path / "adapter"
    folder.mkdir()
    torch.manual_seed(3)
    weights, parts = load_file(base / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in list(weights.items()):
        if ("text_model" in name and name.endswith(("q_proj.weight", "down_proj.weight"))) or name == "linear.weight":
            first, second = torch.randn(4, tensor.shape[1]) * 0.2, torch.randn(tensor.shape[0], 4) * 0.2
            weights[name] = tensor + 2.0 * second @ first
            module = f"base_model.model.{name.removesuffix('.weight')}"
            parts |= {f"{module}.lora_A.weight": first, f"{module}.lora_B.weight": second}
    assert len(parts) == 2 * (2 * 3 + 1)
    save_file(parts, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "FEATURE_EXTRACTION"}
    write_json(folder / "adapter_config.json", {**settings, "base_model_name_or_path": str(base)})
    wanted = Oracle(base, weights).page(WIDE)
    assert np.abs(wanted - oracle(base).page(WIDE)).max() > 100 * EXACT
    assert apart(embed(opened(folder), [Image(WIDE)], Output.MULTI_VECTOR).multi_vector, [wanted]) < EXACT


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", TILED_PAGES)
def test_one_vector_of_a_page_is_pooled(kind: str, attention: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """BiModernVBert takes the mean of all tokens, and BiIdefics3 the last one."""
    folder = copied(tiny_folder, kind, tmp_path)
    stored = {
        name.replace("vlm.", "model.", 1): value for name, value in load_file(folder / "model.safetensors").items()
    }
    weights = {name: value for name, value in stored.items() if name.startswith("model.")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    name = {"colmodernvbert": "BiModernVBert", "colidefics3": "BiIdefics3"}[kind]
    write_json(folder / "config.json", {**content.get("vlm_config", content), "architectures": [name]})
    asked = oracle(tiny_folder(kind))
    body = asked.model.vlm if kind == "colmodernvbert" else asked.body

    def pooled(text: str, *images: bytes) -> Array:
        with torch.inference_mode():
            hidden = body(**asked.given(text, *images)).last_hidden_state[0]
        return as_array(
            torch.nn.functional.normalize(hidden.mean(0) if kind == "colmodernvbert" else hidden[-1], dim=-1)
        )

    model = opened(folder, attention=attention)
    assert (model.card.attention, model.card.scoring) == (attention, "bi-encoder")
    pages = [pooled(BEGIN[kind] + PAGE, image) for image in IMAGES]
    queries = [pooled(query + "<end_of_utterance>" * 10) for query in QUERIES]
    for alone in (False, True):
        assert apart(embed(model, list(map(Image, IMAGES)), Output.DENSE, alone=alone).dense, pages) < EXACT
        asks = embed(model, QUERIES, Output.DENSE, alone=alone, prompt_name="query")
        assert apart(asks.dense, queries) < EXACT
    assert np.abs(score(model, QUERIES[0], list(map(Image, IMAGES))).scores - pages @ queries[0]).max() < EXACT


def test_siglips_own_pooling_may_be_missing(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder, "colmodernvbert", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vlm_config"]["vision_config"]["vision_use_head"] = True
    write_json(folder / "config.json", config)
    found = embed(opened(folder), [Image(WIDE)], Output.MULTI_VECTOR).multi_vector
    assert apart(found, [oracle(tiny_folder("colmodernvbert")).page(WIDE)]) < EXACT


def test_settings_that_contradict_each_other_are_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder, "colidefics3", tmp_path)
    edit_json(folder / "processor_config.json", image_seq_len=64)
    with pytest.raises(ConfigError, match=r"image_seq_len=64, but config\.json makes 4 vectors of a tile"):
        read_folder(folder)
    edit_json(folder / "processor_config.json", image_seq_len=4, visual_prompt_prefix="No image")
    with pytest.raises(ConfigError, match="visual_prompt_prefix must have one <image>"):
        read_folder(folder)
    edit_json(folder / "processor_config.json", visual_prompt_prefix=None)
    edit_json(folder / "preprocessor_config.json", max_image_size={"longest_edge": 16})
    with pytest.raises(ConfigError, match=r"asks for tiles of 32 x 32 pixels \(max_image_size\)"):
        opened(folder)


def test_a_tokenizer_without_the_token_around_tiles_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder, "colidefics3", tmp_path)
    for file in folder.glob("*token*.json"):
        file.write_text(file.read_text().replace("<fake_token_around_image>", "<another>"))
    with pytest.raises(ConfigError, match="<fake_token_around_image> is missing"):
        opened(folder)


def test_another_body_of_a_tiled_retriever_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder, "colmodernvbert", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "vlm_config": {"model_type": "qwen2_vl"}})
    with pytest.raises(ConfigError, match="vlm_config: model_type='qwen2_vl' is not supported"):
        read_folder(folder)
