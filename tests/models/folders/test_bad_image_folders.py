"""Image model folders that cannot be served: each is rejected in one line with the cause."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.folders.test_bad_folders import Change, edit, remove, write
from tests.models.images.drawing import ALONE
from tests.models.requests import embed
from tests.models.tiny import EVERY, edit_json, write_json, write_modules
from tests.models.tiny.images import siglip
from tests.needed import is_older

PREPROCESSOR = "preprocessor_config.json"
SETTINGS = "sentence_bert_config.json"

Copy = Callable[[str], Path]


@pytest.fixture
def copy(tiny_folder: TinyFolder, tmp_path: Path) -> Copy:
    """Gives a copy of a kind's folder, which a test may change."""
    return lambda kind: shutil.copytree(tiny_folder(kind), tmp_path / kind)


def rejection(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as rejected:
        load_model(EngineConfig(model=str(folder), torch_threads=1, **settings))
    message = str(rejected.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "").replace(str(folder), "FOLDER")


def weights(**changes: torch.Tensor | None) -> Change:
    """Replace some tensors, or take them out; names have two underscores where they have a dot."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in changes.items():
            del tensors[name.replace("__", ".")]
            if tensor is not None:
                tensors[name.replace("__", ".")] = tensor
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def square(edge: int) -> dict[str, int]:
    return {"height": edge, "width": edge}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        pytest.param(
            "clip",
            remove(PREPROCESSOR),
            "preprocessor_config.json is missing: the model has no settings for its images",
            id="no preprocessor",
        ),
        pytest.param(
            "clip", write(PREPROCESSOR, "{"), "preprocessor_config.json: cannot be read as JSON", id="no JSON"
        ),
        pytest.param(
            "qwen2.5-vl",
            edit(PREPROCESSOR, temporal_patch_size=10**9),
            "preprocessor_config.json: temporal_patch_size must be a whole number from 1 to 64",
            id="frames beyond memory",
        ),
        pytest.param(
            "siglip",
            edit(PREPROCESSOR, size=square(10**6)),
            "preprocessor_config.json: size: height must be a whole number from 1 to 8192",
            id="edges beyond memory",
        ),
        pytest.param(
            "siglip2-naflex",
            edit(PREPROCESSOR, max_num_patches=10**7),
            "preprocessor_config.json: max_num_patches must be a whole number from 1 to 262144",
            id="patches beyond memory",
        ),
        pytest.param(
            "clip",
            edit(PREPROCESSOR, rescale_factor=[3]),
            "preprocessor_config.json: rescale_factor=[3] must be a finite number",
            id="a factor that is a list",
        ),
        pytest.param(
            "clip",
            edit(PREPROCESSOR, rescale_factor=0),
            "preprocessor_config.json: rescale_factor must not be 0",
            id="a factor of nothing",
        ),
        pytest.param(
            "clip",
            edit(PREPROCESSOR, image_mean=[0.5, float("nan"), 0.5]),
            "preprocessor_config.json: image_mean=nan must be a finite number",
            id="a mean that is no number",
        ),
        pytest.param(
            "clip",
            edit(PREPROCESSOR, crop_size=square(32), size={"shortest_edge": 32}),
            "the image processor makes images of 32 x 32 pixels, which CLIPVisionModel does not take: "
            "config.json has image_size=64",
            id="CLIP's size",
        ),
        pytest.param(
            "siglip",
            edit(PREPROCESSOR, size=square(48)),
            "the image processor makes images of 48 x 48 pixels, which SiglipVisionModel does not take: "
            "config.json has image_size=64",
            id="SigLIP's size",
        ),
        pytest.param(
            "vit-labels",
            edit(PREPROCESSOR, size=square(48)),
            "the image processor makes images of 48 x 48 pixels, which ViTModel does not take: "
            "config.json has image_size=64",
            id="ViT's size",
        ),
        pytest.param(
            "siglip2-naflex",
            edit(PREPROCESSOR, patch_size=8),
            "the image processor makes patches of 192 values, and config.json has patch_size=16, which is 768",
            id="patches of another size",
        ),
        pytest.param(
            "siglip2-naflex",
            edit(PREPROCESSOR, image_processor_type="SiglipImageProcessor", size=square(64)),
            "the image processor makes pixels, but Siglip2VisionModel takes patches",
            id="no patches",
        ),
        pytest.param(
            "siglip",
            edit(PREPROCESSOR, image_processor_type="Siglip2ImageProcessor", patch_size=16, max_num_patches=16),
            "the image processor makes patches, but SiglipVisionModel takes pixels",
            id="patches",
            marks=ALONE,
        ),
        pytest.param(
            "clip",
            edit("config.json", architectures=["CLIPForImageClassification"]),
            "FOLDER: the weights are not those of a CLIPForImageClassification: classifier.bias is missing or of "
            "another shape (2 such in all)",
            id="CLIP that claims to classify",
        ),
        pytest.param(
            "vit-labels",
            edit("config.json", id2label={"0": "cat", "1": "dog"}),
            "FOLDER: the weights are not those of a ViTForImageClassification: classifier.bias is missing or of "
            "another shape (2 such in all)",
            id="other labels",
        ),
        pytest.param(
            "clip",
            weights(text_projection__weight=None),
            "FOLDER: the weights are not those of a CLIPModel: text_projection.weight is missing or of another shape "
            "(1 such in all)",
            id="no projection",
        ),
        pytest.param(
            "clip",
            weights(visual_projection__weight=torch.full((24, 48), torch.nan)),
            "the weights cannot be used: The model gave NaN or Inf for this input.",
            id="NaN",
        ),
        pytest.param(
            "clip",
            remove("tokenizer.json"),
            "FOLDER: no tokenizer, neither tokenizer.json nor a vocabulary such as vocab.txt",
            id="no tokenizer",
        ),
        pytest.param(
            "clip-st",
            edit(SETTINGS, modality_config={"text": {"method": "forward", "method_output_name": "logits"}}),
            "sentence_bert_config.json: modality_config: text is not supported as {'method': 'forward', "
            "'method_output_name': 'logits'}",
            id="another output",
        ),
        pytest.param(
            "clip-st",
            edit(SETTINGS, module_output_name="token_embeddings"),
            "sentence_bert_config.json: module_output_name='token_embeddings' is not supported, only "
            "sentence_embedding",
            id="another name",
        ),
        pytest.param(
            "clip-st",
            edit(SETTINGS, processing_kwargs={"image": {"do_resize": False}}),
            "sentence_bert_config.json: processing_kwargs: image is not supported",
            id="processing",
        ),
        pytest.param(
            "vit-st-mean",
            lambda folder: write_modules(folder, ("Normalize", {})),
            "modules.json: the Transformer must be followed by a Pooling, but the chain is Transformer -> Normalize",
            id="no pooling",
        ),
        pytest.param(
            "bert-mean",
            lambda folder: write_modules(folder, first="sentence_transformers.models.CLIPModel"),
            "config.json: model_type='bert' is not supported; supported image models: clip, metaclip_2, aimv2, siglip, "
            "siglip2, vit, dinov2, dinov2_with_registers, dinov3_vit",
            id="CLIPModel of texts",
        ),
        pytest.param(
            "siglip-masked",
            edit("tokenizer_config.json", padding_side="left"),
            "tokenizer_config.json: padding_side='left' with an attention_mask is not supported for a model that "
            "needs padded texts",
            id="padding that is hidden before a text",
        ),
        pytest.param(
            "siglip",
            edit("tokenizer_config.json", tokenizer_class="SiglipTokenizer"),
            "tokenizer.json: does not lowercase texts, remove punctuation and join spaces, as SiglipTokenizer does, "
            "whose Python code is not run",
            id="not canonical",
        ),
    ],
)
def test_a_folder_that_cannot_be_served_is_rejected(kind: str, change: Change, message: str, copy: Copy) -> None:
    folder = copy(kind)
    change(folder)
    found = rejection(folder).replace("VisionTransformer", "VisionModel")  # its name in transformers before 5.6
    assert found == message or (message.endswith("JSON") and found.startswith(message))


def test_a_model_of_pages_is_read_or_the_version_is_named(tmp_path: Path) -> None:
    torch.manual_seed(7)
    EVERY["colpali"](tmp_path)
    if is_older("transformers", "5.5"):
        said = f"config.json: ColPaliForRetrieval needs transformers 5.5 or newer; {hf.__version__} is installed"
        assert rejection(tmp_path) == said
    else:
        model = load_model(EngineConfig(model=str(tmp_path), torch_threads=1))
        assert model.card.architecture == "ColPaliForRetrieval"


@pytest.mark.parametrize("task", ["score", "sparse"])
def test_a_model_of_images_is_asked_for_nothing_else(task: str, tiny_folder: TinyFolder) -> None:
    message = rejection(tiny_folder("clip"), task=task)
    assert message == f"task='{task}': clip is an image model (model_type='clip')"


def test_vectors_of_texts_and_images_must_be_as_wide(tmp_path: Path) -> None:
    siglip(tmp_path / "model", projection=20)
    assert rejection(tmp_path / "model") == (
        "vectors of texts and of images cannot be compared: they have widths of 20 for texts and 24 for images"
    )


def test_a_vision_model_without_a_head_is_rejected(copy: Copy) -> None:
    folder = copy("siglip")
    model = hf.SiglipModel.from_pretrained(folder)
    model.config.vision_config.vision_use_head = False
    hf.SiglipModel(model.config).save_pretrained(folder)
    assert rejection(folder) == "SiglipModel: its vision model has no head that makes one vector of an image"


def test_siglips_own_tokenizer_is_read_where_its_file_does_what_its_class_does(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    siglip(folder, lower_case=True, canonical=True)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="SiglipTokenizer")
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    one, same, other = embed(model, ["Hello, World!", "hello world", "hello there"], Output.DENSE).dense  # type: ignore[misc]
    assert abs(one - same).max() < 1e-5
    assert abs(one - other).max() > 1e-3


def test_settings_that_say_what_is_done_anyway_are_taken(copy: Copy) -> None:
    folder = copy("siglip")
    write_modules(folder)
    write_json(folder / SETTINGS, {"processing_kwargs": {"text": {"padding": "max_length"}}, "max_seq_length": 64})
    assert not load_model(EngineConfig(model=str(folder), torch_threads=1)).card.normalize
