"""Images in the one folder that is open to requests, and files outside of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import structlog

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.media.files import check_folder, find_beneath, read_beneath
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import (
    ConfigError,
    InvalidInput,
    MediaTimedOut,
    MediaUnavailable,
    TooLarge,
    UnusableMedia,
    UrlNotAllowed,
)
from tests.support.gates import Gate

WAIT_TIMEOUT_S = 0.3

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
async def test_a_file_outside_is_rejected_whether_or_not_there_is_one(
    opened: MediaFetcher, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UrlNotAllowed) as caught:
        await opened.fetch(Image(f"file://{tmp_path}/{name}"))
    assert type(caught.value) is UrlNotAllowed
    wanted = "The URL of the image names a file outside of the folder that is open to requests."
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("none.png", "names a file that does not exist"),
        ("in.png/a", "names a file that does not exist"),
        ("below", "names something that is not a file"),
    ],
)
async def test_anything_but_a_file_is_rejected(opened: MediaFetcher, tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(UnusableMedia, match=what):
        await opened.fetch(Image(f"file://{tmp_path}/open/{name}"))


async def test_a_pipe_is_not_waited_for(opened: MediaFetcher, tmp_path: Path) -> None:
    with pytest.raises(UnusableMedia, match="names something that is not a file"):
        await opened.fetch(Image(f"file://{tmp_path}/open/pipe"))


async def test_a_file_over_the_limit_is_rejected(opened: MediaFetcher, tmp_path: Path) -> None:
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
    with pytest.raises(UrlNotAllowed, match="this server reads no files"):
        await MediaFetcher(EngineConfig(allow_media_domains=("*",))).fetch(Image(f"file://{tmp_path}"))


def test_the_setting_must_be_a_folder(tmp_path: Path) -> None:
    check_folder(None)
    check_folder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"allow_media_path=.*: must be a folder"):
        check_folder(str(tmp_path / "none"))


class Disk:
    """Reads real files. Files called `hung` do not answer until the test is over."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.asked = 0

    def read(self, folder: Path, path: str, max_bytes: int) -> bytes:
        if path.endswith("hung"):
            self.asked += 1
            self.gate()
        return b"read"


@contextmanager
def on_a_disk(**settings: Any) -> Iterator[tuple[Disk, MediaFetcher]]:
    disk = Disk()
    config = EngineConfig(allow_media_path="/", media_timeout_s=WAIT_TIMEOUT_S, **settings)
    try:
        yield disk, MediaFetcher(config, read=disk.read)
    finally:
        disk.gate.open()


async def test_a_read_that_never_ends_takes_one_place_and_the_time_of_nobody(
    logged: list[structlog.typing.EventDict],
) -> None:
    with on_a_disk(media_limit=2) as (_, fetcher):
        with pytest.raises(MediaTimedOut, match=r"could not be read within 0\.3 s"):
            await fetcher.fetch(Image("file:///hung"))
        for _ in range(3):
            assert (await fetcher.fetch(Image("file:///a"))).source == b"read"
        assert [event for event in logged if event["log_level"] == "error"] == [
            {"event": "media.files_overdue", "log_level": "error", "reads": 1, "limit": 2}
        ]


async def test_where_no_read_ends_no_other_one_is_begun_until_one_does() -> None:
    with on_a_disk(media_limit=2) as (disk, fetcher):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(timed_out, fetcher)
        with pytest.raises(MediaUnavailable, match="disk of the image does not answer") as caught:
            await fetcher.fetch(Image("file:///a"))
        assert type(caught.value) is MediaUnavailable
        disk.gate.open()
        await can_read(fetcher)
    assert disk.asked == 2


async def can_read(fetcher: MediaFetcher) -> None:
    """Wait until the thread has said that its read has ended."""
    with anyio.fail_after(30):
        while True:
            try:
                assert (await fetcher.fetch(Image("file:///a"))).source == b"read"
                return
            except MediaUnavailable:
                await anyio.sleep(0.001)


async def timed_out(fetcher: MediaFetcher) -> None:
    with pytest.raises(MediaTimedOut):
        await fetcher.fetch(Image("file:///hung"))


