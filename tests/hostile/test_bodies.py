"""Each route gets dense JSON in several fields and shapes; `python -m tests.hostile.bodies` sends 31 MiB in all."""

from __future__ import annotations

from tests.hostile.bodies import attack, chosen, described, serving

SIZE = 2 * 2**20
FIELDS = 4
"""Of each route: in the order of its example and its description."""

HEALTH_S = 1.0
"""Other tests run on the same cores. A body ten times as large held the server for 30 s."""

GROWN_BYTES = 128 * 2**20
"""Sixty times a body, which heaps of earlier ones may be part of; some took hundreds of times."""


def test_no_body_holds_the_server_or_its_memory() -> None:
    with serving() as server:
        description = described(server)
        seen = [attack(server, field, shape, SIZE) for field, shape in chosen(description, most_fields=FIELDS)]
        paths = {each.field.path for each in seen}
        assert paths == {
            path for path, methods in description["paths"].items() if "requestBody" in methods.get("post", {})
        }
        wrong = [
            str(each)
            for each in seen
            if each.health_s > HEALTH_S or each.grown_bytes > GROWN_BYTES or each.status in (0, 500)
        ]
        assert wrong == []
