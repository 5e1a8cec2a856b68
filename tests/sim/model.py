"""Model of a simulated world, and the requests of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.model import ModelInput, Preprocessed
from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage, Row, SparseVector, TokenSequence, Values
from staged_pool.runtime.requests import (
    Chat,
    ClassifyRequest,
    Content,
    EmbedRequest,
    Image,
    Output,
    PairInput,
    ScoreRequest,
    TextInput,
)
from staged_pool.stages.errors import InvalidInput, ModelFailed, OutOfMemory
from staged_pool.stages.work import Prepared, Request
from tests.sim.watch import Watch, payload_name, payload_part
from tests.sim.world import ClientPlan, ItemPlan, Kind, Name, World, said
from tests.support.cards import CARD
from tests.support.model import LetterModel

QUERY = "which of these"
"""The query of a client that has documents scored by pairs."""

OUTPUTS: Mapping[Kind, tuple[Output, ...]] = {
    "dense": (Output.DENSE,),
    "all": (Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR),
    "sparse": (Output.SPARSE,),
    "late": (Output.MULTI_VECTOR,),
    "cross": (Output.LABELS,),
    "labels": (Output.LABELS,),
}
SCORING: Mapping[Kind, Any] = {
    "dense": "bi-encoder",
    "all": "bi-encoder",
    "sparse": "sparse",
    "late": "late-interaction",
    "cross": "cross-encoder",
    "labels": None,
}


def numbers(name: Name, tokens: int, part: int = 0) -> list[float]:
    """Return the row of an item; items with different contents have different rows."""
    return [name[0], name[1], tokens + 1000 * part, name[0] * 1000 + name[1]]


def values_of(output: Output, name: Name, tokens: int, part: int, width: int) -> Values:
    """One output of an item, or of a part of it."""
    four: NDArray[np.float32] = np.array(numbers(name, tokens, part), dtype=np.float32)
    match output:
        case Output.DENSE:
            return np.pad(four, (0, width - 4)) if width > 4 else four
        case Output.SPARSE:
            return SparseVector(np.arange(4, dtype=np.int32), four + 1)
        case Output.MULTI_VECTOR:
            return np.stack([four, four[::-1]])
        case _:
            return np.array([logit(name), -logit(name)], dtype=np.float32)


def logit(name: Name) -> float:
    return ((name[0] * 31 + name[1] * 7) % 97) / 10 - 4


class SimModel(LetterModel):
    """Model that the engine of a world runs: the double of all tests, with its own preprocess and forward.

    The world says what an input costs, in how many parts it is cut, and which fault it has. Its row depends on the
    token ids of the payload alone, which name its client, its place and its part. So each wrong row is noticed.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._world = world = watch.world
        self._has_hopeless_items = any(item.fault == "out of memory" for item in world.contents.values())
        card = replace(
            CARD,
            forward_workers=world.slots,
            lanes=tuple(world.lanes),
            outputs=OUTPUTS[world.model],
            scoring=SCORING[world.model],
            labels=("yes", "no"),
            activation="identity",
            similarity="dot",
            width=world.width,
            splits_long_inputs=world.splits,
        )
        super().__init__(card, padded=world.pads)

    def preprocess(self, inputs: Sequence[ModelInput]) -> list[Preprocessed]:
        sent = [sent_name(given) for given in inputs]
        for name, given in zip(sent, inputs, strict=True):
            self._check_images(name, given)
        items = [self._world.by_number[client].items[index] for client, index in sent]
        if any(item.fault == "preprocess raises" for item in items):
            raise ValueError("poison")
        return [
            InvalidInput("The input is invalid.") if item.fault == "invalid" else self._parts(name, item, given)
            for name, item, given in zip(sent, items, inputs, strict=True)
        ]

    def _parts(
        self, sent: Name, item: ItemPlan, given: ModelInput
    ) -> Prepared[Payload] | tuple[Prepared[Payload], ...]:
        name = said(self._world.by_number[sent[0]], sent[1])
        key = item.key, isinstance(given.source, Image), given.outputs
        if isinstance(given.source, Image):
            pixels = Pixels(np.array(name, dtype=np.float32))
            return Prepared(PreparedImage(pixels, given.outputs, 1), item.tokens, key)
        images = tuple(Pixels(np.zeros(1, dtype=np.uint8)) for _ in given.images)
        parts = item.parts if given.may_split else 1
        made: list[Prepared[Payload]] = [
            Prepared(TokenSequence([*name, part], given.outputs, images=images), item.tokens, key)
            for part in range(parts)
        ]
        return tuple(made) if parts > 1 else made[0]

    def _check_images(self, name: Name, given: ModelInput) -> None:
        item = self._world.by_number[name[0]].items[name[1]]
        wanted = [":".join(map(str, (*name, place))).encode() for place in range(item.images)]
        if (shown := [image.source for image in given.images]) != wanted:
            self._watch.fail(f"preprocess was given the images {shown} instead of {wanted}")

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> list[Row | ModelFailed]:
        names = [payload_name(payload) for payload in payloads]
        items = [self._world.contents[name] for name in names]
        faults = {item.fault for item in items}
        most = self._watch.most_payloads()
        lane = items[0].lane
        if "out of memory" in faults:
            raise OutOfMemory("no room")
        if most is not None and len(payloads) > most:
            token_counts = [item.tokens for item in items]
            if not self._has_hopeless_items:  # for one of these the budget is left as it is
                tokens = max(token_counts) * len(token_counts) if self._world.pads else sum(token_counts)
                self._watch.out_of_memory(lane, tokens, payloads)
            raise OutOfMemory("no room")
        if "forward raises" in faults:
            raise ValueError("poison")
        self._watch.had_room(lane, payloads)
        return [
            ModelFailed("NaN") if item.fault == "nan" else self._row(payload, name, item)
            for payload, name, item in zip(payloads, names, items, strict=True)
        ]

    def _row(self, payload: Payload, name: Name, item: ItemPlan) -> Row:
        part = payload_part(payload)
        values = {output: values_of(output, name, item.tokens, part, self._world.width) for output in payload.outputs}
        return Row(values, payload)


