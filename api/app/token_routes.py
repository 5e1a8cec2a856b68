"""Routes of tokenizers: texts to token ids and back, without the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from staged_pool.api.app.body_reader import BodyReader
from staged_pool.api.app.call import Answer, Call, Handler
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.wire import extract_images
from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.dialects import tei_tokens, tokens
from staged_pool.api.wire.exchange import Body
from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.errors import InvalidInput, TooLarge, Words


class TokenRoutes:
    """Handlers of the routes that tokenize and detokenize.

    Args:
        registry: The engines.
        bodies: Reads bodies.
    """

    def __init__(self, registry: EngineRegistry, bodies: BodyReader) -> None:
        self._registry = registry
        self._bodies = bodies

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/decode": {"POST": self._decode},
        }

    async def _tokenize(self, call: Call) -> Answer:
        self._registry.enter(call.named_model)
        body = await self._bodies.json(call)
        if await self._bodies.peek(tei_tokens.is_tokenize, body):
            call.error_format = tei_tokens.tei_error
            return await self._tokenize_texts(body, call)
        source, wanted = await self._bodies.read(partial(extract_images.read_json, tokens.decode_tokenize), body)
        engine = self._tokenizer(call, wanted.model)
        call.words = Words({"input": "prompt" if isinstance(source, str) else "messages"})
        found = await engine.tokenize(source, add_special_tokens=bool(wanted.add_special_tokens))
        return Answer(
            tokens.encode_tokens(found, max_tokens=engine.card.max_tokens, with_strings=bool(wanted.return_token_strs))
        )

    async def _tokenize_texts(self, body: Body, call: Call) -> Answer:
        texts, wanted = await self._bodies.read(tei_tokens.decode_tokenize, body)
        engine = self._tokenizer(call)
        _check_count(len(texts), engine, "inputs")
        prompt = tei_tokens.prompt_of(wanted.prompt_name, engine.card)
        texts = [prompt + text for text in texts]
        special = wanted.add_special_tokens is not False
        call.words = tei_tokens.words_of(wanted)
        found = []
        with engine.visit():
            for index, text in enumerate(texts):
                with _of_input(index):
                    found.append(await engine.tokenize(text, add_special_tokens=special))
        return Answer(tei_tokens.encode_tokens(texts, found))

    async def _detokenize(self, call: Call) -> Answer:
        self._registry.enter(call.named_model)
        wanted = await self._bodies.read(tokens.decode_detokenize, await self._bodies.json(call))
        engine = self._tokenizer(call, wanted.model)
        return Answer(tokens.encode_text(await engine.detokenize(wanted.tokens)))

    async def _decode(self, call: Call) -> Answer:
        self._tokenizer(call)  # reject before the body is read
        lists, skips, call.words = await self._bodies.read(tei_tokens.decode_ids, await self._bodies.json(call))
        engine = self._tokenizer(call)
        _check_count(len(lists), engine, "ids")
        found = []
        with engine.visit():
            for index, ids in enumerate(lists):
                with _of_input(index):
                    found.append(await engine.detokenize(ids, skip_special_tokens=skips))
        return Answer(dump(found))

    def _tokenizer(self, call: Call, model: str | None = None) -> Engine:
        """Return the engine whose tokenizer to use; token ids of one model mean nothing to another.

        Raises:
            InvalidInput: There are several models, and neither the path nor the body names one.
        """
        name = call.named_model or model
        engines = self._registry.engines
        if not name and len(engines) > 1:
            self._registry.enter()  # raises if requests are not accepted
            names = ", ".join(engine.card.name for engine in engines)
            message = (
                f"model: each model has its own tokens; name one in `model`, or put /m/NAME before the path: {names}"
            )
            raise InvalidInput(message, param="model")
        return self._registry.enter(name)


@contextmanager
def _of_input(index: int) -> Iterator[None]:
    """Add the index of the input to an error of the block."""
    try:
        yield
    except InvalidInput as error:
        error.index = index
        raise


def _check_count(count: int, engine: Engine, field: str) -> None:
    if count > (most := engine.config.max_request_items):
        raise TooLarge(f"{field}: there are {count}; a request may have {most}", param=field)
