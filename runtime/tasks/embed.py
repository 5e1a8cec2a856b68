"""The embed task: vectors of each input, of one or several kinds from one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.card import ModelCard, Role
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Row, SparseVector, TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, EmbedRequest, Image, Output, Outputs, TextInput
from staged_pool.runtime.results import EmbedResult, Usage
from staged_pool.runtime.sparse_weights import largest_weights
from staged_pool.runtime.tasks.token_chunks import character_ranges, check_chunks, token_ranges
from staged_pool.stages.errors import InvalidInput, Unsupported
from staged_pool.stages.work import Parts, Plan

Number = TypeVar("Number", np.float32, np.int32)

_VECTORS: Final[Outputs] = frozenset({Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR, Output.TOKEN_WEIGHTS})

_OF_CHUNKS: Final = frozenset({"mean", "max", "mean_sqrt_len_tokens"})
"""Poolings that have a meaning for some of the tokens of a text."""

PROMPTS_OF: Final[Mapping[Role, tuple[str, ...]]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of prompts for each role. The first one that a model has is used."""


def plan(request: EmbedRequest, card: ModelCard) -> Plan[ModelInput]:
    """Plan one model input for each input of the request.

    Raises:
        Unsupported: The model lacks a requested output.
        InvalidInput: `dimensions`, `max_active_dims`, `prompt_name` or `outputs` do not fit the model.
    """
    if request.chunk_tokens is not None:
        check_chunks(request, card)
    _check_outputs(request.outputs, card)
    _check_dimensions(request, card)
    _check_active_dims(request, card)
    prompt, adapter = _prompt(request, card)
    role = _role(request.prompt_name)
    may_split = card.splits_long_inputs and request.outputs == DENSE_ONLY
    if request.offsets and Output.MULTI_VECTOR not in request.outputs:
        raise InvalidInput("$offsets are of multi_vector, which is not among the outputs.", param="offsets")
    if request.late_chunking:
        document = ModelInput(
            _document(request, card), request.outputs, prompt, role, may_split, _chunk_ends(request), adapter=adapter
        )
        return Plan(
            [document],
            partial(_finish, request, card),
            partial(_finish_document, request, card),
            partial(_whole, request),
        )
    inputs = [
        ModelInput(source, request.outputs, prompt, role)
        if isinstance(source, Image)
        else ModelInput(
            source,
            request.outputs,
            prompt,
            role,
            may_split,
            chunk_tokens=request.chunk_tokens,
            with_spans=request.offsets or request.chunk_tokens is not None,
            adapter=adapter,
        )
        for source in request.inputs
    ]
    locate = None if request.name is None else partial(_locate, request.name)
    return Plan(inputs, partial(_finish, request, card), partial(_finish_some, request, card), locate)


def _document(request: EmbedRequest, card: ModelCard) -> TextInput:
    """Join the texts of a request with late chunking.

    Raises:
        Unsupported: The model has no vectors of chunks.
        InvalidInput: An input is not a text, or its settings are not those of the others.
    """
    if request.outputs != DENSE_ONLY:
        raise InvalidInput("$late_chunking is for dense vectors alone.", param="late_chunking")
    if not _OF_CHUNKS.issuperset(card.pooling.split("+")):
        raise Unsupported(
            f"The model `{card.name}` has {card.pooling} pooling, and late chunking needs the mean of token vectors."
        )
    texts: list[TextInput] = []
    for index, given in enumerate(request.inputs):
        if not isinstance(given, TextInput) or not isinstance(given.source, str):
            raise InvalidInput("With $late_chunking each input must be a text.", param="input", index=index)
        if not given.source:
            raise InvalidInput("With $late_chunking an input must not be empty.", param="input", index=index)
        if given.max_own_tokens is not None or replace(given, source="") != replace(
            texts[0] if texts else given, source=""
        ):
            raise InvalidInput(
                "With $late_chunking all inputs must have the same limits, and none of their own.",
                param="input",
                index=index,
            )
        texts.append(given)
    return replace(texts[0], source="".join(cast(str, text.source) for text in texts))


def _chunk_ends(request: EmbedRequest) -> tuple[int, ...]:
    lengths = (len(cast(str, cast(TextInput, given).source)) for given in request.inputs)
    return tuple(accumulate(lengths))


