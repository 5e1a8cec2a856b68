"""Images of a few kilobytes that take much: memory, a core for seconds, or the interpreter's lock."""

from __future__ import annotations

import base64
import http.client
import io
import itertools
import json
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial

from PIL import Image as Pillow

from perf.tools.image_files import png, saved
from tests.hostile.attack import ATTACKER_KEY, Counts, Setting, Target, attack

THREADS = 16
"""Requests at once, and threads that the server decodes in."""

EDGE = 3450
"""Pixels: 12 million an image. Sixteen of them took 2 GB, whatever their kind."""

SEEING = Setting(
    ("--memory-limit", "1200M", "--image-preprocess-limit", str(THREADS), "--image-cache-mb", "0"), model="clip"
)

UNDER_ULIMIT = Setting(
    ("--image-preprocess-limit", str(THREADS), "--image-cache-mb", "0"), model="clip", address_space_bytes=4 * 2**30
)
"""Only `ulimit -v` limits the server's memory here. The server maps 2.1 GB at its start, mostly libraries."""


def _scans(edge: int, count: int) -> bytes:
    """A progressive JPEG with a number of copies of its second scan."""
    file = io.BytesIO()
    Pillow.new("L", (edge, edge)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    starts = [place for place in range(len(data)) if data[place : place + 2] == b"\xff\xda"]
    end = next(place for place in range(starts[1] + 14, len(data)) if data[place] == 0xFF and data[place + 1])
    return data[:end] + data[starts[1] : end] * count + data[end:]


def _large() -> Mapping[str, Callable[[], bytes]]:
    """Images of which every pixel is taken."""
    return {
        "1 bit": lambda: png(1, 0)(EDGE),
        "grey of 16 bits": lambda: png(16, 0, clear=b"\0\1")(EDGE),
        "transparent": lambda: png(8, 6)(EDGE),
        "interlaced": lambda: png(8, 6, interlaced=True)(EDGE),
        "a colour of 16 bits": lambda: png(16, 2, clear=bytes(6))(EDGE),
        "progressive": lambda: saved("RGB", "JPEG", progressive=True)(EDGE),
        "WebP": lambda: saved("RGBA", "WebP", lossless=True, method=0)(EDGE),
        "GIF": lambda: saved("P", "GIF", transparency=0)(EDGE),
    }


def _slow() -> Mapping[str, Callable[[], bytes]]:
    """Images that are mostly something else."""
    jpeg, gif = (saved(mode, format)(32) for mode, format in (("RGB", "JPEG"), ("P", "GIF")))
    small = png(8, 2)(32)
    runs = struct.pack("<IiiHHIIiiII", 40, 8000, 8000, 1, 8, 1, 0, 0, 0, 256, 0) + bytes(1024)
    text = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", 0x2F5C7E0F)
    gif_head = b"GIF89a" + struct.pack("<HH", 32, 32) + b"\0\0\0"
    return {
        "99 scans": lambda: _scans(6000, 90),
        "fill bytes": lambda: jpeg[:2] + b"\xff" * 8_000_000 + jpeg[2:],
        "comments": lambda: jpeg[:2] + b"\xff\xfe\0\2" * 1_000_000 + jpeg[2:],
        "tables": lambda: jpeg[:2] + (b"\xff\xdb\0\x43\0" + bytes([1] * 64)) * 100_000 + jpeg[2:],
        "chunks": lambda: small[:33] + text * 500_000 + small[33:],
        "blocks of one byte": lambda: gif_head + b"!\xfe" + b"\1a" * 4_000_000 + b"\0" + gif[13:],
        "bytes between blocks": lambda: gif_head + bytes(8_000_000) + gif[13:],
        "run lengths": lambda: b"BM" + struct.pack("<IHHI", 0, 0, 0, 1078) + runs + b"\1\1\0\0" * 8000,
    }


@cache
def _bodies(kind: Callable[[], Mapping[str, Callable[[], bytes]]]) -> dict[str, bytes]:
    """Return the bodies of requests with each image."""
    found = {}
    for name, make in kind().items():
        url = "data:image/x;base64," + base64.b64encode(make()).decode()
        found[name] = json.dumps({"input": [{"image": url}]}).encode()
    return found


def _send(target: Target, bodies: Mapping[str, bytes]) -> Counts:
    """Send images from as many clients as the server has threads, one after the other."""
    seen: Counter[str] = Counter()
    headers = {"authorization": f"Bearer {ATTACKER_KEY}", "content-type": "application/json"}

    def ask(first: int) -> None:
        names = list(bodies)
        for place, _ in zip(itertools.count(first), target.rounds(), strict=False):
            connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=120)
            try:
                connection.request("POST", "/v1/embeddings", bodies[names[place % len(names)]], headers)
                answer = connection.getresponse()
                answer.read()
                seen[str(answer.status)] += 1
            except OSError as error:
                seen[type(error).__name__] += 1
            finally:
                connection.close()

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


@attack("images that unpack to a hundred times their bytes (F5)", SEEING, prepare=partial(_bodies, _large))
def large_images(target: Target) -> Counts:
    """Sixteen at a time, for as much memory as the server lets them have."""
    return _send(target, _bodies(_large))


@attack("images that unpack, with 4 GiB of address space", UNDER_ULIMIT, prepare=partial(_bodies, _large))
def images_in_an_address_space(target: Target) -> Counts:
    """Send images to a server whose allocations fail beyond a limit."""
    seen = _send(target, _bodies(_large))
    if set(seen) - {"200", "413", "429"}:
        raise AssertionError(f"memory ran out: {dict(seen)}")
    return seen


@attack("images of endless scans, chunks and comments (F11)", SEEING, prepare=partial(_bodies, _slow))
def slow_images(target: Target) -> Counts:
    """Files that kept a core, and the interpreter's lock, for up to ten seconds each."""
    return _send(target, _bodies(_slow))
