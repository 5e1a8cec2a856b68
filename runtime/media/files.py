"""Files of the one folder that `file:` URLs may name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from staged_pool.runtime.media.urls import URL_PARAM, url_not_allowed
from staged_pool.stages.errors import ConfigError, TooLarge, UnusableMedia, UrlNotAllowed

_WHY: Final = {
    errno.ENOENT: "a file that does not exist",
    errno.ENOTDIR: "a file that does not exist",
    errno.EISDIR: "something that is not a file",
}


def check_folder(folder: str | None) -> None:
    """Check the setting of the folder. Blocks: call it in a thread.

    Raises:
        ConfigError: There is no such folder.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"allow_media_path={folder!r}: must be a folder")


def read_file(folder: Path, path: str, max_bytes: int) -> bytes:
    """Read a file. Blocks: call it in a thread.

    Args:
        folder: The folder that the file must be in after all links are followed.
        path: Absolute path of the file.
        max_bytes: Largest size of the file.

    Raises:
        UrlNotAllowed: The path is outside of the folder, whether or not it exists.
        UnusableMedia: The file does not exist, or cannot be read.
        TooLarge: The file is larger.
    """
    return read_beneath(*find_beneath(folder, path), max_bytes)


def find_beneath(folder: Path, path: str) -> tuple[Path, tuple[str, ...]]:
    """Follow all links of a path.

    Args:
        folder: The folder that the file must be in.
        path: Absolute path of the file.

    Returns:
        The folder, and the names from there to the file. None of them was a link.

    Raises:
        UrlNotAllowed: The path is outside of the folder, whether or not it exists.
    """
    try:
        found, root = Path(path).resolve(), folder.resolve()
        return root, found.relative_to(root).parts
    except (OSError, RuntimeError, ValueError):  # a circle of links; an invalid name; outside of the folder
        raise _outside() from None


def read_beneath(root: Path, names: Sequence[str], max_bytes: int) -> bytes:
    """Read a file without following links.

    Each folder is opened relative to the one before it, like `openat2` with RESOLVE_BENEATH. So a name that has become
    a link since `find_beneath` does not lead outside.

    Raises:
        UrlNotAllowed: A name has become a link.
        UnusableMedia: The file does not exist, or cannot be read.
        TooLarge: The file is larger.
    """
    try:
        with _opened(root, names) as descriptor:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise _unusable("something that is not a file")
            if about.st_size > max_bytes:
                raise too_large(max_bytes)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _outside() from None
        raise _unusable(_WHY.get(error.errno or 0, "a file that cannot be read")) from None
    if len(data) > max_bytes:  # it grew
        raise too_large(max_bytes)
    return data


@contextmanager
def _opened(root: Path, names: Sequence[str]) -> Iterator[int]:
    """Open the file for a block.

    Raises:
        OSError: It cannot be opened. ELOOP: a name is a link.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            inner = _open_folder(name, folder)
            os.close(folder)
            folder = inner
        # O_NONBLOCK: opening a pipe would wait for a writer.
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
    except NotADirectoryError:  # Linux raises it for a link
        if stat.S_ISLNK(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _outside() -> UrlNotAllowed:
    return url_not_allowed("names a file outside of the folder that is open to requests")


def _unusable(why: str) -> UnusableMedia:
    return UnusableMedia(f"The URL of the image names {why}.", param=URL_PARAM)


def too_large(max_bytes: int) -> TooLarge:
    """Return the error for an image that is too large."""
    return TooLarge(f"The image is larger than this server's limit of {max_bytes} bytes.", param=URL_PARAM)
