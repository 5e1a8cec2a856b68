"""Freed memory is kept, unless the user has other plans for it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from staged_pool.api import process_memory as memory
from staged_pool.runtime.memory.allocator import is_glibc

FAULTS = """
import ctypes, json, resource, sys, threading
from staged_pool.api.process_memory import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
faults = []

def use() -> None:
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = libc.malloc(12_000_000)
        ctypes.memset(block, 1, 12_000_000)
        libc.free(ctypes.c_void_p(block))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=use)
thread.start()
thread.join()
print(json.dumps([kept, sum(faults[10:])]))
"""
glibc = pytest.mark.skipif(not is_glibc(), reason="another allocator")


def run(how: str, **environment: str) -> tuple[bool | None, int]:
    """Return if memory is kept, and page faults of ten further blocks of 12 MB."""
    plain = {name: value for name, value in os.environ.items() if name not in memory._USER_HAS_SET}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True, env=plain | environment
    )
    kept, faults = json.loads(done.stdout)
    return kept, faults


@glibc
def test_a_block_that_was_freed_is_used_again_without_asking_the_kernel() -> None:
    kept, faults = run("keep")
    assert kept is True
    assert faults < 100  # a page has 4096 bytes: one block has 2930


@glibc
def test_what_the_user_has_set_stays() -> None:
    kept, faults = run("keep", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept is False
    assert faults > 10 * 2900


FREED = """
import json
import mmap
from pathlib import Path
from staged_pool.api import process_memory as memory
from staged_pool.runtime.memory.allocator import give_back_freed_memory

def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

memory.keep_freed_memory()
blocks = [bytes([1]) * 1_000_000 for _ in range(101)]
stays = blocks.pop()
used = rss()
blocks.clear()
kept = rss()
give_back_freed_memory()
print(json.dumps([used - kept, kept - rss()]))
"""


@glibc
@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel says how much is held")
def test_what_is_free_can_be_given_back_from_below_what_is_not() -> None:
    plain = {name: value for name, value in os.environ.items() if name not in memory._USER_HAS_SET}
    done = subprocess.run([sys.executable, "-c", FREED], check=True, capture_output=True, text=True, env=plain)
    at_once, when_told = json.loads(done.stdout)
    assert at_once < 10_000_000
    assert when_told > 90_000_000


COLLECTED = """
import gc, json
from staged_pool.api import process_memory as memory

class Loop:
    def __init__(self) -> None:
        self.itself = self

memory.tune_garbage_collector()
looks = []
gc.callbacks.append(lambda phase, info: phase == "start" and looks.append(info["generation"]))
kept = [[] for _ in range(memory.COLLECTED_AFTER - 1000)]
seldom = len(looks)
for _ in range(3000):
    Loop()
print(json.dumps([seldom, len(looks), sum(isinstance(one, Loop) for one in gc.get_objects())]))
"""


def test_the_garbage_collector_looks_seldom_and_still_collects() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED], check=True, capture_output=True, text=True)
    seldom, looks, left = json.loads(done.stdout)
    assert (seldom, looks) == (0, 1)
    assert left < 3000


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_glibc", lambda: False)
    assert not memory.keep_freed_memory()


def held_bytes(file: Path) -> int:
    """Return the resident bytes of a file that is mapped once."""
    mapping = Path("/proc/self/smaps").read_text().partition(f"{file}\n")[2]
    return 1024 * int(mapping.partition("Rss:")[2].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel is asked")
def test_what_was_read_of_a_file_of_weights_is_held_no_more_and_comes_back(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"w" * 4_000_000)
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        assert mapped[:] == weights.read_bytes()
        assert held_bytes(weights) > 3_900_000
        memory.release_weight_pages()
        assert held_bytes(weights) == 0
        assert mapped[:] == weights.read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel is asked")
def test_what_was_changed_of_a_file_of_weights_is_not_lost(tmp_path: Path) -> None:
    weights, other = tmp_path / "model.safetensors", tmp_path / "vocabulary.txt"
    for path in (weights, other):
        path.write_bytes(b"w" * 4_000_000)
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[2_000_000] = ord("x")
        with other.open("rb") as words, mmap.mmap(words.fileno(), 0, access=mmap.ACCESS_COPY) as kept:
            assert kept[:] == other.read_bytes()
            memory.release_weight_pages()
            assert held_bytes(other) > 3_900_000
        assert mapped[2_000_000] == ord("x")
