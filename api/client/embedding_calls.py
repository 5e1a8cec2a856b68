"""Calls for vectors: their arguments and their requests. Pure.

`Client` and `AsyncClient` make their methods from these functions. The methods have the same docstrings, and the same
parameters but the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from staged_pool.client import reading
from staged_pool.client.contents import Given
from staged_pool.client.plans import CallDefaults, CallPlan, StreamPlan, batch_requests, batched, source, with_inputs
from staged_pool.runtime import arguments, joining
from staged_pool.runtime.arguments import Inputs
from staged_pool.runtime.progress import Progress
from staged_pool.runtime.requests import DENSE_ONLY, Output, Outputs
from staged_pool.runtime.results import EmbedResult
from staged_pool.stages.errors import InvalidInput

POOLING_TASKS: Final[Mapping[Output, str]] = {
    Output.DENSE: "embed",
    Output.SPARSE: "sparse",
    Output.MULTI_VECTOR: "token_embed",
    Output.TOKEN_WEIGHTS: "token_classify",
}
"""Names of outputs in the route `/pooling`."""

_BASE64: Final[Mapping[str, object]] = {"encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"}


def embed(
    defaults: CallDefaults,
    inputs: Inputs,
    *,
    outputs: Output | str | Iterable[Output | str] = DENSE_ONLY,
    dimensions: int | None = None,
    normalize: bool = True,
    prompt_name: str | None = None,
    prompt: str | None = None,
    late_chunking: bool = False,
    chunk_tokens: int | None = None,
    offsets: bool = False,
    max_active_dims: int | None = None,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
    progress: Progress = False,
) -> CallPlan[EmbedResult, EmbedResult]:
    """Compute the vectors of each input; see `Engine.embed` for the result.

    Args:
        inputs: One input or a list: texts, token ids, images or conversations.
        outputs: Any of `dense`, `sparse`, `multi_vector` and `token_weights`.
        dimensions: Keep this number of values of each dense vector, and normalize them again. None: all.
        normalize: Scale dense vectors to length 1. False: as pooled.
        prompt_name: Name of the model's prompt to put before each text.
        prompt: Text to put before each text.
        late_chunking: Read the texts as the chunks of one document, joined as they are. They are one request.
        chunk_tokens: Give `multi_vector` a vector of each run of this number of tokens; see `Engine.embed`.
        offsets: Return the characters of each token of `multi_vector` in its text.
        max_active_dims: Keep this number of the largest weights of each vector of `sparse`. None: all.
        max_tokens: Truncate inputs to this number of tokens; `MODEL_MAX`: to the model's limit. None: reject an input
            over the model's limit.
        cache_salt: Share cached and coalesced results only with calls of the same salt.
        model: Served name of the model. None: the client's own.
        timeout_s: Limit for the whole call, in seconds. None: the client's own.
        progress: Progress bar or function, see `Progress`.

    Raises:
        InvalidInput: An argument or an input is wrong.
    """
    wanted = arguments.outputs(outputs)
    _check(wanted, late_chunking=late_chunking, offsets=offsets, max_active_dims=max_active_dims)
    _check_chunks(wanted, chunk_tokens, late_chunking=late_chunking, offsets=offsets)
    sources, common = _vectors(
        defaults, inputs, dimensions, normalize, prompt_name, prompt, max_tokens, cache_salt, model
    )
    if wanted == DENSE_ONLY:
        path, read = "/v1/embeddings", reading.read_vectors
        common |= {**_BASE64, **({"late_chunking": True} if late_chunking else {})}
    elif chunk_tokens is not None:
        path, read = "/v1/embeddings", reading.read_chunks
        common |= {"late_chunking_params": {"chunk_size": chunk_tokens}}
    else:
        path, read = "/pooling", partial(reading.read_outputs, outputs=wanted, offsets=offsets)
        common["task"] = [task for output, task in POOLING_TASKS.items() if output in wanted]
        # base64 loses the shape of an array, and the number of tokens is unknown here.
        common |= {"encoding_format": "float"} if Output.MULTI_VECTOR in wanted else _BASE64
        common |= {"return_offsets": True} if offsets else {}
        common |= {} if max_active_dims is None else {"max_active_dims": max_active_dims}
    options: Mapping[str, Any] = {"timeout_s": timeout_s, "progress": progress, "whole": late_chunking}
    return batched(defaults, path, sources, common, read=read, join=joining.join_vectors, **options)


def _check(wanted: Outputs, *, late_chunking: bool, offsets: bool, max_active_dims: int | None) -> None:
    """Reject options that are not for the outputs of a call."""
    if not wanted or not wanted <= POOLING_TASKS.keys():
        raise InvalidInput(f"outputs must be one or several of {', '.join(sorted(POOLING_TASKS))}.", param="outputs")
    if late_chunking and wanted != DENSE_ONLY:
        raise InvalidInput("late_chunking is for dense vectors alone.", param="late_chunking")
    if offsets and Output.MULTI_VECTOR not in wanted:
        raise InvalidInput("offsets are of multi_vector, which is not among the outputs.", param="offsets")
    arguments.whole_number("max_active_dims", max_active_dims)
    if max_active_dims is not None and Output.SPARSE not in wanted:
        message = "max_active_dims is for sparse vectors, and sparse is not among the outputs."
        raise InvalidInput(message, param="max_active_dims")


def _check_chunks(wanted: Outputs, chunk_tokens: int | None, *, late_chunking: bool, offsets: bool) -> None:
    """Reject options that do not go with `chunk_tokens`: those that another route would need."""
    arguments.whole_number("chunk_tokens", chunk_tokens)
    if chunk_tokens is None:
        return
    if wanted != {Output.MULTI_VECTOR}:
        raise InvalidInput("chunk_tokens is for multi_vector alone: outputs must be multi_vector.", param="outputs")
    if late_chunking or offsets:
        name = "late_chunking" if late_chunking else "offsets"
        raise InvalidInput(f"{name} does not go with chunk_tokens. Leave one of them out.", param=name)


def embed_stream(
    defaults: CallDefaults,
    inputs: Inputs,
    *,
    dimensions: int | None = None,
    normalize: bool = True,
    prompt_name: str | None = None,
    prompt: str | None = None,
    max_tokens: int | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    timeout_s: float | None = None,
) -> StreamPlan:
    """Stream dense vectors as the server computes them; see `embed` for the arguments.

    Use it for lists whose result is too large for memory, or needed early. The batches are sent one after the other. A
    request is retried only before its first vector has arrived. Leaving the block early ends the request on the server.
    """
    sources, common = _vectors(
        defaults, inputs, dimensions, normalize, prompt_name, prompt, max_tokens, cache_salt, model
    )
    fields = partial(with_inputs, {**common, **_BASE64})
    batches = batch_requests(defaults, "/v1/embeddings", sources, fields, streamed=True)
    return StreamPlan(total=len(sources), batches=batches, timeout_s=timeout_s)


def _vectors(  # noqa: PLR0917  # the arguments of both callers, in their order
    defaults: CallDefaults,
    inputs: Inputs,
    dimensions: int | None,
    normalize: bool,
    prompt_name: str | None,
    prompt: str | None,
    max_tokens: int | None,
    cache_salt: str | None,
    model: str | None,
) -> tuple[list[Given], dict[str, object]]:
    """Return the inputs, and the fields of the body of each batch."""
    arguments.whole_number("dimensions", dimensions)
    arguments.text("prompt_name", prompt_name)
    arguments.text("prompt", prompt)
    sources = [source(given) for given in arguments.inputs(inputs, max_tokens)]
    return sources, defaults.fields(
        model,
        dimensions=dimensions,
        use_activation=normalize,
        prompt_name=prompt_name,
        prompt=prompt,
        truncate_prompt_tokens=max_tokens,
        cache_salt=arguments.cache_salt(cache_salt),
    )
