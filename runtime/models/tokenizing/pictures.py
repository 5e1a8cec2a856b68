"""Turn pictures, and conversations that show some, into what the device reads: token ids with pictures at their places.

A chat template writes one image token for a picture, or the folder says what stands around one. The device puts many
vectors there, so the token is repeated here as often as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from staged_pool.runtime.model import ModelInput, Pixels, TokenIds, TokenSequence
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.sight import PictureLayout
from staged_pool.runtime.models.specs import PictureSpec
from staged_pool.runtime.models.tokenizing.limits import check_text, not_to_be_cut, own_limit, token_limit
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens, read_frame
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.requests import Chat, Image, Side, TextInput
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared

Outcome: TypeAlias = Prepared[TokenSequence] | InvalidInput


class PictureReader:
    """What a language model is given for inputs with pictures. `read` may run in several threads at once.

    Args:
        tokenizer: Of the texts beside them.
        spec: What the folder says of pictures.
        layout: What the model's config says of them.
        images: Reads one picture.

    Raises:
        ConfigError: The tokenizer joins what goes around a picture with other text.
    """

    def __init__(self, tokenizer: TextTokenizer, spec: PictureSpec, layout: PictureLayout, images: ImageReader) -> None:
        self._tokenizer = tokenizer
        self._layout = layout
        self._converses = spec.converses
        self._images = images
        self._alone: SpecialTokens | None = None
        if spec.alone is not None:
            self._alone = read_frame(spec.alone, tokenizer.shared.tokenizer)

    def read(self, inputs: Sequence[ModelInput]) -> list[Outcome]:
        """What the device is to read for each input, or what is wrong with it."""
        return [self._read(given) for given in inputs]

    def _read(self, given: ModelInput) -> Outcome:
        try:
            if not self._converses:
                sequence = self._page(given)
            elif isinstance(given.source, Image):
                message = {"role": "user", "content": (given.source,)}
                sequence = self._conversation(given, TextInput(Chat((message,)), add_special_tokens=False))
            elif isinstance(given.source, TextInput):
                sequence = self._conversation(given, given.source)
            else:
                raise TypeError(f"{type(given.source).__name__} has no pictures")
        except InvalidInput as error:
            return error
        return Prepared(sequence, cost=len(sequence.ids), batch_key=("image", given.outputs))

    def _page(self, given: ModelInput) -> TokenSequence:
        """A picture by itself, in the words that the model was trained to see around one."""
        assert self._alone is not None
        (pixels,) = self._prepared([_only_image(given)], "input")
        ids = [*self._alone.prefix, *self._repeated(pixels), *self._alone.suffix]
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=(pixels,))

    def _conversation(self, given: ModelInput, text: TextInput) -> TokenSequence:
        """What the chat template makes of it. A prompt becomes a system message, but not for a picture by itself."""
        chat = text.source
        assert isinstance(chat, Chat)
        tokenizer, limits = self._tokenizer, self._tokenizer.limits
        limit = token_limit(text.max_tokens, limits.max_tokens)
        written = tokenizer.write_chat(chat, given.prompt if isinstance(given.source, TextInput) else "")
        check_text(written)
        words = tokenizer.shared.ids(written)
        limits.check_ids(words)
        images = chat.images
        if words.count(self._layout.image_token) != len(images):
            raise InvalidInput(
                f"The conversation has {len(images)} images, but the model's chat template makes "
                f"{words.count(self._layout.image_token)} of it: a text must not spell the token that stands for an "
                "image, and a message with images must be one that the template shows.",
                param="messages",
            )
        pictures = self._prepared(images, "input" if isinstance(given.source, Image) else "messages")
        ids = self._expanded(words, pictures)
        if text.max_own_tokens is not None:
            ids = self._cut(ids, own_limit(text.max_own_tokens) or 0, "right")
        special = tokenizer.special if text.add_special_tokens else SpecialTokens([], [])
        if limit is not None and len(ids) + len(special) > limit:
            if text.must_fit:
                raise not_to_be_cut(limit)
            ids = self._cut(ids, max(limit - len(special), 0), text.truncate_side)
        ids = [*special.prefix, *ids, *special.suffix]
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=pictures)

    def _prepared(self, images: Sequence[Image], param: str) -> tuple[Pixels, ...]:
        """Raises what is wrong with an image, and with which one of several, as an error in `param`.

        Prepared pictures may be a thousand times as large as the files they come in: no more of them are made than
        the model could take at once.
        """
        found: list[Pixels] = []
        tokens, most = 0, self._tokenizer.limits.max_tokens
        for number, image in enumerate(images, start=1):
            if tokens > most:
                raise InvalidInput(
                    f"This model's maximum context length is {most} tokens. However, the first {number - 1} of the "
                    f"{len(images)} images in your input take {tokens} tokens alone. Please send fewer or smaller "
                    "images.",
                    param="input",
                )
            try:
                found.append(self._images.read(image))
            except InvalidInput as error:
                which = f"Image {number} of {len(images)}: " if len(images) > 1 else ""
                raise type(error)(f"{which}{error}", param=error.param or param) from error
            tokens += self._layout.of(found[-1])
        return tuple(found)

    def _check_length(self, ids: TokenIds) -> None:
        """Raises `InvalidInput` for an input that is longer than the model takes."""
        most = self._tokenizer.limits.max_tokens
        if len(ids) > most:
            raise InvalidInput(
                f"This model's maximum context length is {most} tokens. However, your input contains {len(ids)} "
                f"tokens, {ids.count(self._layout.image_token)} of them for images. Please send fewer or smaller "
                "images, or less text.",
                param="input",
            )

    def _expanded(self, words: TokenIds, pictures: Sequence[Pixels]) -> TokenIds:
        """With each image token as often as its picture has vectors."""
        ids: TokenIds = []
        left = iter(pictures)
        for word in words:
            if word == self._layout.image_token:
                ids += self._repeated(next(left))
            else:
                ids.append(word)
        return ids

    def _repeated(self, pixels: Pixels) -> TokenIds:
        return [self._layout.image_token] * self._layout.of(pixels)

    def _cut(self, ids: TokenIds, room: int, side: Side) -> TokenIds:
        """The tokens that are left of a conversation, which must have all those of its pictures."""
        if room >= len(ids):
            return ids
        start, end = (0, room) if side == "right" else (len(ids) - room, len(ids))
        image = self._layout.image_token
        if image in ids[:start] or image in ids[end:]:
            raise InvalidInput(
                f"The input contains {len(ids)} tokens, {ids.count(image)} of them for images, and cutting it to "
                f"{room} would cut an image, which is never done. Please allow more tokens, or send fewer or smaller "
                "images.",
                param="truncate_prompt_tokens",
            )
        return ids[start:end]


def _only_image(given: ModelInput) -> Image:
    """The one picture that an input is, by itself or as the only content of the only message.

    Raises:
        InvalidInput: There is more in it.
    """
    if isinstance(given.source, Image):
        return given.source
    if isinstance(given.source, TextInput) and isinstance(given.source.source, Chat):
        chat = given.source.source
        contents = [message.get("content") for message in chat.messages]
        if len(chat.images) == 1 and contents == [chat.images]:
            return chat.images[0]
    raise InvalidInput("The model reads one image or one text at a time, and no conversations of both.", param="input")
