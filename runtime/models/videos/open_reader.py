"""Opening of a model's reader of videos, if the settings of its folder are supported."""

from __future__ import annotations

from pathlib import Path

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.videos.reader import VideoReader
from staged_pool.runtime.models.videos.settings import read_video_settings
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


def open_videos(folder: Path, config: EngineConfig, images: ImageReader) -> VideoReader | None:
    """Open the reader of videos of a model that has tokens for them.

    Args:
        folder: The model folder.
        config: Limits.
        images: Reader of the folder's images.

    Returns:
        None: the settings are not supported, so the model reads texts and images alone. The log says why.
    """
    try:
        return VideoReader(read_video_settings(folder, images.settings), config, images)
    except ConfigError as error:
        log.warning("videos.off", reason=str(error))
        return None