def _whole(request: EmbedRequest, _: int) -> tuple[str, None]:
    return request.name or "input", None


def _locate(name: str, index: int) -> tuple[str, int]:
    return name, index


def _check_outputs(outputs: Outputs, card: ModelCard) -> None:
    if not outputs or not outputs <= _VECTORS:
        raise InvalidInput(f"$outputs must be one or several of {', '.join(sorted(_VECTORS))}.", param="outputs")
    if missing := outputs.difference(card.outputs):
        has = ", ".join(card.outputs)
        raise Unsupported(f"The model `{card.name}` gives no {', '.join(sorted(missing))} output, only: {has}.")


def _check_dimensions(request: EmbedRequest, card: ModelCard) -> None:
    dimensions = request.dimensions
    if dimensions is not None and Output.DENSE not in request.outputs:
        raise InvalidInput("$dimensions is for dense vectors, and dense is not among the outputs.", param="dimensions")
    if dimensions is None or dimensions == card.width:
        return
    if not card.matryoshka:
        raise InvalidInput(
            f"Model '{card.name}' does not support Matryoshka embeddings; $dimensions must be unset or {card.width} "
            f"(received $dimensions={dimensions}). To cut its vectors all the same, serve it with --matryoshka.",
            param="dimensions",
        )
    if card.dimensions and dimensions not in card.dimensions:
        allowed = ", ".join(map(str, card.dimensions))
        message = f"Model '{card.name}' only supports Matryoshka $dimensions [{allowed}], got {dimensions}."
        raise InvalidInput(message, param="dimensions")
    if not 1 <= dimensions <= card.width:
        message = f"Model '{card.name}' only supports $dimensions in range [1, {card.width}], got {dimensions}."
        raise InvalidInput(message, param="dimensions")


def _check_active_dims(request: EmbedRequest, card: ModelCard) -> None:
    most = request.max_active_dims
    if most is None:
        return
    if Output.SPARSE not in request.outputs:
        message = "$max_active_dims is for sparse vectors, and sparse is not among the outputs."
        raise InvalidInput(message, param="max_active_dims")
    if most < 1:
        raise InvalidInput(f"$max_active_dims must be at least 1, got {most}.", param="max_active_dims")
    if card.max_active_dims is not None and most > card.max_active_dims:
        message = f"The folder of `{card.name}` keeps {card.max_active_dims} weights: $max_active_dims may be as many."
        raise InvalidInput(message, param="max_active_dims")


def _role(prompt_name: str | None) -> Role | None:
    if prompt_name is None:
        return None
    return next((role for role, names in PROMPTS_OF.items() if prompt_name in names), None)


def _prompt(request: EmbedRequest, card: ModelCard) -> tuple[str, str | None]:
    """Return the text before each input, and the adapter that reads it."""
    usual = card.adapters.get("")
    if request.prompt_name is None:
        return card.default_prompt if request.prompt is None else request.prompt, usual
    role = _role(request.prompt_name)
    for name in (request.prompt_name, *(PROMPTS_OF[role] if role else ())):
        if (prompt := card.prompts.get(name)) is not None:
            return prompt if request.prompt is None else request.prompt, card.adapters.get(name, usual)
    if request.prompt is not None:
        return request.prompt, usual
    if role and (card.prompts or not request.outputs <= DENSE_ONLY):
        return "", usual  # the other role has a prompt, or the model marks roles in its own way
    known = ", ".join(map(repr, card.prompts)) or "none"
    raise InvalidInput(f"$prompt_name is not one of the model's prompts: {known}.", param="prompt_name")


def _finish(request: EmbedRequest, card: ModelCard, rows: Sequence[object], tokens: int) -> EmbedResult:
    whole = cast("Sequence[Row]", rows)
    chunked = request.chunk_tokens is not None
    return EmbedResult(
        dense=_dense(request, card, rows) if Output.DENSE in request.outputs else None,
        sparse=tuple(_sparse(request, row) for row in whole) if Output.SPARSE in request.outputs else None,
        multi_vector=tuple(
            normalized(array(row, Output.MULTI_VECTOR)) if request.normalize else owned(array(row, Output.MULTI_VECTOR))
            for row in whole
        )
        if Output.MULTI_VECTOR in request.outputs
        else None,
        token_weights=tuple(_weights(request, row) for row in whole)
        if Output.TOKEN_WEIGHTS in request.outputs
        else None,
        offsets=tuple(character_ranges(row.payload) for row in whole)
        if chunked
        else tuple(map(offsets, whole))
        if request.offsets
        else None,
        chunks=tuple(token_ranges(row.payload) for row in whole) if chunked else None,
        usage=Usage(tokens),
        model=card.name,
    )


