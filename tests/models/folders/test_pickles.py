"""Archives of torch that unpack to far more than their file: none is unpacked."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.checkpoint.adapters import read_tensors
from staged_pool.runtime.models.checkpoint.static import _bare_tensors
from staged_pool.runtime.models.folders.pickles import MOST_PICKLE_BYTES, check_pickle
from staged_pool.runtime.models.folders.stored_tensors import read_shard
from staged_pool.runtime.models.heads.modules import _tensors
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.folders.limited import little_room

NAME = "pytorch_model.bin"
LISTS = b"\x80\x02]q\x00(" + b"]" * 2**25 + b"e."
"""A pickle of a list of lists, of which each takes a hundred bytes."""


def saved(tensors: object = None) -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3.0)} if tensors is None else tensors, file)
    return file.getvalue()


def packed(entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        archive.comment = comment
    return file.getvalue()


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return packed({"archive/data.pkl": LISTS, "archive/version": b"3\n", "archive/byteorder": b"little"})


def doors(file: Path) -> list[Callable[[], object]]:
    """Return the calls that read a pickle of a model folder."""
    return [
        lambda: read_shard(file, file.name),
        lambda: _tensors(file),
        lambda: _bare_tensors(file),
        lambda: read_tensors(file.parent),
        lambda: check_pickle(file, file.name),
    ]


@pytest.mark.parametrize("door", range(5))
def test_a_pickle_that_unpacks_to_more_than_a_list_of_tensors_is_not_unpacked(
    tmp_path: Path, bomb: bytes, door: int
) -> None:
    file = tmp_path / "adapter_model.bin"
    file.write_bytes(bomb)
    with (
        little_room(),
        pytest.raises(ConfigError, match=r"_model\.bin: its entry 'archive/data\.pkl' unpacks to"),
    ):
        doors(file)[door]()


def test_a_model_folder_with_such_a_pickle_is_rejected(copy: TinyFolder, bomb: bytes) -> None:
    folder = copy("bert-mean")
    (folder / "model.safetensors").unlink()
    (folder / NAME).write_bytes(bomb)
    with (
        little_room(),
        pytest.raises(ConfigError, match=r"pytorch_model\.bin: its entry 'archive/data\.pkl' unpacks to"),
    ):
        load_model(EngineConfig(model=str(folder), dtype="float32", torch_threads=1))


@pytest.mark.parametrize("name", ["archive/byteorder", "archive/DATA.PKL", "archive/code/data/x", "data/data.pkl"])
def test_no_entry_beside_the_values_is_large(tmp_path: Path, name: str) -> None:
    (tmp_path / NAME).write_bytes(packed({name: bytes(MOST_PICKLE_BYTES + 1)}, zipfile.ZIP_STORED))
    with pytest.raises(ConfigError, match="unpacks to 4194305 bytes, and 4194304 are read"):
        check_pickle(tmp_path / NAME, NAME)
    (tmp_path / NAME).write_bytes(packed({name: bytes(MOST_PICKLE_BYTES)}, zipfile.ZIP_STORED))
    check_pickle(tmp_path / NAME, NAME)


def test_values_are_not_compressed(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(packed({"archive/data.pkl": b"", "archive/data/0": bytes(2**24)}))
    with pytest.raises(ConfigError, match="its entries unpack to 16777216 bytes, more than the file's"):
        check_pickle(tmp_path / NAME, NAME)


def test_entries_do_not_share_their_bytes(tmp_path: Path) -> None:
    whole = packed({"archive/data.pkl": b"", "archive/data/0": bytes(2**20)}, zipfile.ZIP_STORED)
    sizes = struct.pack("<LL", 2**20, 2**20)
    start = whole.index(b"PK\x01\x02", whole.index(b"PK\x01\x02") + 1)
    entry = whole[start : whole.index(b"PK\x05\x06")]
    assert sizes in entry
    copies = b"".join(entry.replace(b"data/0", b"data/%c" % (49 + place)) for place in range(8))
    end = list(struct.unpack("<4s4H2LH", whole[-22:]))
    end[3:6] = end[3] + 8, end[4] + 8, end[5] + len(copies)
    (tmp_path / NAME).write_bytes(whole[:-22] + copies + struct.pack("<4s4H2LH", *end))
    with pytest.raises(ConfigError, match="its entries unpack to 9437184 bytes, more than the file's"):
        check_pickle(tmp_path / NAME, NAME)


def test_the_list_of_entries_is_limited(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(packed({f"archive/data/{'x' * 60_000}{place}": b"" for place in range(150)}))
    with pytest.raises(ConfigError, match=r"its list of entries has \d+ bytes, and 8388608 are read"):
        check_pickle(tmp_path / NAME, NAME)


def test_what_torch_has_written_is_read(tmp_path: Path) -> None:
    many = {f"layer.{place}.weight": torch.full((2,), float(place)) for place in range(2000)}
    for content in (saved(), saved(many), packed({"archive/data.pkl": b"x"}), b"\x80\x02}."):
        (tmp_path / NAME).write_bytes(content)
        check_pickle(tmp_path / NAME, NAME)
    (tmp_path / NAME).write_bytes(saved(many))
    assert len(read_shard(tmp_path / NAME, NAME)) == 2000


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: whole[:-1],
        lambda whole: whole + b"\0",
        lambda whole: whole[:4],
        lambda whole: whole[:4] + whole,
        lambda whole: whole.replace(b"PK\x06\x06", b"PK\x06\x05"),
        lambda whole: whole.replace(b"PK\x06\x07", b"PK\x06\x05"),
        lambda whole: whole.replace(b"PK\x01\x02", b"PK\x01\x03", 1),
        lambda whole: packed({"archive/data.pkl": b""}, comment=b"PK\x05\x06" + bytes(18)),
        lambda whole: packed({"archive/data.pkl": b""}, comment=b"a"),
    ],
)
def test_an_archive_with_two_lists_of_entries_or_none_is_damaged(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    # One list would be checked here, and another one read by torch.
    (tmp_path / NAME).write_bytes(spoil(saved()))
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: the weights are damaged: "):
        check_pickle(tmp_path / NAME, NAME)


def test_every_cut_of_an_archive_is_damaged(tmp_path: Path) -> None:
    whole = saved()
    for size in range(4, len(whole), 7):
        (tmp_path / NAME).write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="the weights are damaged"):
            check_pickle(tmp_path / NAME, NAME)
