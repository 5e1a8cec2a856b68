"""Prompts around a page: the tokens of a model that reads one image at a time, inside a fixed text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from threading import Lock
from typing import Final, TypeAlias

from tokenizers import Tokenizer

from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.specs.conversation import ImageSpec, TileTexts
from staged_pool.runtime.models.tokenizing.chat import plain_text, without_special_tokens
from staged_pool.runtime.models.tokenizing.special_tokens import read_frame
from staged_pool.runtime.models.vision.image_layout import ImageLayout
from staged_pool.runtime.requests import Chat, Image, TextInput
from staged_pool.runtime.tokens import TokenIds
from staged_pool.stages.errors import ConfigError, InvalidInput

_KEPT: Final = 256
"""Grids whose tokens are kept. Usual folders have at most 16; a prompt of 17 tiles has about 1,200 tokens."""


class FramedPrompt:
    """The prompt around an image whose tokens stand together.

    Args:
        tokenizer: The folder's tokenizer.
        frame: Text before and after the image.
        layout: Layout of the model's images.
        left_out: Beginning of the text before it that pooling leaves out.

    Raises:
        ConfigError: The tokenizer merges the text with others.
    """

    left_out: int
    """Leading tokens that pooling leaves out."""

    def __init__(
        self, tokenizer: Tokenizer, frame: tuple[str, str], layout: ImageLayout, *, left_out: str = ""
    ) -> None:
        self._frame = read_frame(frame, tokenizer)
        self._layout = layout
        self.left_out = len(read_frame((left_out, ""), tokenizer).prefix)

    def ids(self, grid: Size | None) -> TokenIds:
        """Return the tokens of an image inside the prompt; see `Pixels.grid`."""
        count = self._layout.tokens_of(None if grid is None else math.prod(grid))
        return [*self._frame.prefix, *repeat(self._layout.image_token, count), *self._frame.suffix]


class TiledPrompt:
    """The prompt around an image, for each grid of tiles. Thread-safe.

    The prompt is tokenized as a whole, as in training, with the tokenizer's special tokens.

    Args:
        tokenizer: The folder's tokenizer.
        frame: Text before and after the image.
        texts: Texts around each tile.
        layout: Layout of the model's images.

    Raises:
        ConfigError: The tokenizer lacks a token of the tiles.
    """

    left_out: int = 0

    def __init__(self, tokenizer: Tokenizer, frame: tuple[str, str], texts: TileTexts, layout: ImageLayout) -> None:
        self._tokenizer = tokenizer
        self._frame = frame
        self._texts = texts
        self._layout = layout
        self._lock = Lock()
        self._known: dict[Size, TokenIds] = {}
        for token in (texts.image, texts.around):
            if tokenizer.token_to_id(token) is None:
                raise ConfigError(f"tokenizer.json: {token} is missing: it stands for or around the tiles of an image")

    def ids(self, grid: Size | None) -> TokenIds:
        """Return the tokens of an image inside the prompt. Not to be changed.

        Args:
            grid: Rows and columns of tiles. One tile, or None: the image is not cut.
        """
        grid = grid or (1, 1)
        with self._lock:
            if (known := self._known.get(grid)) is not None:
                return known
        found: TokenIds = self._tokenizer.encode_batch_fast([self.text(grid)])[0].ids
        with self._lock:
            if len(self._known) < _KEPT:
                self._known[grid] = found
        return found

    def text(self, grid: Size) -> str:
        """Return the prompt as a text, by the rules of `Idefics3Processor` of transformers."""
        texts, (rows, columns) = self._texts, grid
        tile = texts.image * self._layout.tokens
        whole = f"{texts.around}{texts.whole}{tile}{texts.around}"
        if rows * columns == 1:
            shown = whole
        else:
            named = [
                [texts.of_tile.format(row=row + 1, column=column + 1) for column in range(columns)]
                for row in range(rows)
            ]
            lines = ("".join(f"{texts.around}{name}{tile}" for name in line) for line in named)
            shown = "".join(f"{line}\n" for line in lines) + f"\n{whole}"
        return f"{self._frame[0]}{shown}{self._frame[1]}"


PagePrompt: TypeAlias = FramedPrompt | TiledPrompt


def page_prompt(tokenizer: Tokenizer, spec: ImageSpec, layout: ImageLayout) -> PagePrompt:
    """Build the prompt of a model that reads one image at a time; raises the errors of its class."""
    assert spec.frame is not None
    if spec.tiles is not None:
        return TiledPrompt(tokenizer, spec.frame, spec.tiles, layout)
    return FramedPrompt(tokenizer, spec.frame, layout, left_out=spec.left_out)


def only_image(source: object, ignored_texts: Sequence[str]) -> Image:
    """The single image of an input; an ignored text may stand beside it.

    Raises:
        InvalidInput: The input has other content.
    """
    match source:
        case Image():
            return source
        case TextInput(source=Chat() as chat) | (Chat() as chat):
            if len(chat.images) == 1 and without_special_tokens(plain_text(chat)) in ("", *ignored_texts):
                return chat.images[0]
    known = " or ".join(repr(text) for text in ignored_texts)
    raise InvalidInput(
        "The model reads one image or one text at a time, and no conversations of both. The only text allowed beside "
        f"an image is the model's own prompt: {known}.",
        param="messages",
    )
