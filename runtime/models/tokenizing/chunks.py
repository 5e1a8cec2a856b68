"""Chunks of a document: the tokens of each, windows of whole chunks, and runs of tokens.

Late chunking reads a document in one forward and pools the token vectors of each chunk (Guenther et al., 2024,
https://arxiv.org/abs/2409.04701). The special tokens and the prompt before the text are pooled with the first chunk,
and those after it with the last. So a document of one chunk has the vector that it would have as an input of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from staged_pool.runtime.models.tokenizing.input_roles import RoleSpec
from staged_pool.stages.errors import InvalidInput


def chunk_tokens(
    offsets: Sequence[tuple[int, int]], ends: Sequence[int], before: int, first: int, last: int
) -> list[int]:
    """Count the tokens of each chunk. A token belongs to the chunk of its last character.

    Args:
        offsets: Characters of each token, in the order of the text.
        ends: Characters of the document up to the end of each chunk.
        before: Characters before the document, such as those of a prompt.
        first: Index of the first token that is counted.
        last: Index behind the last token that is counted.

    Raises:
        InvalidInput: A chunk has no token.
    """
    counts = [0] * len(ends)
    chunk = 0
    for _, end in offsets[first:last]:
        chunk = min(max(chunk, bisect_left(ends, end - before)), len(ends) - 1)
        counts[chunk] += 1
    if all(counts):
        return counts
    place = counts.index(0)
    raise InvalidInput(
        f"Chunk {place} of the document is cut off: late chunking needs at least one token of each chunk. Please send "
        "fewer chunks, or do not truncate."
        if last < len(offsets)
        else f"Chunk {place} of the document has no token that ends in it. Please join it to a neighbour.",
        param="input",
    )


def around(counts: Sequence[int] | None, before: int, after: int) -> tuple[int, ...] | None:
    """Add the tokens before and after a text to its first and its last chunk. None: there are no chunks."""
    if counts is None:
        return None
    found = list(counts)
    found[0] += before
    found[-1] += after
    return tuple(found)


def runs(tokens: int, size: int) -> tuple[int, ...]:
    """Divide tokens into runs of `size`, of which the last may be shorter. Returns the tokens of each."""
    return tuple(min(size, tokens - start) for start in range(0, tokens, size))


def check_runs(role: RoleSpec) -> None:
    """Reject runs of the tokens of inputs that are padded.

    Raises:
        InvalidInput: The role expands its inputs.
    """
    if role.expand_to:
        raise InvalidInput(
            "Late chunking does not support input padding, truncation or renderer text normalization: this model pads "
            "the input of this $prompt_name to one length. Please send it as a document.",
            param="prompt_name",
        )


def windows(counts: Sequence[int], room: int) -> Iterator[Sequence[int]]:
    """Divide a document into windows of as many whole chunks as fit.

    Args:
        counts: Tokens of each chunk.
        room: Most tokens of a window.

    Yields:
        The tokens of each chunk of a window.

    Raises:
        InvalidInput: A chunk is longer than a window.
    """
    start = tokens = 0
    for place, count in enumerate(counts):
        if count > room:
            raise InvalidInput(
                f"Chunk {place} of the document has {count} tokens, but only {room} fit beside prompt and special "
                "tokens. Please divide it.",
                param="input",
            )
        if tokens + count > room:
            yield counts[start:place]
            start, tokens = place, 0
        tokens += count
    yield counts[start:]
