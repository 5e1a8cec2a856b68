"""Limits of payloads and rows fit all models, and keep wrong numbers from kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.payloads import Payload, Row, TokenSequence
from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.arrays import Block, PackedPayload, pack_payload, unpack_payload
from staged_pool.runtime.remote.limits import PayloadLimits, RowLimits
from staged_pool.runtime.requests import DENSE_ONLY, Chat, Image, Output, TextInput, Video
from staged_pool.runtime.tasks.embed import _OF_CHUNKS
from staged_pool.runtime.tasks.token_chunks import CHUNKED
from staged_pool.runtime.version import VERSION
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.wire import Bytes
from staged_pool.stages.work import Prepared
from tests.models.conftest import LoadTiny
from tests.models.test_input_preparer import FILES, LONG, inputs_of
from tests.models.tiny import EVERY
from tests.runtime.remote.test_garbage import data, say
from tests.servers.fronts import device_engine_on, terms_of

FORWARDS = 4
"""Payloads of each lane and set of outputs that are computed, too."""


def inputs(model: Encoder) -> Iterator[ModelInput]:
    """Inputs of all lanes and outputs, in chunks as well."""
    card = model.card
    yield from inputs_of(card)
    each = [frozenset(card.outputs), *(frozenset({output}) for output in card.outputs)]
    for outputs in each:
        if "text" in card.lanes:
            for role in ("query", "document", None):
                yield ModelInput(TextInput("A few words."), outputs, "a prompt: ", role, with_spans=True)
        if "image" in card.lanes:
            yield from (ModelInput(Image(file), outputs) for file in FILES)
        if card.reads_videos:
            for frames in ([FILES[0]], [FILES[0], FILES[1]] * 3, [FILES[2]] * 9):
                yield ModelInput(Video.of_frames(frames), outputs)
                said = ({"role": "user", "content": ("first", Image(FILES[0]), Video.of_frames(frames, fps=0.5))},)
                yield ModelInput(TextInput(Chat(said), add_special_tokens=False), outputs)
    if "text" in card.lanes and _OF_CHUNKS.issuperset(card.pooling.split("+")):
        for text in ("One chunk. Two chunks. Three.", LONG):
            yield ModelInput(TextInput(text), DENSE_ONLY, chunk_ends=(10, 20, len(text)), may_split=text == LONG)
    if "text" in card.lanes and Output.MULTI_VECTOR in card.outputs:
        for size in (1, 3, 1000):
            yield ModelInput(TextInput("A few words."), CHUNKED, role="document", chunk_tokens=size, with_spans=True)


@pytest.mark.parametrize("kind", EVERY)
def test_what_a_model_prepares_and_computes_is_within_its_limits(kind: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(kind)
    rows, counts = RowLimits(model.card), dict[object, int]()
    for given in inputs(model):
        limits = PayloadLimits.of(given.lane, model.card, model.preparation)
        for made in model.preprocess([given]):
            for one in made if isinstance(made, tuple) else (made,):
                if not isinstance(one, Prepared):
                    continue
                payload = arrived(one.payload, limits)
                assert one.tokens == payload.tokens
                key = limits.batch_key(payload), given.lane
                counts[key] = counts.get(key, 0) + 1
                if counts[key] <= FORWARDS:
                    [row] = model.forward([payload])
                    assert isinstance(row, Row)
                    rows.check(row.values, one.payload)
    assert counts


def arrived(payload: Payload, limits: PayloadLimits) -> Payload:
    """Return a payload as the engine process gets it."""
    parts: list[Bytes] = []
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(pack_payload(payload, parts)), type=PackedPayload)
    return unpack_payload(packed, Block(b"".join(parts)), limits)


@pytest.fixture(scope="session")
def bert(load_tiny: LoadTiny) -> Encoder:
    """A model that is loaded before any event loop runs."""
    return load_tiny("bert-mean")


WRONG = {
    "chunks that sum to more": {"chunks": (3, 2**24)},
    "chunks that sum to less": {"chunks": (1, 1)},
    "a negative chunk": {"chunks": (2**24, 6 - 2**24)},
    "chunks of kept tokens": {"chunks": (3, 3), "kept": (1, 2)},
    "a kept place far behind": {"kept": (0, 2**24)},
    "a kept place before": {"kept": (-(2**24), 1)},
    "an id far behind": {"ids": [1, 2, 2**30, 4, 5, 6]},
    "an id below 0": {"ids": [1, 2, -(2**30), 4, 5, 6]},
    "unseen tokens": {"unseen_tokens": 7},
}


@pytest.mark.anyio
@pytest.mark.parametrize("field", WRONG)
async def test_wrong_lengths_of_a_front_end_its_line_before_a_kernel_reads_them(field: str, bert: Encoder) -> None:
    """A chunk of too many tokens once ended the engine process by a signal."""
    config, model, desk = EngineConfig(), bert, FrontDesk()
    sequence = replace(TokenSequence([1, 2, 3, 4, 5, 6], DENSE_ONLY), **WRONG[field])  # type: ignore[arg-type]
    async with device_engine_on(model, config, desk) as device:
        desk.add(device, replace_preparation(model, config))
        parts: list[Bytes] = []
        packed = pack_payload(sequence, parts)
        size = sum(map(len, parts))
        sent = [
            data(messages.Hello(VERSION)),
            data(messages.Admit(1, 0, 10, None, Priority.INTERACTIVE, None, None, False)),
            data(messages.Count(1, {"text": 1})),
            data(messages.Items(0, "text", 0, 0.0, None, size, [(1, 0, 0)], [None], [packed]), *parts),
        ]
        assert "the peer sends a wrong number: `" in await say(desk, b"".join(sent))
        assert device.fault is None


def replace_preparation(model: Encoder, config: EngineConfig) -> messages.ModelTerms:
    return msgspec.structs.replace(terms_of(model, config), preparation=model.preparation)
