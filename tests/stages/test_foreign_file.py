"""Files of others: regular ones alone are read, and none beyond the limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from staged_pool.stages.foreign_file import BadFile, check_file, open_file, read_file


@pytest.mark.parametrize("read", [read_file, open_file, check_file])
def test_neither_a_device_nor_a_pipe_nor_a_folder_is_read(tmp_path: Path, read: object) -> None:
    assert callable(read)
    (tmp_path / "zeros").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "zeros", tmp_path / "pipe", tmp_path):
        with pytest.raises(BadFile, match="it is no regular file"):
            read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent")


def test_a_huge_file_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)  # takes no room on the disk
    with pytest.raises(BadFile, match="it has 1099511627776 bytes, and 268435456 are allowed"):
        read_file(tmp_path / "huge")
    with open_file(tmp_path / "huge", None) as file:
        assert file.read(3) == bytes(3)


def test_a_file_is_read_to_the_limit_also_if_it_grows(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_file(tmp_path / "link", 100) == bytes(100)
    with pytest.raises(BadFile, match="it has 100 bytes, and 99 are allowed"):
        read_file(tmp_path / "link", 99)
    # A file of the kernel says that it has no bytes.
    with pytest.raises(BadFile, match="it has more than the 10 bytes that are allowed"):
        read_file(Path("/proc/self/status"), 10)
