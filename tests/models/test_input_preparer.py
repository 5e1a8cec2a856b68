"""A preparer prepares inputs as the loaded model does, without weights and without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.input_preparer import InputPreparer, load_preparer
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.preparation import Preparation
from staged_pool.runtime.requests import DENSE_ONLY, MODEL_MAX, Chat, Image, ImagePair, PairInput, TextInput
from staged_pool.stages.errors import StagedPoolError
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.encoded_images import encode
from tests.models.reading import STRANGE
from tests.models.tiny import EVERY

LONG = "A function call with many arguments, and one more of them. " * 60
TEXTS = ["A man is eating food.", LONG, "Query: x", *STRANGE, "\ud800"]
FILES = [encode(100, 80), encode(70, 150, "PNG", 1), encode(333, 240, "WEBP", 2)]
IMAGES = [
    *map(Image, FILES),
    Image(FILES[0][:200]),
    Image(b"no image"),
    Image(FILES[1], {"rgba_background_color": [1, 2, 3]}),
    Image(FILES[1], {"max_pixels": 10**9}),
    Image(FILES[2], {"unknown": 1}),
]
CHATS = [
    Chat(({"role": "user", "content": "Is it raining?"},)),
    Chat(({"role": "system", "content": "Be short."}, {"role": "user", "content": ("two", "parts")})),
    Chat(({"role": "user", "content": "x"},), template_arguments={"messages": 1}),
    Chat(()),
]
SEEN = [
    Chat(({"role": "user", "content": (IMAGES[0],)},)),
    Chat(({"role": "user", "content": ("What is", IMAGES[0], "beside", IMAGES[1], "?")},)),
    Chat(({"role": "user", "content": (IMAGES[3], "damaged")},)),
    Chat(({"role": "user", "content": (IMAGES[2],) * 100},)),
]


def inputs_of(card: ModelCard) -> list[ModelInput]:
    """Inputs of all lanes of a model, some of which it rejects."""
    outputs = frozenset(card.outputs[:1])
    texts = [
        *(TextInput(text, limit) for text in TEXTS for limit in (None, MODEL_MAX, 5)),
        TextInput(LONG, 7, truncate_side="left"),
        TextInput("alone", add_special_tokens=False),
        TextInput((1, 2, 3)),
        TextInput((10**9,)),
        *map(TextInput, CHATS),
    ]
    pairs = [
        PairInput(first="a query", second=second, max_tokens=limit, instruction=instruction)
        for second in ("a document", LONG)
        for limit in (None, MODEL_MAX)
        for instruction in (None, "Find it")
    ]
    given = [ModelInput(source, outputs) for source in texts]
    given += [ModelInput(source, outputs) for source in pairs]
    given += [ModelInput(source, outputs, may_split=True) for source in texts]
    given += [ModelInput(TextInput("short"), outputs, "a prompt: ", role) for role in ("query", "document", None)]
    if "image" in card.lanes and card.scoring == "cross-encoder":
        given += [
            ModelInput(ImagePair(first=("q",), second=(*IMAGES[:2], LONG), max_tokens=n), outputs) for n in (None, 200)
        ]
        given += [ModelInput(ImagePair(first=(each,), second=("a document",)), outputs) for each in IMAGES]
    if "image" in card.lanes:
        given += [ModelInput(image, outputs) for image in IMAGES]
        given += [ModelInput(TextInput(chat, add_special_tokens=False), outputs) for chat in SEEN]
    return [each for each in given if each.lane in card.lanes]


def plain(value: object) -> object:
    """A value whose parts compare by `==`, arrays and errors among them."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, StagedPoolError):
        return type(value), str(value), getattr(value, "param", None)
    if is_dataclass(value):
        return type(value), [plain(getattr(value, field.name)) for field in fields(value)]
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def outcome(call: Callable[[], object]) -> object:
    """The result of a call, or its error."""
    try:
        return plain(call())
    except StagedPoolError as error:
        return plain(error)


def preparer_of(model: Encoder, **settings: Any) -> InputPreparer:
    """A preparer of a loaded model, from values that have been sent to another process."""
    sent = msgspec.msgpack.encode((model.card, model.preparation))
    card, preparation = msgspec.msgpack.decode(sent, type=tuple[ModelCard, Preparation])
    return load_preparer(EngineConfig(**settings), card, preparation, MemoryBudget(2**30))


def check_preparation(model: Encoder, preparer: InputPreparer) -> None:
    """Both give the same results and errors for inputs of all lanes."""
    given = inputs_of(model.card)
    found = [outcome(partial(preparer.preprocess, [each])) for each in given]
    assert found == [outcome(partial(model.preprocess, [each])) for each in given]
    rejected = [isinstance(result, StagedPoolError) for each in given for result in preparer.preprocess([each])]
    assert any(rejected)
    assert not all(rejected)


