"""Each route gets dense JSON in several fields and shapes; `python -m tests.hostile.bodies` sends 31 MiB in all."""

from __future__ import annotations

from staged_pool.runtime.models.tokenizing.limits import MAX_CHARACTERS
from tests.hostile.bodies import SHAPES, TEXTS, attack, attacked_on_every_route, chosen, described

SIZE = 2**20
FIELDS = 1
"""Fields of each route, in the order of its description. All routes together get every shape."""

HEALTH_S = 1.0
"""Other tests run on the same cores. A body ten times as large held the server for 30 s."""

GROWN_BYTES = 128 * 2**20
"""Beside a body of 1 MiB: heaps of earlier ones may be part of it."""

TOKENIZED_BYTES = 400 * MAX_CHARACTERS
"""A text that is as long as one may be: a tokenizer takes so much for it, once for each thread."""


def most_grown_bytes(shape: str) -> int:
    return GROWN_BYTES + (TOKENIZED_BYTES if shape in (*TEXTS, "parts of a message") else 0)


def test_no_body_holds_the_server_or_its_memory() -> None:
    with attacked_on_every_route() as server:
        description = described(server)
        seen = [attack(server, field, shape, SIZE) for field, shape in chosen(description, most_fields=FIELDS)]
        assert {each.shape for each in seen} == set(SHAPES)
        paths = {each.field.path for each in seen}
        assert paths == {
            path for path, methods in description["paths"].items() if "requestBody" in methods.get("post", {})
        }
        wrong = [
            str(each)
            for each in seen
            if each.health_s > HEALTH_S or each.grown_bytes > most_grown_bytes(each.shape) or each.status in (0, 500)
        ]
        assert wrong == []