async def test_who_waits_for_a_place_waits_no_longer_than_for_a_read() -> None:
    with on_a_disk(media_limit=1) as (disk, fetcher):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(timed_out, fetcher)
    assert disk.asked == 1


async def test_a_caller_who_leaves_does_not_wait_for_the_disk_and_the_place_is_kept(
    logged: list[structlog.typing.EventDict],
) -> None:
    with on_a_disk(media_limit=1) as (disk, fetcher):
        with anyio.move_on_after(0.001) as leaving:
            await fetcher.fetch(Image("file:///hung"))
        assert leaving.cancelled_caught
        await timed_out(fetcher)
        assert [event["event"] for event in logged] == ["media.files_overdue"]
        disk.gate.open()
        await can_read(fetcher)


async def test_a_thread_that_cannot_be_had_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with on_a_disk(media_limit=1) as (_, fetcher):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError):
                await fetcher.fetch(Image("file:///a"))
        assert (await fetcher.fetch(Image("file:///a"))).source == b"read"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_read_that_never_ends_does_not_hold_up_the_end_of_the_process(backend: str) -> None:
    program = """
        import threading, anyio
        from staged_pool.runtime.config import EngineConfig
        from staged_pool.runtime.media.fetcher import MediaFetcher
        from staged_pool.runtime.requests import Image
        from staged_pool.stages.errors import MediaTimedOut

        async def main():
            config = EngineConfig(allow_media_path="/", media_timeout_s=0.01)
            fetcher = MediaFetcher(config, read=lambda *_: threading.Event().wait())
            try:
                await fetcher.fetch(Image("file:///a"))
            except MediaTimedOut:
                print("timed out")
    """
    text = textwrap.dedent(program) + f"\nanyio.run(main, backend={backend!r})\n"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["timed out"]), ended.stderr


@pytest.mark.parametrize("swapped", ["below", "below/deeper", "below/deeper/c.png"])
@pytest.mark.parametrize("absolute", [True, False])
def test_what_becomes_a_link_after_it_was_found_is_not_followed(tmp_path: Path, swapped: str, absolute: bool) -> None:
    inside, outside = tmp_path / "open", tmp_path / "closed"
    for folder in (inside, outside):
        (folder / "below" / "deeper").mkdir(parents=True)
        (folder / "below" / "deeper" / "c.png").write_bytes(folder.name.encode())
    root, names = find_beneath(inside, str(inside / "below" / "deeper" / "c.png"))
    assert read_beneath(root, names, 100) == b"open"
    there = inside / swapped
    target = outside / swapped
    there.rename(tmp_path / "aside")
    there.symlink_to(target if absolute else os.path.relpath(target, there.parent))
    assert (inside / "below" / "deeper" / "c.png").read_bytes() == b"closed"
    with pytest.raises(UrlNotAllowed, match="outside of the folder"):
        read_beneath(root, names, 100)


def test_a_file_of_a_folder_that_has_gone_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "c.png").write_bytes(b"c")
    root, names = find_beneath(tmp_path, str(tmp_path / "below" / "c.png"))
    (tmp_path / "below").rename(tmp_path / "elsewhere")
    for put in (lambda: None, lambda: (tmp_path / "below").write_bytes(b"")):
        put()
        with pytest.raises(UnusableMedia, match="names a file that does not exist"):
            read_beneath(root, names, 100)


def test_reading_leaves_no_folder_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.png").write_bytes(b"c")
    (tmp_path / "a" / "pipe").mkdir()
    before = sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else []
    root, names = find_beneath(tmp_path, str(tmp_path / "a" / "b" / "c.png"))
    assert read_beneath(root, names, 1) == b"c"
    for wrong in (("a", "no"), ("a", "b", "c.png", "d"), ("a", "pipe"), ()):
        with pytest.raises(UnusableMedia):
            read_beneath(root, wrong, 1)
    with pytest.raises(TooLarge):
        read_beneath(root, names, 0)
    assert (sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else []) == before
