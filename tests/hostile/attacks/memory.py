"""Clients that want more memory than there is."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter

from tests.hostile.attack import ATTACKER_KEY, Counts, Setting, Target, attack

SENDERS = 24
TEXTS = 1500
LAST_ANSWER_S = 5.0
"""Seconds to wait for the last answers."""
TEXT = "many words of one text " * 200
"""4.6 KB, of which a request has 1,500: 7 MB. It is cut to 256 tokens, so that the bodies are the most of it."""


@attack("bodies against a small memory limit", Setting(("--memory-limit", "800M")), work_s=1.0, may_lose=True)
def many_large_bodies(target: Target) -> Counts:
    """Each sender has 7 MB on its way all the time."""
    seen: Counter[str] = Counter()
    body = json.dumps({"inputs": [f"{number} {TEXT}" for number in range(TEXTS)], "truncate": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ATTACKER_KEY}"}

    def send() -> None:
        for _ in target.rounds():
            connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
            try:
                connection.request("POST", "/embed", body, headers)
                seen[str(connection.getresponse().status)] += 1
            except OSError:
                seen["connection lost"] += 1
            finally:
                connection.close()

    senders = [threading.Thread(target=send, daemon=True) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    latest = time.monotonic() + target.left_s + LAST_ANSWER_S
    for sender in senders:
        sender.join(max(0.0, latest - time.monotonic()))
    return seen
