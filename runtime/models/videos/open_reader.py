"""Opening of a model's reader of videos, if the settings of its folder are supported."""

from __future__ import annotations

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.runtime.models.specs.pair_forms import PairTemplate
from staged_pool.runtime.models.videos.reader import VideoReader
from staged_pool.runtime.models.videos.settings import VideoRule, read_video_settings
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


def open_videos(
    folder: ModelFolder, rule: VideoRule | None, config: EngineConfig, images: ImageReader
) -> VideoReader | None:
    """Open the reader of a model's videos, if it has tokens for them.

    Args:
        folder: The model folder.
        rule: Rules of its video processor. None: it has no token for videos.
        config: Limits.
        images: Reader of the folder's images.

    Returns:
        None: the model reads texts and images alone. If settings are not supported, the log says why.
    """
    if rule is None or not _takes_videos(folder):
        return None
    try:
        return VideoReader(read_video_settings(folder.body, images.settings, rule), config, images)
    except ConfigError as error:
        log.warning("videos.off", reason=str(error))
        return None


def _takes_videos(folder: ModelFolder) -> bool:
    """True if a conversation or a pair of the model has a place for videos."""
    if folder.images is None or not folder.images.takes_conversations:
        return False
    if folder.scoring != "cross-encoder":
        return True
    form = folder.pair_template
    return isinstance(form, PairTemplate) and (form.text is None or form.video is not None)