@pytest.mark.parametrize("kind", EVERY)
def test_a_preparer_prepares_what_the_loaded_model_prepares(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    preparer = preparer_of(model)
    assert preparer.card == model.card
    assert preparer.devices == ()
    assert preparer.preparation == model.preparation
    assert [preparer.pads(lane) for lane in ("text", "image")] == [model.pads(lane) for lane in ("text", "image")]
    check_preparation(model, preparer)


@pytest.mark.parametrize("kind", ["siglip", "dinov2", "qwen2-vl"])
def test_a_preparer_takes_the_exact_path_where_the_loaded_model_does(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind, image_path="exact")
    preparer = preparer_of(model, image_path="exact")
    assert preparer.images is not None
    assert preparer.images.path == "exact"
    check_preparation(model, preparer)


@pytest.mark.parametrize(("kind", "path"), [("clip-st", "fast"), ("siglip", "exact")])
def test_processes_prepare_what_threads_prepare(kind: str, path: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind, image_path=path)
    limits = {"preprocess_limit": 1, "image_preprocess_limit": 1}
    given = inputs_of(model.card)
    with closing(preparer_of(model, image_path=path, preprocess_workers="process", **limits)) as preparer:
        found = [outcome(partial(preparer.preprocess, [each])) for each in given]
    assert found == [outcome(partial(model.preprocess, [each])) for each in given]


@pytest.mark.parametrize("kind", EVERY)
def test_a_preparer_converts_tokens_as_the_loaded_model_does(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    preparer = preparer_of(model)

    sources: list[str | Chat] = [*TEXTS, *CHATS, *SEEN]

    def conversions(of: InputPreparer) -> list[object]:
        return [
            *(
                outcome(partial(of.tokenize, source, add_special_tokens=special))
                for source in sources
                for special in (True, False)
            ),
            *(
                outcome(partial(of.detokenize, ids, skip_special_tokens=special))
                for ids in ((), (1, 2, 3, 4, 5), (10**9,))
                for special in (True, False)
            ),
        ]

    assert conversions(preparer) == conversions(model)


def test_a_preparer_has_a_cache_of_images_of_its_own(load_tiny: LoadTiny) -> None:
    model = load_tiny("clip-st")
    preparer = preparer_of(model, image_cache_mb=1)
    given = [ModelInput(IMAGES[0], DENSE_ONLY)]
    preparer.preprocess(given)
    preparer.preprocess(given)
    assert preparer.image_cache is not None
    assert (preparer.image_cache.hits, preparer.image_cache.misses, preparer.image_cache.entries) == (1, 1, 1)
    preparer.clear_image_cache()
    assert preparer.image_cache.entries == 0
    assert preparer_of(model, image_cache_mb=0).image_cache is None
    assert preparer_of(load_tiny("bert-mean")).image_cache is None


PROCESS = """
import json, sys
from pathlib import Path
import msgspec
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.input_preparer import load_preparer
from staged_pool.runtime.models.preparation import Preparation
from staged_pool.runtime.requests import Chat, Image, PairInput, TextInput

def heavy():
    return sorted({"torch", "transformers"} & sys.modules.keys())

sent, image = (Path(name).read_bytes() for name in sys.argv[1:])
card, preparation = msgspec.msgpack.decode(sent, type=tuple[ModelCard, Preparation])
preparer = load_preparer(EngineConfig(), card, preparation)
steps = {"load": heavy()}
chat = Chat(({"role": "user", "content": "x"},))
sources = {"text": (TextInput("a"), TextInput(chat), PairInput(first="a", second="b")), "image": (Image(image),)}
for lane in card.lanes:
    preparer.warm_up(lane)
    steps[lane] = heavy()
    known = set(sys.modules)
    for source in sources[lane]:
        preparer.preprocess([ModelInput(source, frozenset(card.outputs))])
    steps["late"] = sorted(set(sys.modules) - known)
    if lane == "text":
        preparer.detokenize(preparer.tokenize("a", add_special_tokens=True).ids, skip_special_tokens=True)
print(json.dumps(steps))
"""


def steps_of_process(model: Encoder, folder: Path) -> object:
    """Return the heavy modules that a process has imported after each step of preparing inputs."""
    (folder / "sent").write_bytes(msgspec.msgpack.encode((model.card, model.preparation)))
    (folder / "image").write_bytes(FILES[0])
    command = [sys.executable, "-c", PROCESS, str(folder / "sent"), str(folder / "image")]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("bert-mean", {"text": []}),
        ("ce-bert-1label", {"text": []}),
        ("colbert-st", {"text": []}),
        ("ce-qwen3-lm", {"load": ["transformers"], "text": ["transformers"]}),
        ("clip-st", {"text": [], "image": ["torch"]}),
        ("qwen2-vl", {"load": ["transformers"], "text": ["transformers"], "image": ["torch", "transformers"]}),
        ("dinov2", {"image": ["torch"]}),
    ],
)
def test_texts_are_prepared_without_torch(
    kind: str, steps: dict[str, list[str]], load_tiny: LoadTiny, tmp_path: Path
) -> None:
    assert steps_of_process(load_tiny(kind), tmp_path) == {"load": [], "late": [], **steps}


def test_a_warm_up_imports_what_conversations_need(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("qwen3-last"), tmp_path / "model")
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    check_preparation(model, preparer_of(model))
    assert steps_of_process(model, tmp_path) == {"load": [], "text": ["transformers"], "late": []}
