"""Steps of videos as text, for models that read the time of each step (Qwen3-VL).

A chat template writes one video token between two marks. In its place stands, for each step, its time in seconds and
the step itself between the same marks: `<0.3 seconds><|vision_start|>...<|vision_end|>`. This is
`replace_video_token` of `Qwen3VLProcessor` in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from staged_pool.runtime.models.vision.image_layout import ImageLayout


class MediaSize(Protocol):
    """The size of an image or a video."""

    @property
    def patches(self) -> int | None:
        """Patches of all steps. None: all images have one size."""

    @property
    def times_s(self) -> tuple[float, ...] | None:
        """Time of each step in seconds. None: an image, or a video whose steps stand together."""


class VideoSteps:
    """Writer of the steps of one model's videos.

    Args:
        layout: Layout of its images and videos.
        tokenizer: Its tokenizer, which knows the texts of the marks.
    """

    def __init__(self, layout: ImageLayout, tokenizer: Tokenizer) -> None:
        self._layout = layout
        marks = layout.step_marks or ()
        texts = [tokenizer.id_to_token(mark) or "" for mark in (*marks[:1], layout.video_token or 0, *marks[1:])]
        self._step = "".join(texts)
        alone = texts[len(texts) // 2]
        self._clip = re.compile(f"{re.escape(self._step)}|{re.escape(alone)}") if alone else None

    def rewriter(self, sizes: Iterable[MediaSize]) -> Callable[[str], str] | None:
        """Return a function that puts steps in the places of videos.

        Args:
            sizes: Those of images and videos, in the order of their tokens.

        Returns:
            A function of one text, or of parts of it in order. None: no video has steps with times.
        """
        times = [each.times_s for each in sizes if each.times_s is not None]
        if not times or self._clip is None:
            return None
        left, pattern = iter(times), self._clip

        def steps(_: re.Match[str]) -> str:
            return "".join(f"<{time:.1f} seconds>{self._step}" for time in next(left, ()))

        return lambda text: pattern.sub(steps, text)

    def tokens(self, sizes: Sequence[MediaSize]) -> list[int]:
        """Return the number of tokens in each place: of an image, a video, or a step with a time."""
        found: list[int] = []
        for each in sizes:
            tokens, steps = self._layout.tokens_of(each.patches), len(each.times_s or (0,))
            found += [tokens // steps] * steps
        return found
