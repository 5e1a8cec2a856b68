"""Page retrievers of colpali-engine give the vectors of their bodies, projected: ColQwen2, ColQwen2.5, ColQwen3."""

from __future__ import annotations

import functools
import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import EmbedRequest, Image, Output, TextInput
from staged_pool.stages.errors import ConfigError
from tests.models import qwen3_vl_oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Array, as_array
from tests.models.oracle import apart
from tests.models.requests import embed, prepare, score
from tests.models.tiny import ENGINE_PAGES, WIDTH, edit_json, write_json
from tests.models.tiny.vision_language import PAGE_WIDTH

EXACT = 1e-4
WIDE, TALL, SMALL = encode(100, 80), encode(70, 150, "PNG", 1), encode(31, 47, "PNG", 3)
IMAGES = [WIDE, TALL, SMALL]
QUERIES = ["A function call with many arguments", "naïve café, Ωmega 🙂", "short"]
MULTI = frozenset({Output.MULTI_VECTOR})
PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
BEFORE_QUERY = {"colqwen2.5": "Query: ", "colqwen3": ""}
LAYERS = ("custom_text_proj", "embedding_proj_layer")

Weights = Mapping[str, Tensor]


def stored(folder: Path) -> dict[str, Tensor]:
    """Weights of the body by their names in transformers, and `proj.weight` and `proj.bias`."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        bare = name.removeprefix("vlm.model.")
        for layer in LAYERS:
            bare = bare.replace(f"{layer}.", "proj.")
        found[bare] = tensor
    return found


def body(folder: Path, weights: Weights) -> Any:
    """The class of transformers with these weights."""
    content = json.loads((folder / "config.json").read_text())
    kind, config = hf.Qwen2_5_VLModel, hf.Qwen2_5_VLConfig
    if content["model_type"] == "colqwen3":
        kind, config = hf.Qwen3VLModel, hf.Qwen3VLConfig
    content.pop("auto_map", None)
    with warnings.catch_warnings(action="ignore"):
        model = kind(config.from_dict({**content, "model_type": config.model_type})).eval()
    left = model.load_state_dict({k: v for k, v in weights.items() if not k.startswith("proj.")})
    assert not left.missing_keys
    return model


@functools.cache
def plain(folder: Path) -> tuple[Any, Weights]:
    torch.set_num_threads(1)
    weights = stored(folder)
    return body(folder, weights), weights


def vectors(
    folder: Path, written: str, images: list[bytes], model: Any = None, weights: Weights | None = None
) -> Array:
    """The projected vectors of a text with its images, each of length 1: [tokens, width]."""
    if weights is None:
        model, weights = plain(folder)
    ids, given = qwen3_vl_oracle.tokens(folder, written, images, PIXELS.get(folder.name))
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).last_hidden_state[0]
        projected = hidden @ weights["proj.weight"].T + weights["proj.bias"]
    return as_array(torch.nn.functional.normalize(projected, dim=-1))


PIXELS = {"colqwen3": {"shortest_edge": 4 * 32**2, "longest_edge": 1280 * 32**2}}


def loaded(folder: Path, **settings: Any) -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32", image_path="exact", **settings))


def ids(model: Encoder, given: TextInput | Image, **others: Any) -> list[int]:
    (prepared,) = prepare(model, EmbedRequest(inputs=(given,), outputs=MULTI, **others))
    assert isinstance(prepared.payload, TokenSequence)
    return prepared.payload.ids


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("kind", ENGINE_PAGES)
def test_pages_and_queries_have_the_oracles_vectors(kind: str, attention: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    model = loaded(folder, attention=attention)
    assert (model.card.attention, model.card.scoring) == (attention, "late-interaction")
    pages = [vectors(folder, PAGE, [image]) for image in IMAGES]
    before, after = BEFORE_QUERY[kind], "<|endoftext|>" * 10
    queries = [vectors(folder, f"{before}{query}{after}", []) for query in QUERIES]
    shown = [Image(image) for image in IMAGES]
    for alone in (False, True):
        assert apart(embed(model, shown, Output.MULTI_VECTOR, alone=alone).multi_vector, pages) < EXACT
        asked = embed(model, QUERIES, Output.MULTI_VECTOR, alone=alone, prompt_name="query")
        assert apart(asked.multi_vector, queries) < EXACT
    scores = score(model, QUERIES[0], shown).scores
    assert np.abs(scores - [(queries[0] @ page.T).max(axis=1).sum() for page in pages]).max() < EXACT
    assert np.ptp(scores) > 100 * EXACT
    whole = ids(model, TextInput("word " * 60), prompt_name="query")
    cut = ids(model, TextInput("word " * 60, 40), prompt_name="query")
    assert cut == whole[:30] + whole[-10:]


def test_inner_layers_that_see_images_are_kept(tiny_folder: TinyFolder) -> None:
    """Without them the vectors of ColQwen3 would be others, and the load would find that."""
    folder = tiny_folder("colqwen3")
    model, weights = plain(folder)
    given = qwen3_vl_oracle.tokens(folder, PAGE, [WIDE], PIXELS["colqwen3"])
    positions, _ = model.get_rope_index(given[0], given[1]["mm_token_type_ids"], given[1]["image_grid_thw"])
    with torch.inference_mode():
        embedded = model.get_input_embeddings()(given[0])
        seen = model.get_image_features(given[1]["pixel_values"], given[1]["image_grid_thw"]).pooler_output
        embedded[given[1]["mm_token_type_ids"].bool()] = torch.cat(seen)
        hidden = model.language_model(inputs_embeds=embedded, position_ids=positions).last_hidden_state[0]
        without = torch.nn.functional.normalize(hidden @ weights["proj.weight"].T + weights["proj.bias"], dim=-1)
    assert np.abs(as_array(without) - vectors(folder, PAGE, [WIDE])).max() > 100 * EXACT


def test_a_folder_of_tomoroai_has_limits_of_its_own(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("colqwen3"), tmp_path / "model"))
    words = {"query_prefix": "Find: ", "visual_prompt_prefix": "<|vision_start|><|image_pad|><|vision_end|>Read."}
    edit_json(folder / "processor_config.json", **words)
    read = read_folder(folder)
    assert read.prompts == {"query": "Find: "}
    assert read.images is not None
    assert read.images.frame == ("<|vision_start|>", "<|vision_end|>Read.<|im_end|><|endoftext|>")
    assert read.images.pixels == (4 * 32**2, 1280 * 32**2)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("colqwen2.5", {r"^(language_model|visual)\.": r"model.\1."}),
        ("colqwen2.5", {r"^language_model\.": "model."}),
        ("colqwen3", {r"^vlm\.model\.": "", r"^embedding_proj_layer": "custom_text_proj"}),
        ("colqwen3", {r"^vlm\.model\.": "model.", r"^embedding_proj_layer": "custom_text_proj"}),
    ],
    ids=["below-model", "before-4.52", "bare", "below-model-3"],
)
def test_other_names_of_the_same_weights_are_read(
    kind: str, names: dict[str, str], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder(kind), tmp_path / kind))
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for pattern, instead in names.items():
            name = re.sub(pattern, instead, name)  # noqa: PLW2901
        weights[name] = tensor
    assert weights.keys() != load_file(folder / "model.safetensors").keys()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = embed(loaded(folder), [Image(WIDE)], Output.MULTI_VECTOR).multi_vector
    assert apart(found, [vectors(tiny_folder(kind), PAGE, [WIDE])]) < EXACT


def test_an_adapter_is_merged_into_the_body_and_the_layer(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """In the layout of vidore's folders: names of weights are those of older versions of transformers."""
    base = tiny_folder("colqwen2.5")
    folder = tmp_path / "adapter"
    folder.mkdir()
    for file in base.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)
    torch.manual_seed(3)
    weights, parts = stored(base), dict[str, Tensor]()
    for name, tensor in list(weights.items()):
        if not name.endswith(("q_proj.weight", "down_proj.weight", "proj.weight")) or "visual" in name:
            continue
        first, second = torch.randn(4, tensor.shape[1]) * 0.2, torch.randn(tensor.shape[0], 4) * 0.2
        weights[name] = tensor + 2.0 * second @ first
        module = name.removesuffix(".weight").replace("language_model.", "model.")
        module = "custom_text_proj" if module == "proj" else module
        parts |= {f"base_model.model.{module}.lora_A.weight": first, f"base_model.model.{module}.lora_B.weight": second}
    save_file(parts, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "FEATURE_EXTRACTION"}
    targets = "(.*(model).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$|.*(custom_text_proj).*$)"
    named = {"base_model_name_or_path": str(base), "target_modules": targets}
    write_json(folder / "adapter_config.json", {**settings, **named})
    model = body(base, weights)
    wanted = [vectors(base, PAGE, [WIDE], model, weights)]
    assert np.abs(wanted[0] - vectors(base, PAGE, [WIDE])).max() > 100 * EXACT
    assert apart(embed(loaded(folder), [Image(WIDE)], Output.MULTI_VECTOR).multi_vector, wanted) < EXACT


