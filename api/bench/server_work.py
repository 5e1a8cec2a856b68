"""Work of a staged-pool server during a load, as its `/stages` counts it. Other servers say nothing."""

from __future__ import annotations

from typing import Any

import orjson

from staged_pool.api.bench.connection import Reply
from staged_pool.stages import foreign_json


def read_work(reply: Reply) -> dict[str, int] | None:
    """Return the counts of all models since the start of the server; None if the answer has none."""
    try:
        models = foreign_json.decode(reply.body, orjson.loads)["models"].values() if reply.status == 200 else ()
        devices = [each["device"] for each in models]
        counts = {
            "batches": sum(sum(device["batches"].values()) for device in devices),
            "items": sum(device["items"] for device in devices),
            "coalesced_items": sum(device["coalesced_items"] for device in devices),
        }
    except (foreign_json.BadJson, KeyError, TypeError, AttributeError):
        return None
    return counts if devices else None


def work_between(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, Any] | None:
    """Return the work between two looks; None if one is missing, or the server has restarted."""
    if before is None or after is None:
        return None
    done: dict[str, Any] = {name: after[name] - before[name] for name in after}
    if min(done.values()) < 0:
        return None
    done["items_per_batch"] = round(done["items"] / done["batches"], 2) if done["batches"] else None
    return done
