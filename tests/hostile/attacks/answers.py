"""Clients that request large answers and read little of them."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter

from tests.hostile.attack import Counts, Target, attack

WORDS = 250
"""Words of one text: 252 tokens, which become as many vectors of 384 numbers."""
TEXTS = 100
READERS = 8


@attack("answers of token vectors that are hardly read (F6)", work_s=0.5)
def slow_readers_of_token_vectors(target: Target) -> Counts:
    """100 KB of texts become 120 MB of JSON, eight times."""
    seen: Counter[str] = Counter()
    texts = [" ".join(["word"] * WORDS + [str(place)]) for place in range(TEXTS)]
    body = json.dumps({"inputs": texts}).encode()
    head = target.headers("content-type: application/json", f"content-length: {len(body)}", path="/embed_all")
    readers: list[socket.socket] = []
    for _ in range(READERS):
        reader = socket.create_connection(("127.0.0.1", target.port))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(head + body)
        readers.append(reader)
    for _ in target.rounds():
        for reader in readers:
            reader.setblocking(False)
            try:
                part = reader.recv(256)
            except BlockingIOError:
                continue
            except ConnectionError:
                seen["cut off"] += 1
                continue
            if part.startswith(b"HTTP/1.1 "):
                seen[part[9:12].decode()] += 1
            seen["bytes read"] += len(part)
        time.sleep(0.1)
    seen["readers"] = len(readers)
    for reader in readers:
        reader.close()
    return seen