# ---- what clients send ----


def request_of(world: World, client: ClientPlan) -> Request:
    """Return the request that a client's body decodes to."""
    names = [(client.number, index) for index in range(len(client.items))]
    match client.task:
        case "score" | "rerank" if world.model == "cross":
            documents = tuple(f"{client.number}:{index}" for index in range(len(client.items)))
            return ScoreRequest(queries=(QUERY,), documents=documents, cache_salt=client.salt)
        case "score" | "rerank":
            contents = tuple(_content(name, item) for name, item in zip(names, client.items, strict=True))
            return ScoreRequest(
                queries=contents[: client.queries], documents=contents[client.queries :], cache_salt=client.salt
            )
        case "classify":
            inputs = tuple(_input(name, item) for name, item in zip(names, client.items, strict=True))
            return ClassifyRequest(inputs=inputs, cache_salt=client.salt)
        case task:
            return EmbedRequest(
                inputs=tuple(_input(name, item) for name, item in zip(names, client.items, strict=True)),
                outputs=frozenset(asked_for(world, task)),
                cache_salt=client.salt,
            )


def asked_for(world: World, task: str) -> tuple[Output, ...]:
    """Return the outputs that an embedding requests."""
    match task:
        case "sparse":
            return (Output.SPARSE,)
        case "multi_vector":
            return (Output.MULTI_VECTOR,)
        case "several":
            return OUTPUTS[world.model]
        case _:
            return (Output.DENSE,)


def _input(name: Name, item: ItemPlan) -> TextInput | Image:
    if not item.images:
        return TextInput(name)
    images = _images(name, item)
    return images[0] if len(images) == 1 else TextInput(_shown(images))


def _content(name: Name, item: ItemPlan) -> Content:
    if not item.images:
        return f"{name[0]}:{name[1]}"
    images = _images(name, item)
    return images[0] if len(images) == 1 else _shown(images)


def _images(name: Name, item: ItemPlan) -> list[Image]:
    texts = [":".join(map(str, (*name, place))) for place in range(item.images)]
    return [Image(text if place in item.urls else text.encode()) for place, text in enumerate(texts)]


def _shown(images: Sequence[Image]) -> Chat:
    return Chat(({"role": "user", "content": tuple(images)},))


def sent_name(given: ModelInput) -> Name:
    """Return the name of an input: the number of its client, and its place."""
    if given.images:
        source = given.images[0].source
        client, index, _ = (source if isinstance(source, str) else source.decode()).split(":")
        return int(client), int(index)
    match given.source:
        case PairInput(second=text):
            pass
        case TextInput(source=str() as text):
            pass
        case TextInput(source=ids):
            return ids[0], ids[1]  # type: ignore[index,return-value]
    client, index = text.split(":")
    return int(client), int(index)
