"""Pictures that lie in the one folder that is open to requests, and all that does not."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.media.files import check_folder
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import ConfigError, InvalidInput, TooLarge, UnusableMedia

pytestmark = pytest.mark.anyio


@pytest.fixture
def opened(tmp_path: Path) -> MediaFetcher:
    """May read what lies in `tmp_path/open`."""
    (tmp_path / "open" / "below").mkdir(parents=True)
    for name in ("open/a b.png", "open/below/c.png", "closed.png", "open-too.png"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "open" / "in.png").symlink_to("below/c.png")
    (tmp_path / "open" / "out.png").symlink_to(tmp_path / "closed.png")
    (tmp_path / "open" / "up").symlink_to(tmp_path)
    (tmp_path / "open" / "circle").symlink_to("circle")
    (tmp_path / "alias").symlink_to("open")
    os.mkfifo(tmp_path / "open" / "pipe")
    return MediaFetcher(EngineConfig(allow_media_path=str(tmp_path / "alias"), max_image_bytes=100))


@pytest.mark.parametrize("name", ["open/a%20b.png", "open/below/c.png", "open/in.png", "alias/in.png", "open/./in.png"])
async def test_a_file_in_the_folder_is_read(opened: MediaFetcher, tmp_path: Path, name: str) -> None:
    for host in ("", "localhost"):
        image = await opened.fetch(Image(f"file://{host}{tmp_path}/{name}", key="k"))
        assert image.source in (b"open/a b.png", b"open/below/c.png")
        assert image.key == "k"


@pytest.mark.parametrize(
    "name",
    ["closed.png", "open-too.png", "open/../closed.png", "open/%2e%2e/closed.png", "open/out.png", "open/up/closed.png",
     "none.png", "open/up/none.png", "open/circle", "open/" + "a" * 300 + "/../../closed.png"],
)  # fmt: skip
async def test_a_file_outside_is_refused_whether_or_not_there_is_one(
    opened: MediaFetcher, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await opened.fetch(Image(f"file://{tmp_path}/{name}"))
    assert type(caught.value) is InvalidInput
    wanted = "The URL of the image names a file outside of the folder that is open to requests."
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("name", "what"), [("none.png", "is not there"), ("in.png/a", "is not there"), ("below", "is no file")]
)
async def test_what_is_no_file_is_refused(opened: MediaFetcher, tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(UnusableMedia, match=what):
        await opened.fetch(Image(f"file://{tmp_path}/open/{name}"))


async def test_a_pipe_is_not_waited_for(opened: MediaFetcher, tmp_path: Path) -> None:
    with pytest.raises(UnusableMedia, match="is no file"):
        await opened.fetch(Image(f"file://{tmp_path}/open/pipe"))


async def test_a_file_over_the_limit_is_refused(opened: MediaFetcher, tmp_path: Path) -> None:
    large = tmp_path / "open" / "large.png"
    await anyio.to_thread.run_sync(large.touch)
    await anyio.to_thread.run_sync(os.truncate, large, 10**12)  # a hole: it takes no room on the disk
    with pytest.raises(TooLarge, match="limit of 100 bytes"):
        await opened.fetch(Image(f"file://{large}"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file://server/a.png", "names a file of another machine"),
        ("file:a.png", "has no absolute path"),
        ("file:///a%00b", "has no absolute path"),
        ("file:///a%ff", "has a path that is not UTF-8"),
    ],
)
async def test_a_url_of_a_file_is_read_strictly(opened: MediaFetcher, url: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        await opened.fetch(Image(url))


async def test_no_file_is_read_unless_the_settings_say_from_where(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="this server opens none"):
        await MediaFetcher(EngineConfig(allow_media_domains=("*",))).fetch(Image(f"file://{tmp_path}"))


def test_the_setting_must_be_a_folder(tmp_path: Path) -> None:
    check_folder(None)
    check_folder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"allow_media_path=.*: must be a folder"):
        check_folder(str(tmp_path / "none"))
