"""Images, videos and conversations with them, as token ids with repeated image tokens.

A chat template writes one image token per image, or the folder defines the text around an image. The device replaces
image tokens by image vectors, so the token is repeated here once per vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TypeAlias, TypeVar

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.specs.conversation import ImageSpec
from staged_pool.runtime.models.tokenizing.limits import check_own_limit, check_text, token_limit, too_long_error
from staged_pool.runtime.models.tokenizing.page_prompts import PagePrompt, only_image, page_prompt
from staged_pool.runtime.models.tokenizing.pending_pairs import no_room_error
from staged_pool.runtime.models.tokenizing.shared_tokenizer import common_prefix
from staged_pool.runtime.models.tokenizing.special_tokens import SpecialTokens
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.models.tokenizing.video_steps import MediaSize, VideoSteps
from staged_pool.runtime.models.videos.reader import Outline, VideoReader
from staged_pool.runtime.models.vision.image_layout import ImageLayout
from staged_pool.runtime.payloads import Pixels, TokenSequence
from staged_pool.runtime.requests import Chat, Image, ImagePair, Side, TextInput, Video
from staged_pool.runtime.tokens import TokenIds, Tokens
from staged_pool.stages.errors import ConfigError, InvalidInput, UnsupportedMedia
from staged_pool.stages.work import Prepared

ReadInput: TypeAlias = Prepared[TokenSequence] | InvalidInput
T = TypeVar("T")
S = TypeVar("S", bound=MediaSize)


class MultimodalReader:
    """Preprocessor of inputs with images. Every method may run in several threads at once.

    Args:
        tokenizer: Tokenizer of the texts.
        spec: Image settings of the folder.
        layout: Image settings of the model's config: the image token, and its number per image.
        images: Reader of one image.
        videos: Reader of one video. None: the model reads none.

    Raises:
        ConfigError: The tokenizer merges the text around an image with other text, or does not know the image token.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        spec: ImageSpec,
        layout: ImageLayout,
        images: ImageReader,
        videos: VideoReader | None = None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self._tokenizer = tokenizer
        self._images = images
        self.videos = videos
        self._page_prompt: PagePrompt | None = None
        self._steps = VideoSteps(layout, tokenizer.shared.tokenizer)
        if spec.frame is not None:
            self._page_prompt = page_prompt(tokenizer.shared.tokenizer, spec, layout)
        self._check_image_token()

    def _check_image_token(self) -> None:
        """Check the image token: none in the frame, and one per image in the chat template.

        Raises:
            ConfigError: The count differs: config.json and the tokenizer disagree about the image token.
        """
        image = self.layout.image_token
        if self._page_prompt is not None:
            count, place = self._page_prompt.ids((1, 1)).count(image), "the text around an image"
            expected = self.layout.tokens_of(1)
        elif self._tokenizer.settings.needs_pairs:
            pair = ImagePair(first=(Image(b""),), second=(Image(b""),))
            try:
                drafted = self._tokenizer.draft_pair(ModelInput(pair, frozenset()), pair)
            except InvalidInput as error:
                raise ConfigError(f"the model's prompt for pairs does not take images: {error}") from error
            count, place, expected = drafted.ids.count(image), "the prompt of a pair, for two images,", 2
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
        if self._page_prompt is not None:
            page = [only_image(chat, self.spec.ignored_texts)]
            (outline,) = self._each_image(page, "messages", self._outline)
            ids = self._page_prompt.ids(outline.grid)
            strings = [self._tokenizer.shared.tokenizer.id_to_token(token) or "" for token in ids]
            return Tokens(ids, strings, [None] * len(ids))
        written = self._tokenizer.write_chat(chat)
        found = self._tokenizer.tokenize(written, add_special_tokens=add_special_tokens)
        sizes = self._each_image(self._in_order(found.ids, chat.images), "messages", self._outline)
        if (rewrite := self._steps.rewriter(sizes)) is not None:
            found = self._tokenizer.tokenize(rewrite(written), add_special_tokens=add_special_tokens)
        counts = self._counts(found.ids, sizes)
        return Tokens(_repeated(found.ids, counts), _repeated(found.strings, counts), _repeated(found.spans, counts))

    def _read(self, given: ModelInput) -> ReadInput:
        try:
            if self._page_prompt is not None:
                sequence = self._page(given, self._page_prompt)
            elif isinstance(given.source, ImagePair):
                sequence = self._pair(given, given.source)
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

    def _page(self, given: ModelInput, prompt: PagePrompt) -> TokenSequence:
        """Prepare a single image, inside the prompt that the model was trained with."""
        images = self._prepared(given, [only_image(given.source, self.spec.ignored_texts)], "input")
        ids = prompt.ids(images[0].grid)
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=images, prompt_tokens=prompt.left_out)

    def _conversation(self, given: ModelInput, text: TextInput) -> TokenSequence:
        """Prepare a conversation by the chat template. A prompt becomes a system message, except for a single image."""
        chat = text.source
        assert isinstance(chat, Chat)
        tokenizer, limits = self._tokenizer, self._tokenizer.limits
        limit = token_limit(text.max_tokens, limits.max_tokens)
        takes_prompt = isinstance(given.source, TextInput) or tokenizer.settings.conversation is not None
        prompt = given.prompt if takes_prompt else ""
        written = tokenizer.write_chat(chat, prompt)
        check_text(written)
        words = tokenizer.shared.ids(written)
        limits.check_ids(words)
        found = self._in_order(words, chat.images)
        images = self._prepared(given, found, "input" if isinstance(given.source, Image) else "messages")
        if (rewrite := self._steps.rewriter(images)) is not None:
            words = tokenizer.shared.ids(rewrite(written))
        ids = _repeated(words, self._counts(words, images))
        special = tokenizer.special if text.add_special_tokens else SpecialTokens([], [])
        if tokenizer.settings.conversation is not None:
            special = _frame_of(ids, tokenizer.place(prompt))
            ids = ids[len(special.prefix) : len(ids) - len(special.suffix)]
        if text.max_own_tokens is not None:
            ids = self._cut(ids, check_own_limit(text.max_own_tokens) or 0, "right")
        if limit is not None and len(ids) + len(special) > limit:
            if text.must_fit:
                raise too_long_error(limit)
            ids = self._cut(ids, max(limit - len(special), 0), limits.side(text.truncate_side))
        ids = [*special.prefix, *ids, *special.suffix]
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=images)

    def _pair(self, given: ModelInput, pair: ImagePair) -> TokenSequence:
        """Prepare a query and a document with images. Only the document is cut, and never an image of it."""
        drafted = self._tokenizer.draft_pair(given, pair)
        self._tokenizer.limits.check_ids(drafted.ids)
        contents = (pair.second, pair.first) if drafted.document_first else (pair.first, pair.second)
        media = [part for content in contents for part in content if isinstance(part, Image)]
        images = self._prepared(given, self._in_order(drafted.ids, media, param="input"), "input")
        if (rewrite := self._steps.rewriter(images)) is not None:
            drafted = self._tokenizer.draft_pair(given, pair, rewrite)
        counts = self._counts(drafted.ids, images)
        ids = _repeated(drafted.ids, counts)
        limit, excess = drafted.limit, len(ids) - (drafted.limit or len(ids))
        if limit is not None and excess > 0:
            before, end = sum(counts[: drafted.first]), sum(counts[: drafted.after])
            if end - before < excess:
                raise no_room_error(len(ids) - (end - before), limit)
            document = self._cut(ids[before:end], end - before - excess, drafted.side)
            ids = [*ids[:before], *document, *ids[end:]]
        self._check_length(ids)
        return TokenSequence(ids, given.outputs, images=images)

    def _is_image(self, word: int) -> bool:
        return word in (self.layout.image_token, self.layout.video_token)

    def _in_order(self, words: TokenIds, images: Sequence[Image], *, param: str = "messages") -> tuple[Image, ...]:
        """Return images and videos in the order of their tokens.

        Raises:
            InvalidInput: The number of tokens of images or of videos differs from theirs.
        """
        stills = [image for image in images if not isinstance(image, Video)]
        videos = [image for image in images if isinstance(image, Video)]
        for token, kind, given in (
            (self.layout.image_token, "image", stills),
            (self.layout.video_token, "video", videos),
        ):
            if (count := 0 if token is None else words.count(token)) != len(given):
                raise InvalidInput(
                    f"The conversation has {len(given)} {kind}s, but the model's chat template writes {count} {kind} "
                    f"tokens: no text may contain the {kind} token, and the template must support {kind}s in each "
                    "message that has one.",
                    param=param,
                )
        left, moving = iter(stills), iter(videos)
        return tuple(
            next(moving if word == self.layout.video_token else left) for word in words if self._is_image(word)
        )

    def _counts(self, words: TokenIds, sizes: Sequence[MediaSize]) -> list[int]:
        """Return how often each token is repeated: those of images and videos once for each vector."""
        counts = iter(self._steps.tokens(sizes))
        return [next(counts) if self._is_image(word) else 1 for word in words]

    def _tokens(self, size: MediaSize) -> int:
        return self.layout.tokens_of(size.patches)

    def _outline(self, image: Image) -> Outline:
        if isinstance(image, Video):
            return self._video_reader().outline(image)
        grid = self._images.grid(image)
        return Outline(None if grid is None else math.prod(grid), grid)

    def _read_one(self, image: Image, scope: Hashable) -> Pixels:
        if isinstance(image, Video):
            return self._video_reader().read(image, scope, max_tokens=self._tokenizer.limits.max_tokens)
        return self._images.read(image, scope)

    def _video_reader(self) -> VideoReader:
        if self.videos is None:  # the plan of a request has rejected it before
            raise UnsupportedMedia("The model reads no videos.")
        return self.videos

    def _prepared(self, given: ModelInput, images: Sequence[Image], param: str) -> tuple[Pixels, ...]:
        return self._each_image(images, param, partial(self._read_one, scope=given.sharing_scope))

    def _each_image(self, images: Sequence[Image], param: str, read: Callable[[Image], S]) -> tuple[S, ...]:
        """Apply `read` to each image, until their tokens exceed the model's limit.

        The limit bounds memory: a prepared image may be a thousand times as large as its file.

        Args:
            images: The images.
            param: The request's field, for errors.
            read: Prepares or measures one image.

        Raises:
            InvalidInput: An image is not usable (the message says which one), or there are too many.
        """
        found: list[S] = []
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
                kind = "Video" if isinstance(image, Video) else "Image"
                which = f"{kind} {number} of {len(images)}: " if len(images) > 1 else ""
                raise error.with_prefix(which, param=param) from error
            tokens += self._tokens(found[-1])
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
                f"tokens, {sum(map(self._is_image, ids))} of them for images. Please send fewer or smaller "
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
        if any(map(self._is_image, ids[:start])) or any(map(self._is_image, ids[end:])):
            found = sum(map(self._is_image, ids))
            raise InvalidInput(
                f"The input contains {len(ids)} tokens, {found} of them for images, and cutting it to {room} would cut "
                "an image, which is not allowed. Please allow more tokens, or send fewer or smaller images.",
                param="max_tokens",
            )
        return ids[start:end]


def _frame_of(ids: TokenIds, usual: SpecialTokens) -> SpecialTokens:
    """Return the first and the last tokens of a conversation that are the usual ones: they are never cut."""
    before = common_prefix(ids, usual.prefix)
    after = len(usual.suffix)
    ends = ids[len(ids) - after :] == usual.suffix and before + after <= len(ids)
    return SpecialTokens(ids[:before], list(usual.suffix) if ends else [])


def _repeated(values: Sequence[T], counts: Sequence[int]) -> list[T]:
    """Repeat each value by its own count."""
    return list(chain.from_iterable(map(repeat, values, counts)))
