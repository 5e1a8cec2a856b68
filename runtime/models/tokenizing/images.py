"""Images and conversations with images, as token ids with repeated image tokens.

A chat template writes one image token per image, or the folder defines the text around an image. The device replaces
image tokens by image vectors, so the token is repeated here once per vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TypeAlias, TypeVar

from staged_pool.runtime.model import ModelInput, Pixels, TokenSequence
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.specs.model import ImageSpec
from staged_pool.runtime.models.tokenizing.chat import plain_text, without_special_tokens
from staged_pool.runtime.models.tokenizing.limits import check_own_limit, check_text, token_limit, too_long_error
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens, read_frame
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.models.vision.image_layout import ImageLayout
from staged_pool.runtime.requests import Chat, Image, Side, TextInput
from staged_pool.runtime.tokens import TokenIds, Tokens
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared

ReadInput: TypeAlias = Prepared[TokenSequence] | InvalidInput
T = TypeVar("T")


class MultimodalReader:
    """Preprocessor of inputs with images. Every method may run in several threads at once.

    Args:
        tokenizer: Tokenizer of the texts.
        spec: Image settings of the folder.
        layout: Image settings of the model's config: the image token, and its number per image.
        images: Reader of one image.

    Raises:
        ConfigError: The tokenizer merges the text around an image with other text, or does not know the image token.
    """

    def __init__(self, tokenizer: TextTokenizer, spec: ImageSpec, layout: ImageLayout, images: ImageReader) -> None:
        self.spec = spec
        self.layout = layout
        self._tokenizer = tokenizer
        self._images = images
        self._frame: SpecialTokens | None = None
        if spec.frame is not None:
            self._frame = read_frame(spec.frame, tokenizer.shared.tokenizer)
        self._check_image_token()

    def _check_image_token(self) -> None:
        """Check the image token: none in the frame, and one per image in the chat template.

        Raises:
            ConfigError: The count differs: config.json and the tokenizer disagree about the image token.
        """
        image = self.layout.image_token
        if self._frame is not None:
            count, place = [*self._frame.prefix, *self._frame.suffix].count(image), "the text around an image"
            expected = 0
        else:
            message = {"role": "user", "content": (Image(b""),)}
            try:
                written = self._tokenizer.write_chat(Chat((message,)))
            except InvalidInput:  # the template needs more than an image, or is missing: requests get the error
                return
            count, place = self._tokenizer.shared.ids(written).count(image), "the chat template, for one image,"
            expected = 1
        if count != expected:
            name = self._tokenizer.shared.tokenizer.id_to_token(image)
            raise ConfigError(
                f"config.json: image_token_id={image} is {name!r} in the tokenizer, but {place} has {count} of these "
                f"tokens instead of {expected}: it must be the id of the token that stands for an image"
            )

    def read(self, inputs: Sequence[ModelInput]) -> list[ReadInput]:
        """Prepare each input, or return its error."""
        return [self._read(given) for given in inputs]

    def tokenize(self, chat: Chat, *, add_special_tokens: bool) -> Tokens:
        """Tokenize a conversation with images, without truncation.

        Images are decoded only if their headers do not tell their number of tokens.

        Raises:
            InvalidInput: The model does not accept the conversation, one of its images, or their number.
        """
        if not self.spec.takes_conversations:
            (count,) = self._each_image([_only_image(chat, self.spec.ignored_texts)], "messages", self._count, int)
            ids = self._framed(count)
            strings = [self._tokenizer.shared.tokenizer.id_to_token(token) or "" for token in ids]
            return Tokens(ids, strings, [None] * len(ids))
        found = self._tokenizer.tokenize(chat, add_special_tokens=add_special_tokens)
        self._check_image_count(found.ids, len(chat.images))
        counts = iter(self._each_image(chat.images, "messages", self._count, int))
        times = [next(counts) if word == self.layout.image_token else 1 for word in found.ids]
        return Tokens(_repeated(found.ids, times), _repeated(found.strings, times), _repeated(found.spans, times))

    def _read(self, given: ModelInput) -> ReadInput:
        try:
            if not self.spec.takes_conversations:
                sequence = self._page(given)
            elif isinstance(given.source, Image):
                message = {"role": "user", "content": (given.source,)}
                sequence = self._conversation(given, TextInput(Chat((message,)), add_special_tokens=False))
            elif isinstance(given.source, TextInput):
                sequence = self._conversation(given, given.source)
            else:
                raise TypeError(f"{type(given.source).__name__} has no images")
        except InvalidInput as error:
            return error
        return Prepared(sequence, tokens=len(sequence.ids), batch_key=("image", given.outputs))

    def _page(self, given: ModelInput) -> TokenSequence:
        """Prepare a single image, inside the prompt that the model was trained with."""
        images = self._prepared(given, [_only_image(given.source, self.spec.ignored_texts)], "input")
        ids = self._framed(self._tokens(images[0]))
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=images)

    def _framed(self, count: int) -> TokenIds:
        """Build the ids of one image: `count` image tokens inside the frame."""
        assert self._frame is not None
        return [*self._frame.prefix, *repeat(self.layout.image_token, count), *self._frame.suffix]

    def _conversation(self, given: ModelInput, text: TextInput) -> TokenSequence:
        """Prepare a conversation by the chat template. A prompt becomes a system message, except for a single image."""
        chat = text.source
        assert isinstance(chat, Chat)
        tokenizer, limits = self._tokenizer, self._tokenizer.limits
        limit = token_limit(text.max_tokens, limits.max_tokens)
        written = tokenizer.write_chat(chat, given.prompt if isinstance(given.source, TextInput) else "")
        check_text(written)
        words = tokenizer.shared.ids(written)
        limits.check_ids(words)
        self._check_image_count(words, len(chat.images))
        images = self._prepared(given, chat.images, "input" if isinstance(given.source, Image) else "messages")
        counts = map(self._tokens, images)
        ids = _repeated(words, [next(counts) if word == self.layout.image_token else 1 for word in words])
        if text.max_own_tokens is not None:
            ids = self._cut(ids, check_own_limit(text.max_own_tokens) or 0, "right")
        special = tokenizer.special if text.add_special_tokens else SpecialTokens([], [])
        if limit is not None and len(ids) + len(special) > limit:
            if text.must_fit:
                raise too_long_error(limit)
            ids = self._cut(ids, max(limit - len(special), 0), limits.side(text.truncate_side))
        ids = [*special.prefix, *ids, *special.suffix]
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=images)

    def _check_image_count(self, words: TokenIds, images: int) -> None:
        """Reject a conversation whose number of image tokens differs from its number of images.

        Raises:
            InvalidInput: The numbers differ.
        """
        if (count := words.count(self.layout.image_token)) != images:
            raise InvalidInput(
                f"The conversation has {images} images, but the model's chat template writes {count} image tokens: no "
                "text may contain the image token, and the template must support images in each message that has one.",
                param="messages",
            )

    def _tokens(self, pixels: Pixels) -> int:
        return self.layout.tokens_of(pixels.patches)

    def _count(self, image: Image) -> int:
        return self.layout.tokens_of(self._images.patches(image))

    def _prepared(self, given: ModelInput, images: Sequence[Image], param: str) -> tuple[Pixels, ...]:
        return self._each_image(images, param, partial(self._images.read, scope=given.sharing_scope), self._tokens)

    def _each_image(
        self, images: Sequence[Image], param: str, read: Callable[[Image], T], tokens_of: Callable[[T], int]
    ) -> tuple[T, ...]:
        """Apply `read` to each image, until their tokens exceed the model's limit.

        The limit bounds memory: a prepared image may be a thousand times as large as its file.

        Args:
            images: The images.
            param: The request's field, for errors.
            read: Prepares one image.
            tokens_of: Number of tokens of a prepared image.

        Raises:
            InvalidInput: An image is not usable (the message says which one), or there are too many.
        """
        found: list[T] = []
        tokens, most = 0, self._tokenizer.limits.max_tokens
        for number, image in enumerate(images, start=1):
            if tokens > most:
                raise InvalidInput(
                    f"This model's maximum context length is {most} tokens. However, the first {number - 1} of the "
                    f"{len(images)} images in your input take {tokens} tokens alone. Please send fewer or smaller "
                    "images.",
                    param=param,
                )
            try:
                found.append(read(image))
            except InvalidInput as error:
                which = f"Image {number} of {len(images)}: " if len(images) > 1 else ""
                raise error.with_prefix(which, param=param) from error
            tokens += tokens_of(found[-1])
        return tuple(found)

    def _check_length(self, ids: TokenIds) -> None:
        """Reject an input that is longer than the model's limit.

        Raises:
            InvalidInput: The input is too long.
        """
        most = self._tokenizer.limits.max_tokens
        if len(ids) > most:
            raise InvalidInput(
                f"This model's maximum context length is {most} tokens. However, your input contains {len(ids)} "
                f"tokens, {ids.count(self.layout.image_token)} of them for images. Please send fewer or smaller "
                "images, or less text.",
                param="input",
            )

    def _cut(self, ids: TokenIds, room: int, side: Side) -> TokenIds:
        """Cut a conversation to `room` tokens, but never inside an image.

        Raises:
            InvalidInput: An image token would be cut.
        """
        if room >= len(ids):
            return ids
        start, end = (0, room) if side == "right" else (len(ids) - room, len(ids))
        image = self.layout.image_token
        if image in ids[:start] or image in ids[end:]:
            raise InvalidInput(
                f"The input contains {len(ids)} tokens, {ids.count(image)} of them for images, and cutting it to "
                f"{room} would cut an image, which is not allowed. Please allow more tokens, or send fewer or smaller "
                "images.",
                param="max_tokens",
            )
        return ids[start:end]


def _repeated(values: Sequence[T], times: Sequence[int]) -> list[T]:
    """Repeat each value by its own count."""
    return list(chain.from_iterable(map(repeat, values, times)))


def _only_image(source: object, ignored_texts: Sequence[str]) -> Image:
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