def offsets(row: Row) -> NDArray[np.int32] | None:
    """Return the first character and the end of each token that has a value: [tokens, 2]. None: it is no text."""
    payload = row.payload
    if not isinstance(payload, TokenSequence) or payload.spans is None:
        return None
    spans = payload.spans if payload.kept is None else [payload.spans[place] for place in payload.kept]
    return np.array([(span.start, span.end) for span in spans], np.int32).reshape(-1, 2)


def _weights(request: EmbedRequest, row: Row) -> NDArray[np.float32]:
    """Return relu(w h + b) of each token, see `TokenWeightsHead`; without the relu if not to be normalised."""
    given = array(row, Output.TOKEN_WEIGHTS)
    return np.maximum(given, np.float32(0)) if request.normalize else owned(given)


def _finish_some(
    request: EmbedRequest, card: ModelCard, rows: Sequence[object], fresh: Sequence[int]
) -> tuple[Sequence[int], EmbedResult]:
    return fresh, _finish(request, card, [rows[index] for index in fresh], 0)


def _finish_document(
    request: EmbedRequest, card: ModelCard, rows: Sequence[object], fresh: Sequence[int]
) -> tuple[Sequence[int], EmbedResult]:
    return range(len(request.inputs)), _finish(request, card, rows, 0)


def _dense(request: EmbedRequest, card: ModelCard, rows: Sequence[object]) -> NDArray[np.float32]:
    """Cut and normalise pooled rows as the request asks.

    A cut vector is normalised again if the model normalises: cosine similarity needs it, and clients of Matryoshka
    models expect it.
    """
    normalize = request.normalize and card.normalize
    if request.late_chunking:
        windows = rows[0] if isinstance(rows[0], Parts) else rows
        vectors = [vector for window in windows for vector in array(window, Output.DENSE)]
    else:
        vectors = [
            _mean(row, normalize=normalize) if isinstance(row, Parts) else array(row, Output.DENSE) for row in rows
        ]
    # Return a copy: a row may be shared, or a view of its whole batch. Normalising makes a copy anyway.
    stacked = np.stack(vectors) if len(vectors) > 1 else vectors[0][np.newaxis]
    if request.dimensions is not None:
        stacked = stacked[:, : request.dimensions]
    if normalize:
        return normalized(stacked)
    return stacked.copy() if len(vectors) == 1 else np.ascontiguousarray(stacked)


def _mean(parts: Parts, *, normalize: bool) -> NDArray[np.float32]:
    """Return the mean of an input's parts, weighted by tokens: sum(n_i * v_i) / sum(n_i)."""
    vectors = np.stack([array(part, Output.DENSE) for part in parts])
    if normalize:
        vectors = normalized(vectors)
    weights = np.array([cast(Row, part).payload.tokens for part in parts], np.float32)
    mean: NDArray[np.float32] = weights @ vectors / weights.sum()
    return mean


def array(row: Any, output: Output) -> NDArray[np.float32]:
    """Return an output of a row as an array."""
    values: NDArray[np.float32] = row.values[output]
    return values


def owned(values: NDArray[Number]) -> NDArray[Number]:
    """Return writable values for a caller: shared rows are read-only, and copied."""
    return values if values.flags.writeable else values.copy()


def _sparse(request: EmbedRequest, row: Row) -> SparseVector:
    vector = largest_weights(cast(SparseVector, row.values[Output.SPARSE]), request.max_active_dims)
    return SparseVector(owned(vector.indices), owned(vector.values))


def normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise [n, width] vectors like torch.nn.functional.normalize: v / max(|v|, 1e-12)."""
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))[:, np.newaxis]
    scaled: NDArray[np.float32] = vectors / np.maximum(lengths, 1e-12)
    return scaled
