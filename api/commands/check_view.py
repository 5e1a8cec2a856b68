"""The report of `check` on a terminal: what was understood of a model, and what was assumed, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from staged_pool.api.live.durations import span
from staged_pool.runtime.requests import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from staged_pool.runtime.card import ModelCard

_MARKS: Final = {"ok": "green", "!!": "bold yellow"}

_COMPARED: Final = {
    "bi-encoder": "compares the vectors of two inputs, by {}",
    "late-interaction": "compares the vectors of all tokens",
    "sparse": "compares the weights of vocabulary entries",
    "cross-encoder": "reads the query and the document together",
}


def render_card(card: ModelCard, used_bytes: int, left_bytes: int) -> RenderableType:
    """Return the report on a loaded model.

    Args:
        card: Its card.
        used_bytes: Memory of this process with the model in it.
        left_bytes: Memory that it may still take.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in _facts(card, used_bytes, left_bytes):
        table.add_row(Text("ok", _MARKS["ok"]), name, Text(text))
    for note in card.notes:
        table.add_row(Text("!!", _MARKS["!!"]), "assumed", Text(note))
    return table


def _facts(card: ModelCard, used_bytes: int, left_bytes: int) -> Iterator[tuple[str, str]]:
    yield "model", f"{card.name}, {card.architecture}, {card.parameters / 1e6:,.1f} million parameters"
    longer = "longer ones are split" if card.splits_long_inputs else "longer ones are cut if the request says so"
    yield "inputs", f"{' and '.join(f'{lane}s' for lane in card.lanes)} of up to {card.max_tokens:,} tokens, {longer}"
    yield from _outputs(card)
    if card.prompts:
        yield "prompts", ", ".join(f"{name} {text!r}" for name, text in card.prompts.items())
    if card.default_prompt:
        yield "prompt", f"{card.default_prompt!r} before each text, unless the request names another"
    if card.scoring is not None:
        scores = f"; scores by {card.activation}" if card.labels else ""
        yield "scoring", _COMPARED[card.scoring].format(card.similarity) + scores
    workers = f"{card.forward_workers} forwards at once, {card.attention} batches"
    yield "device", f"{card.device}, {card.dtype}, {card.torch_threads} threads of torch, {workers}"
    if card.memory_tokens is not None:
        yield "batches", f"the device has memory for {card.memory_tokens:,} tokens at once"
    yield "memory", f"{used_bytes / 1e9:,.1f} GB used with the model, {left_bytes / 1e9:,.1f} GB left"
    yield "loaded", f"in {span(card.load_s)}, its warm-up included"


def _outputs(card: ModelCard) -> Iterator[tuple[str, str]]:
    """Yield a line for each output of the model."""
    for output in card.outputs:
        match output:
            case Output.DENSE:
                cut = ""
                if card.matryoshka:
                    cut = f", which may be cut to {', '.join(map(str, card.dimensions)) or 'any number'}"
                length = "of length 1" if card.normalize else "not normalised"
                yield "vectors", f"{card.width:,} numbers{cut}; {length}, pooling {card.pooling}"
            case Output.MULTI_VECTOR:
                yield "tokens", f"a vector of {card.token_width:,} numbers for each token"
            case Output.SPARSE:
                yield "sparse", f"weights of a few of {card.vocabulary:,} vocabulary entries"
            case Output.TOKEN_WEIGHTS:
                yield "weights", "one for each token"
            case Output.LABELS | Output.TOKEN_LABELS:
                where = " for each token" if output is Output.TOKEN_LABELS else ""
                shown = ", ".join(card.labels[:8]) + (", ..." if len(card.labels) > 8 else "")
                yield "labels", f"{len(card.labels):,}{where}: {shown}"
