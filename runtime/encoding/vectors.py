"""Calls of `encode`: their requests, and their results as SentenceTransformer, SparseEncoder or MultiVectorEncoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.card import ModelCard, Role
from staged_pool.runtime.encoding.inputs import listed
from staged_pool.runtime.encoding.options import EncodeOptions, Precision, options
from staged_pool.runtime.encoding.tensors import no_rows, sparse_rows, tensor
from staged_pool.runtime.joining import join_vectors
from staged_pool.runtime.requests import MODEL_MAX, Content, Output
from staged_pool.runtime.results import EmbedResult
from staged_pool.runtime.sparse_weights import largest_weights
from staged_pool.runtime.tasks.embed import normalized
from staged_pool.stages.errors import InvalidArgument, Unsupported

Shape: TypeAlias = Callable[[EmbedResult | None], Any]

_PROMPTED: Final = ("query", "document")
"""Prompts that every model of sentence-transformers has; they are empty unless the model has its own."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One call of `encode`."""

    inputs: Sequence[Content]
    embed: Mapping[str, Any]
    """Arguments of `EngineApi.embed`, beside the inputs. A `timeout_s` is that of the whole call."""
    shows_progress: bool
    _shape: Shape
    _is_single: bool

    def finish(self, parts: Sequence[EmbedResult]) -> Any:
        """Join the results of all requests, in their order, in the wanted shape."""
        shaped = self._shape(join_vectors(parts) if parts else None)
        return shaped[0] if self._is_single else shaped


def encoding(
    card: ModelCard, inputs: object, in_order: Sequence[Any], keywords: Mapping[str, Any], role: Role | None = None
) -> Encoding:
    """Plan a call of `encode`, or of `encode_query` and `encode_document`.

    Args:
        card: The model. Its kind selects the class of sentence-transformers that is followed.
        inputs: One or a list.
        in_order: See `options`.
        keywords: See `options`.
        role: Role of the inputs.

    Raises:
        InvalidArgument: An argument is wrong.
        Unsupported: The model gives no vectors, or not these.
    """
    chosen = options(EncodeOptions, in_order, keywords)
    chosen.check_device(card.device)
    given, is_single = listed(inputs, card)
    wanted = next((output for output in _KINDS if output in card.outputs), None)
    if wanted is None:
        raise Unsupported(f"The model `{card.name}` gives no vectors, only: {', '.join(card.outputs)}.")
    return Encoding(
        inputs=given,
        embed={"outputs": wanted, "max_tokens": MODEL_MAX, **_prompt(card, chosen, role, wanted), **chosen.engine},
        shows_progress=bool(chosen.show_progress_bar),
        _shape=partial(_KINDS[wanted], card, chosen),
        _is_single=is_single,
    )


def _prompt(card: ModelCard, chosen: EncodeOptions, role: Role | None, wanted: Output) -> Mapping[str, str | None]:
    """Return the arguments for the prompt of all inputs. None: the model's default."""
    if wanted is Output.MULTI_VECTOR:  # it marks roles in other ways, too
        name = role or chosen.prompt_name or chosen.task
        if name not in _PROMPTED:
            raise Unsupported(f"`{card.name}` reads queries and documents apart: use encode_query or encode_document.")
        return {"prompt": chosen.prompt, "prompt_name": name}
    if card.adapters:
        return _adapted_prompt(card, chosen, role)
    name = chosen.prompt_name or role
    task = role or chosen.task
    if wanted is Output.SPARSE and task in _PROMPTED:  # a Router may send queries another way
        prompt = card.prompts.get(name or task, "") if chosen.prompt is None else chosen.prompt
        return {"prompt": prompt, "prompt_name": task}
    if chosen.prompt is not None or name is None:
        return {"prompt": chosen.prompt}
    prompts = {**dict.fromkeys(_PROMPTED, ""), **card.prompts}
    if name not in prompts:
        known = ", ".join(map(repr, prompts))
        raise InvalidArgument(f"prompt_name={name!r} is none of the model's prompts: {known}.", param="prompt_name")
    return {"prompt": prompts[name]}


