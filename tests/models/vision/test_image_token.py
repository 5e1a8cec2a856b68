"""Image tokens with an id that made-up texts and ordinary words may have, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, TextInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from tests.models import image_oracle as oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.oracle import apart
from tests.models.requests import sequences
from tests.models.tiny import edit_json
from tests.models.vision.test_vision_language import EXACT, dense

IMAGE_TOKEN = 5
IMAGE = encode(100, 80, "JPEG", 0)


def with_image_token(source: Path, folder: Path) -> Path:
    """A copy of a folder whose image token has changed ids with a word."""
    shutil.copytree(source, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {each["content"]: each["id"] for each in content["added_tokens"]}
    (token,) = (each for each in content["added_tokens"] if each["content"] == "<|image_pad|>")
    (word,) = (word for word, number in vocabulary.items() if number == IMAGE_TOKEN)
    vocabulary[word], vocabulary["<|image_pad|>"] = token["id"], IMAGE_TOKEN
    token["id"] = IMAGE_TOKEN
    content["added_tokens"].sort(key=lambda each: each["id"])
    path.write_text(json.dumps(content))
    edit_json(folder / "config.json", image_token_id=IMAGE_TOKEN)
    return folder


def conversation(*parts: str | Image) -> TextInput:
    return TextInput(Chat(({"role": "user", "content": parts},)), add_special_tokens=False)


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_image_token(tiny_folder("qwen2-vl"), tmp_path_factory.mktemp("image token") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32", image_path="exact"))


def test_images_are_shown_by_a_token_with_a_low_id(folder: Path, model: Encoder) -> None:
    request = EmbedRequest(inputs=(conversation(Image(IMAGE), "What is this?"),))
    ids, _ = oracle.tokens(folder, [("user", [IMAGE, "What is this?"])])
    assert [each.ids for each in sequences(model, request)] == ids.tolist()
    wanted = oracle.conversation(folder, [("user", [IMAGE, "What is this?"])])
    assert apart(dense(model, *request.inputs), [wanted]) < EXACT


def test_the_text_of_the_image_token_is_a_word_where_nothing_is_shown(model: Encoder) -> None:
    (sequence,) = sequences(model, EmbedRequest(inputs=(TextInput("a <|image_pad|> b"),)))
    assert sequence.ids.count(IMAGE_TOKEN) == 1
    assert not sequence.images
    (sequence,) = sequences(model, EmbedRequest(inputs=(conversation("a <|image_pad|> b"),)))
    assert sequence.ids.count(IMAGE_TOKEN) == 1
    with pytest.raises(InvalidInput, match="has 1 images, but the model's chat template writes 2 image tokens"):
        sequences(model, EmbedRequest(inputs=(conversation(Image(IMAGE), "a <|image_pad|> b"),)))


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (
            5,
            r"config.json: image_token_id=5 is '.*' in the tokenizer, but the chat template, for one image, has 0",
        ),
        (-1, "config.json: image_token_id=-1 is no token of the"),
        (10**6, "config.json: image_token_id=1000000 is no token of the"),
    ],
)
def test_an_image_token_that_is_another_one_in_the_tokenizer_is_rejected(
    token: int, message: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen2-vl"), folder)
    edit_json(folder / "config.json", image_token_id=token)
    with pytest.raises(ConfigError, match=message):
        load_model(EngineConfig(model=str(folder), dtype="float32"))


def test_an_image_token_that_stands_around_pages_is_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("colpali"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["vlm_config"]["image_token_index"] = config["vlm_config"]["image_token_id"] = 0  # <s>, before each page
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="image_token_id=0 is '<s>' in the tokenizer, but the text around an image"):
        load_model(EngineConfig(model=str(folder), dtype="float32"))
