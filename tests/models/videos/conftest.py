from __future__ import annotations

import pytest

from staged_pool.runtime.models.videos.limits import VideoLimits

LIMITS = VideoLimits(file_bytes=2**22, pixels=2**20, seconds=60.0, frames=768, decode_s=30.0)


@pytest.fixture
def limits() -> VideoLimits:
    return LIMITS
