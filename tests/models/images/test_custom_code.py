"""Custom image processors of model folders: processes that may die of an image."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import structlog
from PIL import Image as Pillow

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.images.open_reader import open_reader
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.settings import read_image_settings
from staged_pool.runtime.models.input_preparer import load_preparer
from staged_pool.runtime.models.preparation import ImagePreparation, Preparation
from staged_pool.runtime.models.tokenizing.lone_images import ImageTokens, LoneImageReader
from staged_pool.runtime.payloads import PreparedImage
from staged_pool.runtime.requests import DENSE_ONLY, Image
from staged_pool.stages.errors import (
    ConfigError,
    EngineStopped,
    InvalidInput,
    TooLarge,
    UnsupportedMedia,
    UnusableMedia,
)
from staged_pool.stages.work import Prepared
from tests.models.images.drawing import drawing, encode, image, pixels, save_settings
from tests.support.cards import BOTH_LANES
from tests.support.worker_processes import processes, replaced

LONG = pytest.mark.long
"""Marks tests that start processes of their own, each of which imports transformers."""

CODE = '''
import os, sys
import numpy as np
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class Moody(BaseImageProcessor):
    """What happens to an image is told by its first pixel."""

    model_input_names = ["pixel_values"]

    def __init__(self, edge=8, **kwargs):
        super().__init__(**kwargs)
        self.edge = edge
        print("made one")

    def preprocess(self, images, return_tensors=None, **kwargs):
        red, green, blue = images.getpixel((0, 0))
        print("got one", flush=True)
        if (red, green, blue) == (1, 0, 0):
            os.abort()
        if (red, green, blue) == (2, 0, 0):
            os._exit(3)
        if (red, green, blue) == (3, 0, 0):
            raise RuntimeError("a secret of the code")
        if (red, green, blue) == (4, 0, 0):
            sys.exit("a secret of the code")
        assert sys.stdin.read() == ""
        values = np.asarray(images.resize((self.edge, self.edge), 0), dtype=np.float32).transpose(2, 0, 1)
        return BatchFeature({"pixel_values": [values + 0.5 + os.getpid() * 0]}, tensor_type=return_tensors)
'''


def folder_with(code: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "moody.py").write_text(code)
    return save_settings(folder, auto_map={"AutoImageProcessor": "moody.Moody"}, image_processor_type="Moody", edge=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))  # where the processes copy code to
        yield folder_with(CODE, tmp_path_factory.mktemp("moody"))


@pytest.fixture(scope="module")
def moody(folder: Path) -> Iterator[ImageReader]:
    """Two processes, each of which takes seconds to start."""
    config = EngineConfig(image_preprocess_limit=2, max_image_pixels=10_000)
    with closing(open_reader(read_image_settings(folder, trust_remote_code=True), config)) as reader:
        yield reader


def dot(red: int) -> Image:
    return Image(encode(Pillow.new("RGB", (12, 12), (red, 0, 0))))


def test_the_folder_s_code_makes_the_pixels(moody: ImageReader) -> None:
    assert moody.path == "exact"
    assert moody.reason == "it is code of the model folder"
    prepared = moody.read(Image(encode(drawing(6, 6))))
    assert np.array_equal(prepared.values, pixels(6, 6).transpose(2, 0, 1) + np.float32(0.5))


def test_the_folder_s_code_makes_the_pixels_of_a_preparer_too(moody: ImageReader) -> None:
    described = ImagePreparation.of(moody, LoneImageReader(moody, ImageTokens(patch=(2, 2))))
    preparation = Preparation(padded=(), text=None, image=described)
    with closing(load_preparer(EngineConfig(image_preprocess_limit=1), BOTH_LANES, preparation)) as preparer:
        (prepared,) = preparer.preprocess([ModelInput(dot(77), DENSE_ONLY)])
        assert isinstance(prepared, Prepared)
        assert isinstance(prepared.payload, PreparedImage)
        assert prepared.tokens == 9
        assert np.array_equal(prepared.payload.pixels.values, moody.read(dot(77)).values)
        before = processes()
    assert len(before - processes()) == 1


def test_the_folder_s_code_runs_in_threads_if_the_operator_says_so(tmp_path: Path) -> None:
    code = CODE.replace("os.getpid() * 0", "os.getpid()").replace('assert sys.stdin.read() == ""', "pass")
    settings = read_image_settings(folder_with(code, tmp_path / "here"), trust_remote_code=True)
    before = processes()
    with closing(open_reader(settings, EngineConfig(preprocess_workers="thread"))) as reader:
        assert reader.read(dot(77)).values[0, 0, 0] == 77.5 + os.getpid()
        with pytest.raises(UnusableMedia):
            reader.read(dot(4))  # `sys.exit` must not end this process
    assert processes() == before


@pytest.mark.parametrize("code", ["raise RuntimeError('no luck')", "import sys; sys.exit('no luck')"])
def test_code_that_cannot_be_loaded_in_threads_is_a_wrong_folder_too(code: str, folder: Path, tmp_path: Path) -> None:
    settings = read_image_settings(folder_with(code, tmp_path / "broken"), trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"moody.Moody: the folder's own image processor cannot be loaded: no luck"):
        open_reader(settings, EngineConfig(preprocess_workers="thread"))


def test_a_process_that_dies_fails_its_image_and_is_replaced(
    moody: ImageReader, logged: list[structlog.typing.EventDict]
) -> None:
    before = processes()
    assert len(before) == 2
    for red in (1, 2):
        with pytest.raises(UnusableMedia, match="crashed on the image"):
            moody.read(dot(red))
    assert moody.read(dot(77)).values[0, 0, 0] == 77.5
    replaced()
    died = [event["exit_code"] for event in logged if event["event"] == "workers.process_died"]
    assert sorted(died) == sorted([-signal.SIGABRT, 3])
    assert len(processes()) == 2
    assert not processes() & before


def test_images_beside_one_that_kills_its_process_are_read(moody: ImageReader) -> None:
    def read(red: int) -> float | type[Exception]:
        try:
            return float(moody.read(dot(red)).values[0, 0, 0])
        except InvalidInput as error:
            return type(error)

    given = [10, 1, 11, 12, 13, 14, 3, 15, 16]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(read, given))
    assert found == [UnusableMedia if red < 10 else red + 0.5 for red in given]


def test_what_the_code_raises_is_not_repeated(moody: ImageReader) -> None:
    replaced()
    before = processes()
    for red in (3, 4):
        with pytest.raises(UnusableMedia) as caught:
            moody.read(dot(red))
        assert "secret" not in str(caught.value)
    assert processes() == before


def test_the_limits_hold_in_the_processes_too(moody: ImageReader) -> None:
    with pytest.raises(TooLarge, match="at most 10000 are accepted"):
        moody.read(image(101, 100))
    with pytest.raises(UnsupportedMedia, match="TIFF"):
        moody.read(Image(encode(drawing(5, 5), "TIFF")))
    with pytest.raises(UnusableMedia, match="0 bytes"):
        moody.read(Image(b""))
    with pytest.raises(InvalidInput, match="this model knows rgba_background_color"):
        moody.read(image(5, 5, edge=100))
    clear = Image(encode(Pillow.new("RGBA", (9, 9))), {"rgba_background_color": [50, 60, 70]})
    assert moody.read(clear).values[:, 0, 0].tolist() == [50.5, 60.5, 70.5]


@LONG
def test_closing_ends_the_processes_and_whatever_they_do(folder: Path) -> None:
    before = processes()
    reader = open_reader(read_image_settings(folder, trust_remote_code=True), EngineConfig(image_preprocess_limit=1))
    (started,) = processes() - before
    reader.close()
    assert processes() == before
    assert not psutil.pid_exists(started)
    with pytest.raises((UnusableMedia, EngineStopped)):
        reader.read(dot(50))


@LONG
def test_a_reader_that_nobody_holds_leaves_no_process(folder: Path) -> None:
    before = processes()
    reader = open_reader(read_image_settings(folder, trust_remote_code=True), EngineConfig(image_preprocess_limit=1))
    assert len(processes() - before) == 1
    del reader
    gc.collect()
    assert processes() == before


@LONG
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('no luck')", "moody.Moody: the folder's own image processor cannot be loaded: no luck"),
        ("import os; os.abort()", f"ended its process (exit code {-signal.SIGABRT})"),
    ],
)
def test_code_that_cannot_be_loaded_is_a_wrong_folder(code: str, said: str, folder: Path, tmp_path: Path) -> None:
    before = processes()
    settings = read_image_settings(folder_with(code, tmp_path / "broken"), trust_remote_code=True)
    with pytest.raises(ConfigError) as caught:
        open_reader(settings, EngineConfig(image_preprocess_limit=1))
    assert said in str(caught.value)
    assert processes() == before


def test_code_does_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = folder_with(f"open({str(ran)!r}, 'w').close()", tmp_path / "folder")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        read_image_settings(folder)
    assert not ran.exists()