@pytest.mark.parametrize("saved", ["custom_text_proj", "custom_text_proj.modules_to_save.default"])
def test_an_adapter_of_a_plain_model_may_bring_the_layer(saved: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """As peft saves `modules_to_save`: the base model is a chat model as it is published, without the layer."""
    base = Path(
        shutil.copytree(
            tiny_folder("qwen2.5-vl"), tmp_path / "base", ignore=shutil.ignore_patterns("*_*/", "modules.json")
        )
    )
    folder = tmp_path / "adapter"
    folder.mkdir()
    torch.manual_seed(3)
    stored_weights = load_file(base / "model.safetensors")
    bare = {re.sub(r"^(model|language_model)\.", "", re.sub(r"^model\.", "", name)): name for name in stored_weights}
    weights = {
        name if name.startswith("visual.") else f"language_model.{name}": stored_weights[whole]
        for name, whole in bare.items()
        if not name.startswith("lm_head")
    }
    query = next(name for name in weights if "visual" not in name and name.endswith("q_proj.weight"))
    first, second = torch.randn(4, weights[query].shape[1]) * 0.2, torch.randn(weights[query].shape[0], 4) * 0.2
    weights[query] = weights[query] + 2.0 * second @ first
    layer = {"weight": torch.randn(PAGE_WIDTH, WIDTH), "bias": torch.randn(PAGE_WIDTH)}
    module = query.removesuffix(".weight").replace("language_model.", "model.")
    parts = {f"base_model.model.{saved}.{name}": tensor for name, tensor in layer.items()}
    parts |= {f"base_model.model.{module}.lora_A.weight": first, f"base_model.model.{module}.lora_B.weight": second}
    save_file(parts, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "FEATURE_EXTRACTION"}
    named = {"base_model_name_or_path": str(base), "modules_to_save": ["custom_text_proj"]}
    write_json(folder / "adapter_config.json", {**settings, **named})
    weights |= {f"proj.{name}": tensor for name, tensor in layer.items()}
    model, served = body(base, weights), loaded(folder)
    assert served.card.scoring == "late-interaction"
    wanted = [vectors(base, PAGE, [image], model, weights) for image in IMAGES]
    assert apart(embed(served, [Image(image) for image in IMAGES], Output.MULTI_VECTOR).multi_vector, wanted) < EXACT
    queries = [vectors(base, f"Query: {query}" + "<|endoftext|>" * 10, [], model, weights) for query in QUERIES]
    found = embed(served, QUERIES, Output.MULTI_VECTOR, prompt_name="query").multi_vector
    assert apart(found, queries) < EXACT
    save_file({name: each for name, each in parts.items() if "bias" not in name}, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"embedding_proj_layer\.bias is missing"):
        loaded(folder)


def test_a_folder_without_the_layer_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("colqwen2.5"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "custom_text_proj" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"must have custom_text_proj\.weight in its weights"):
        read_folder(folder)
    save_file(weights | {"visual.more.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="would not be read"):
        loaded(folder)
