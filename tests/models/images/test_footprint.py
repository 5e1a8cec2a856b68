"""The memory that is reserved for an image, beside the memory that reading it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from perf.image_memory import ALLOCATOR
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.memory.allocator import is_glibc
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.models.images.open_reader import open_reader
from staged_pool.runtime.models.images.settings import read_image_settings
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import TooLarge, UnusableMedia
from tests.models.images.drawing import Folder, drawing, encode


@pytest.mark.skipif(sys.platform != "linux" or not is_glibc(), reason="reads /proc, and has glibc give memory back")
def test_no_kind_of_image_takes_more_than_is_reserved_for_it() -> None:
    # In a process of its own, whose peak is that of the images.
    command = [sys.executable, "-m", "perf.image_memory", "--pixels", "1"]
    environment = os.environ | ALLOCATOR  # else it starts a second time, with them
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("\n") > 60


def test_an_image_waits_for_its_room_and_gives_it_back(family_folder: Folder) -> None:
    budget = MemoryBudget(2**32)
    reader = open_reader(read_image_settings(family_folder("clip")), EngineConfig(), budget)
    given = Image(encode(drawing(400, 300)))
    done = threading.Event()

    def read() -> None:
        reader.read(given)
        done.set()

    with budget.decodes.room(budget.decodes.limit_bytes):
        thread = threading.Thread(target=read)
        thread.start()
        while not budget.decodes._waiting:
            assert not done.is_set()
    thread.join(60)
    assert done.is_set()
    assert budget.decodes.held_bytes == 0


@pytest.mark.parametrize("data", [encode(drawing(400, 300)), encode(drawing(400, 300))[:-60]])
def test_an_image_gives_its_room_back_also_where_it_is_damaged(data: bytes, family_folder: Folder) -> None:
    budget = MemoryBudget(2**32)
    reader = open_reader(read_image_settings(family_folder("clip")), EngineConfig(), budget)
    with suppress(UnusableMedia):
        reader.read(Image(data))
    assert budget.decodes.held_bytes == 0


def test_an_image_that_needs_more_than_there_is_is_rejected(family_folder: Folder) -> None:
    budget = MemoryBudget(2**20)
    reader = open_reader(read_image_settings(family_folder("clip")), EngineConfig(), budget)
    with pytest.raises(
        TooLarge, match=r"2000 x 1000 pixels, and reading it takes \d+ MB of memory: this server has 0 MB"
    ):
        reader.read(Image(encode(drawing(2000, 1000))))
    budget.resize(2**20, 2**32)  # a model is loaded meanwhile, and the image is read alone
    reader.read(Image(encode(drawing(2000, 1000))))


def test_an_image_that_may_be_turned_has_room_either_way(family_folder: Folder) -> None:
    reader = open_reader(read_image_settings(family_folder("qwen2-vl")), EngineConfig())
    lying, standing = (reader.memory(Image(encode(drawing(*size)))) for size in ((3000, 300), (300, 3000)))
    assert lying == standing


_READS_A_LARGE_ONE = """
import sys, threading
from pathlib import Path
from staged_pool.api.commands.process import prepare_environment
prepare_environment(offline=True)
from perf.image_memory import resident_bytes
from perf.tools.image_files import png
from staged_pool.runtime.models.images.decode import Encoded, ImageLimits
from staged_pool.runtime.models.images.fast_processor import read_fast
from staged_pool.runtime.models.images.settings import read_image_settings
settings = read_image_settings(Path(sys.argv[1]))
def read(edge):
    read_fast(Encoded(large if edge > 500 else small, ImageLimits(2**30, 2**30)).load(), (224, 224), settings)
small, large = png(8, 6)(500), png(8, 6)(5000)
before = []
for edge in (500, 5000):
    before.append(resident_bytes("VmRSS"))
    thread = threading.Thread(target=read, args=(edge,))
    thread.start()
    thread.join()
print(resident_bytes("VmHWM") - before[1], resident_bytes("VmRSS") - before[1])
"""


@pytest.mark.skipif(sys.platform != "linux" or not is_glibc(), reason="reads /proc, and tells glibc what to keep")
def test_the_memory_of_a_large_image_goes_back_as_soon_as_it_has_been_read(family_folder: Folder) -> None:
    command = [sys.executable, "-c", _READS_A_LARGE_ONE, str(family_folder("clip"))]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    peak, kept = map(int, run.stdout.split())
    assert peak > 100 * 10**6, "it is there while it is read"
    assert kept < 40 * 10**6
