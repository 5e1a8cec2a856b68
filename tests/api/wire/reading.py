"""Readers of answers, as clients have them."""

from __future__ import annotations

import json
from typing import Any

from staged_pool.api.wire.chunked_json import Pieces
from staged_pool.api.wire.exchange import Written


def parsed(answer: Pieces | Written) -> Any:
    """The value of an answer in JSON, of one piece or of many."""
    content = answer.content if isinstance(answer, Written) else answer
    return json.loads(content if isinstance(content, bytes) else b"".join(content))