def _adapted_prompt(card: ModelCard, chosen: EncodeOptions, role: Role | None) -> Mapping[str, str | None]:
    """Return the arguments for a model whose adapters have names: `task` names one, `prompt_name` a prompt."""
    name = chosen.prompt_name or role or chosen.task
    if chosen.task is not None and name not in (None, chosen.task) and f"{chosen.task}.{name}" in card.adapters:
        name = f"{chosen.task}.{name}"  # such as the prompt of queries for another task
    elif chosen.task is not None and card.adapters.get(name or "") != card.adapters.get(chosen.task):
        known = ", ".join(map(repr, filter(None, card.adapters)))
        raise InvalidArgument(f"task={chosen.task!r} does not fit prompt_name={name!r}; known: {known}.", param="task")
    if name is not None and name not in card.prompts:
        known = ", ".join(map(repr, card.prompts))
        raise InvalidArgument(f"prompt_name={name!r} is none of the model's prompts: {known}.", param="prompt_name")
    return {"prompt": chosen.prompt, "prompt_name": name}


def _dense(card: ModelCard, chosen: EncodeOptions, result: EmbedResult | None) -> Any:
    """Return the vectors of SentenceTransformer: [inputs, width]."""
    if chosen.output_value != "sentence_embedding":
        raise Unsupported(
            f"The model `{card.name}` gives one vector for each input: output_value must be sentence_embedding."
        )
    to_tensor = bool(chosen.convert_to_tensor)
    to_array = not to_tensor and chosen.convert_to_numpy is not False
    if result is None:
        return np.array([]) if to_array else no_rows() if to_tensor else []
    vectors: NDArray[Any] = result.embeddings
    if chosen.truncate_dim is not None:
        vectors = vectors[:, : chosen.truncate_dim]
    if chosen.normalize_embeddings:
        vectors = normalized(vectors)
    if chosen.precision not in {None, "float32"}:
        vectors = quantized(vectors, chosen.precision)
    vectors = np.ascontiguousarray(vectors)
    return vectors if to_array else tensor(vectors) if to_tensor else list(tensor(vectors))


def quantized(vectors: NDArray[np.float32], precision: Precision) -> NDArray[Any]:
    """Quantize vectors [inputs, width], as `quantize_embeddings` of sentence-transformers.

    int8 and uint8 divide the range of each dimension, over all vectors, into 256 steps. binary and ubinary pack the
    signs of eight values into a byte.

    Raises:
        InvalidArgument: A range of one vector has no steps.
    """
    if precision in {"binary", "ubinary"}:
        packed = np.packbits(vectors > 0, axis=-1)
        return packed if precision == "ubinary" else (packed - 128).astype(np.int8)
    if len(vectors) == 1:
        message = f"precision={precision!r} needs several inputs: their vectors give the range of each dimension."
        raise InvalidArgument(message, param="precision")
    starts = vectors.min(axis=0)
    steps = (vectors.max(axis=0) - starts) / 255
    values: NDArray[np.float32] = np.clip(np.floor((vectors - starts) / np.where(steps == 0, 1, steps)), 0, 255)
    return values.astype(np.uint8) if precision == "uint8" else (values - 128).astype(np.int8)


def _sparse(card: ModelCard, chosen: EncodeOptions, result: EmbedResult | None) -> Any:
    """Return the vectors of SparseEncoder: [inputs, vocabulary]."""
    to_tensor = chosen.convert_to_tensor is not False
    if result is None:
        return no_rows(sparse=chosen.convert_to_sparse_tensor) if to_tensor else []
    vectors = result.sparse or ()
    if chosen.max_active_dims is not None:
        if card.max_active_dims is not None and chosen.max_active_dims > card.max_active_dims:
            message = f"max_active_dims: the folder of `{card.name}` keeps {card.max_active_dims} weights, and no more."
            raise InvalidArgument(message, param="max_active_dims")
        vectors = tuple(largest_weights(vector, chosen.max_active_dims) for vector in vectors)
    rows = sparse_rows(vectors, card.vocabulary)
    if not chosen.convert_to_sparse_tensor:
        rows = rows.to_dense()
    return rows if to_tensor else list(rows)


def _multi_vector(card: ModelCard, chosen: EncodeOptions, result: EmbedResult | None) -> Any:
    """Return the vectors of MultiVectorEncoder: a list of [tokens, width]."""
    if chosen.convert_to_tensor:
        message = f"`{card.name}` gives several vectors for each input, which make no tensor: leave it out."
        raise InvalidArgument(message, param="convert_to_tensor")
    vectors = () if result is None else result.multi_vector or ()
    return [vector if chosen.convert_to_numpy else tensor(vector) for vector in vectors]


_KINDS: Final[Mapping[Output, Callable[[ModelCard, EncodeOptions, EmbedResult | None], Any]]] = {
    Output.DENSE: _dense,
    Output.SPARSE: _sparse,
    Output.MULTI_VECTOR: _multi_vector,
}
"""Shapes by output. A model with several outputs is read as the first of these."""
