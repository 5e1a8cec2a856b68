"""The values that travel between stages."""

from __future__ import annotations

import pytest

from staged_pool.stages.work import Prepared


@pytest.mark.parametrize(
    ("identity", "scope", "expected"),
    [(b"same", None, b"same"), (b"same", "tenant", (b"same", "tenant")), (None, "tenant", None), (None, None, None)],
)
def test_an_identity_holds_within_its_scope(identity: bytes | None, scope: object, expected: object) -> None:
    assert Prepared("payload", 1, identity=identity).identity_in(scope) == expected
