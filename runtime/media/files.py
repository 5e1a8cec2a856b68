"""Reading a picture from the one folder from which URLs may name files."""

from __future__ import annotations

import errno
import os
import stat
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
    try:
        found = Path(path).resolve()
        inside = found.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle; a name that no file can have
        inside = False
    if not inside:
        raise _outside()
    try:
        # Not waiting: a pipe has an end only when somebody writes into it. No link: it would be one made just now.
        descriptor = os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise _unusable("is no file")
            if about.st_size > max_bytes:
                raise too_large(max_bytes)
            data = file.read(max_bytes + 1)
    except OSError as error:
        if error.errno == errno.ELOOP:  # Python 3.13 resolves links in a circle to themselves
            raise _outside() from None
        raise _unusable(_WHY.get(error.errno or 0, "cannot be read")) from None
    if len(data) > max_bytes:  # it grew
        raise too_large(max_bytes)
    return data


def _outside() -> UrlNotAllowed:
    return refused("names a file outside of the folder that is open to requests")


def _unusable(why: str) -> UnusableMedia:
    return UnusableMedia(f"What the URL of the image names {why}.", param=PARAM)


def too_large(max_bytes: int) -> TooLarge:
    """The refusal of a picture for its size."""
    return TooLarge(f"The image is larger than this server's limit of {max_bytes} bytes.", param=PARAM)
