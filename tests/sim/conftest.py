from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim.running import prepared


@pytest.fixture(scope="module", autouse=True)
def what_other_tests_have_loaded_is_set_aside() -> Iterator[None]:
    with prepared():
        yield
