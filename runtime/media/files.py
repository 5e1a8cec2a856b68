"""Reading an image from the one folder from which URLs may name files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from staged_pool.runtime.media.urls import PARAM, refused
from staged_pool.stages.errors import ConfigError, TooLarge, UnusableMedia, UrlNotAllowed

_WHY: Final = {errno.ENOENT: "is not there", errno.ENOTDIR: "is not there", errno.EISDIR: "is no file"}


def check_folder(folder: str | None) -> None:
    """Refuse a setting for the folder that is none. Blocks; for a thread.

    Raises:
        ConfigError: There is no such folder.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"allow_media_path={folder!r}: must be a folder")


def read_file(folder: Path, path: str, max_bytes: int) -> bytes:
    """The bytes of a file. Blocks; for a thread.

    Args:
        folder: What the file must lie in, once all links are followed.
        path: Of the file, absolute.
        max_bytes: Of the file.

    Raises:
        UrlNotAllowed: It lies elsewhere, whether or not there is one.
        UnusableMedia: There is no such file, or it is not to be read.
        TooLarge: It is larger.
    """
    return read_beneath(*find_beneath(folder, path), max_bytes)


def find_beneath(folder: Path, path: str) -> tuple[Path, tuple[str, ...]]:
    """Follow all links of a path.

    Args:
        folder: What the file must lie in.
        path: Of the file, absolute.

    Returns:
        The folder, and the names that lead from it to the file; none of them was a link.

    Raises:
        UrlNotAllowed: It lies elsewhere, whether or not there is one.
    """
    try:
        found, root = Path(path).resolve(), folder.resolve()
        return root, found.relative_to(root).parts
    except (OSError, RuntimeError, ValueError):  # links in a circle; a name that no file can have; it lies elsewhere
        raise _outside() from None


def read_beneath(root: Path, names: Sequence[str], max_bytes: int) -> bytes:
    """Read a file, opening one folder after the other and following no link.

    A name that has become a link since `find_beneath`, or leads elsewhere by another way, is not followed: each folder
    is opened from the one before it, as `openat2` does with RESOLVE_BENEATH.

    Raises:
        UrlNotAllowed: A name is a link by now.
        UnusableMedia: There is no such file, or it is not to be read.
        TooLarge: It is larger.
    """
    try:
        with _opened(root, names) as descriptor:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise _unusable("is no file")
            if about.st_size > max_bytes:
                raise too_large(max_bytes)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _outside() from None
        raise _unusable(_WHY.get(error.errno or 0, "cannot be read")) from None
    if len(data) > max_bytes:  # it grew
        raise too_large(max_bytes)
    return data


@contextmanager
def _opened(root: Path, names: Sequence[str]) -> Iterator[int]:
    """A block that has the file open.

    Raises:
        OSError: It cannot be opened; ELOOP where a name is a link.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            inner = _open_folder(name, folder)
            os.close(folder)
            folder = inner
        # Not waiting: a pipe has an end only when somebody writes into it.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(names[-1] if names else ".", flags, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(name: str, within: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    except NotADirectoryError:  # as Linux says of a link
        if stat.S_ISLNK(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _outside() -> UrlNotAllowed:
    return refused("names a file outside of the folder that is open to requests")


def _unusable(why: str) -> UnusableMedia:
    return UnusableMedia(f"What the URL of the image names {why}.", param=PARAM)


def too_large(max_bytes: int) -> TooLarge:
    """The rejection of an image for its size."""
    return TooLarge(f"The image is larger than this server's limit of {max_bytes} bytes.", param=PARAM)
