"""Turn images, and conversations that show some, into what the device reads: token ids with images at their places.

A chat template writes one image token for an image, or the folder says what stands around one. The device puts many
vectors there, so the token is repeated here as often as that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TypeAlias, TypeVar

from staged_pool.runtime.model import ModelInput, Pixels, TokenIds, Tokens, TokenSequence
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.specs.model import ImageSpec
from staged_pool.runtime.models.tokenizing.chat import plain_text, without_marks
from staged_pool.runtime.models.tokenizing.limits import check_text, not_to_be_cut, own_limit, token_limit
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens, read_frame
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.models.vision.image_layout import ImageLayout
from staged_pool.runtime.requests import Chat, Image, Side, TextInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared

Outcome: TypeAlias = Prepared[TokenSequence] | InvalidInput
T = TypeVar("T")


class MultimodalReader:
    """What a language model is given for inputs with images. Every method may run in several threads at once.

    Args:
        tokenizer: Of the texts beside them.
        spec: What the folder says of images.
        layout: What the model's config says of them.
        images: FileReads one image.

    Raises:
        ConfigError: The tokenizer joins what goes around an image with other text.
    """

    def __init__(self, tokenizer: TextTokenizer, spec: ImageSpec, layout: ImageLayout, images: ImageReader) -> None:
        self._tokenizer = tokenizer
        self._layout = layout
        self._takes_conversations = spec.takes_conversations
        self._ignored_texts = spec.ignored_texts
        self._images = images
        self._frame: SpecialTokens | None = None
        if spec.frame is not None:
            self._frame = read_frame(spec.frame, tokenizer.shared.tokenizer)
        self._check_image_token()

    def _check_image_token(self) -> None:
        """See that what is written around an image has as many image tokens as it shows images.

        Raises:
            ConfigError: It has not: config.json and the tokenizer mean different tokens, or an ordinary one.
        """
        image = self._layout.image_token
        if self._frame is not None:
            shown, place = [*self._frame.prefix, *self._frame.suffix].count(image), "the text around an image"
            wanted = 0
        else:
            message = {"role": "user", "content": (Image(b""),)}
            try:
                written = self._tokenizer.write_chat(Chat((message,)))
            except InvalidInput:  # the template wants more than an image, or there is none: requests will tell
                return
            shown, place = self._tokenizer.shared.ids(written).count(image), "the chat template, for one image,"
            wanted = 1
        if shown != wanted:
            name = self._tokenizer.shared.tokenizer.id_to_token(image)
            raise ConfigError(
                f"config.json: image_token_id={image} is {name!r} in the tokenizer, of which {place} has {shown} and "
                f"not {wanted}: it must be the id of the token that the model's texts have in the place of an image"
            )

    def read(self, inputs: Sequence[ModelInput]) -> list[Outcome]:
        """What the device is to read for each input, or what is wrong with it."""
        return [self._read(given) for given in inputs]

    def tokenize(self, chat: Chat, *, add_special_tokens: bool) -> Tokens:
        """As `TextTokenizer.tokenize`, of a conversation with images. They are not decoded where their headers say
        how many tokens they take.

        Raises:
            InvalidInput: The model does not take the conversation or one of its images, or not so many.
        """
        if not self._takes_conversations:
            (count,) = self._looked_at([_only_image(chat, self._ignored_texts)], "messages", self._count, int)
            ids = self._framed(count)
            strings = [self._tokenizer.shared.tokenizer.id_to_token(token) or "" for token in ids]
            return Tokens(ids, strings, [None] * len(ids))
        found = self._tokenizer.tokenize(chat, add_special_tokens=add_special_tokens)
        self._check_shown(found.ids, len(chat.images))
        counts = iter(self._looked_at(chat.images, "messages", self._count, int))
        times = [next(counts) if word == self._layout.image_token else 1 for word in found.ids]
        return Tokens(_repeated(found.ids, times), _repeated(found.strings, times), _repeated(found.spans, times))

    def _read(self, given: ModelInput) -> Outcome:
        try:
            if not self._takes_conversations:
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
        return Prepared(sequence, cost=len(sequence.ids), batch_key=("image", given.outputs))

    def _page(self, given: ModelInput) -> TokenSequence:
        """An image by itself, in the words that the model was trained to see around one."""
        images = self._prepared(given, [_only_image(given.source, self._ignored_texts)], "input")
        ids = self._framed(self._tokens(images[0]))
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=images)

    def _framed(self, count: int) -> TokenIds:
        """So many image tokens, and what stands around them."""
        assert self._frame is not None
        return [*self._frame.prefix, *repeat(self._layout.image_token, count), *self._frame.suffix]

    def _conversation(self, given: ModelInput, text: TextInput) -> TokenSequence:
        """What the chat template makes of it. A prompt becomes a system message, but not for an image by itself."""
        chat = text.source
        assert isinstance(chat, Chat)
        tokenizer, limits = self._tokenizer, self._tokenizer.limits
        limit = token_limit(text.max_tokens, limits.max_tokens)
        written = tokenizer.write_chat(chat, given.prompt if isinstance(given.source, TextInput) else "")
        check_text(written)
        words = tokenizer.shared.ids(written)
        limits.check_ids(words)
        self._check_shown(words, len(chat.images))
        images = self._prepared(given, chat.images, "input" if isinstance(given.source, Image) else "messages")
        counts = map(self._tokens, images)
        ids = _repeated(words, [next(counts) if word == self._layout.image_token else 1 for word in words])
        if text.max_own_tokens is not None:
            ids = self._cut(ids, own_limit(text.max_own_tokens) or 0, "right")
        special = tokenizer.special if text.add_special_tokens else SpecialTokens([], [])
        if limit is not None and len(ids) + len(special) > limit:
            if text.must_fit:
                raise not_to_be_cut(limit)
            ids = self._cut(ids, max(limit - len(special), 0), limits.side(text.truncate_side))
        ids = [*special.prefix, *ids, *special.suffix]
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=images)

    def _check_shown(self, words: TokenIds, images: int) -> None:
        """Raises `InvalidInput` unless a conversation with so many images has a token for each."""
        if (shown := words.count(self._layout.image_token)) != images:
            raise InvalidInput(
                f"The conversation has {images} images, but the model's chat template makes {shown} of it: a text must "
                "not spell the token that stands for an image, and a message with images must be one that the template "
                "shows.",
                param="messages",
            )

    def _tokens(self, pixels: Pixels) -> int:
        return self._layout.tokens_of(pixels.patches)

    def _count(self, image: Image) -> int:
        return self._layout.tokens_of(self._images.patches(image))

    def _prepared(self, given: ModelInput, images: Sequence[Image], param: str) -> tuple[Pixels, ...]:
        return self._looked_at(images, param, partial(self._images.read, scope=given.sharing_scope), self._tokens)

    def _looked_at(
        self, images: Sequence[Image], param: str, look: Callable[[Image], T], tokens_of: Callable[[T], int]
    ) -> tuple[T, ...]:
        """What `look` makes of each. Raises what is wrong with an image, and with which one of several, as an error in
        `param`.

        Prepared images may be a thousand times as large as the files they come in: no more of them are made than
        the model could take at once.
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
                found.append(look(image))
            except InvalidInput as error:
                which = f"Image {number} of {len(images)}: " if len(images) > 1 else ""
                raise error.after(which, param=param) from error
            tokens += tokens_of(found[-1])
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

    def _cut(self, ids: TokenIds, room: int, side: Side) -> TokenIds:
        """The tokens that are left of a conversation, which must have all those of its images."""
        if room >= len(ids):
            return ids
        start, end = (0, room) if side == "right" else (len(ids) - room, len(ids))
        image = self._layout.image_token
        if image in ids[:start] or image in ids[end:]:
            raise InvalidInput(
                f"The input contains {len(ids)} tokens, {ids.count(image)} of them for images, and cutting it to "
                f"{room} would cut an image, which is never done. Please allow more tokens, or send fewer or smaller "
                "images.",
                param="max_tokens",
            )
        return ids[start:end]


def _repeated(values: Sequence[T], times: Sequence[int]) -> list[T]:
    """Each of them so many times."""
    return list(chain.from_iterable(map(repeat, values, times)))


def _only_image(source: object, words: Sequence[str]) -> Image:
    """The one image that an input is, by itself or with nothing beside it but the words that go around it anyway.

    Raises:
        InvalidInput: There is more in it.
    """
    match source:
        case Image():
            return source
        case TextInput(source=Chat() as chat) | (Chat() as chat):
            if len(chat.images) == 1 and without_marks(plain_text(chat)) in ("", *words):
                return chat.images[0]
    known = " or ".join(repr(text) for text in words)
    raise InvalidInput(
        "The model reads one image or one text at a time, and no conversations of both. Beside an image may stand "
        f"nothing, or what the model is shown around each: {known}.",
        param="messages",
    )
