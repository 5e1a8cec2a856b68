"""Calls for tokens, and for the state of the server: their arguments and their requests. Pure.

`Client` and `AsyncClient` make their methods from these functions. The methods have the same docstrings, and the same
parameters but the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from staged_pool.client import answers
from staged_pool.client.answers import decode
from staged_pool.client.exchange import ServerAnswer, ServerRequest
from staged_pool.client.plans import CallDefaults, CallPlan, single
from staged_pool.client.results import Readiness, ServedModel, TokensResult
from staged_pool.runtime import arguments
from staged_pool.runtime.argument_types import of_type
from staged_pool.stages.errors import InvalidInput


def tokenize(
    defaults: CallDefaults,
    text: str,
    *,
    add_special_tokens: bool = True,
    model: str | None = None,
    timeout_s: float | None = None,
) -> CallPlan[TokensResult, TokensResult]:
    """Tokenize a text: its token ids, and each token as a text.

    Args:
        text: The text.
        add_special_tokens: Add the special tokens that the model reads.
        model: See `embed`.
        timeout_s: See `embed`.

    Raises:
        InvalidInput: `text` is not a text.
    """
    if not isinstance(text, str):
        raise InvalidInput(f"text must be a text, not {of_type(text)}", param="text")
    fields = defaults.fields(model, prompt=text, add_special_tokens=add_special_tokens, return_token_strs=True)

    def read(answer: ServerAnswer) -> TokensResult:
        body = decode(answers.TOKENS, answer.body)
        return TokensResult(tuple(body.tokens), tuple(body.token_strs or ()))

    return single(ServerRequest(path="/tokenize", fields=fields), read, timeout_s)


def detokenize(
    defaults: CallDefaults, ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None
) -> CallPlan[str, str]:
    """Decode token ids to a text; see `embed` for `model` and `timeout_s`."""
    tokens = list(arguments.token_ids("tokens", ids))
    request = ServerRequest(path="/detokenize", fields=defaults.fields(model, tokens=tokens))
    return single(request, lambda answer: decode(answers.TEXT, answer.body).prompt, timeout_s)


def models(
    defaults: CallDefaults, *, timeout_s: float | None = None
) -> CallPlan[tuple[ServedModel, ...], tuple[ServedModel, ...]]:
    """List the served models; `timeout_s` is the limit in seconds, None: the client's own."""

    def read(answer: ServerAnswer) -> tuple[ServedModel, ...]:
        found = decode(answers.MODELS, answer.body).data
        return tuple(ServedModel(model.id, model.max_model_len, model.staged_pool) for model in found)

    return single(ServerRequest(method="GET", path="/v1/models"), read, timeout_s)


def ready(defaults: CallDefaults, *, timeout_s: float | None = None) -> CallPlan[Readiness, Readiness]:
    """Check if the server accepts requests, and the reason if it does not.

    Args:
        timeout_s: Limit in seconds. None: the client's own.

    Raises:
        ConnectionFailed: No server can be reached.
    """

    def read(answer: ServerAnswer) -> Readiness:
        body = decode(answers.READY, answer.body)
        return Readiness(body.ready, body.reason)

    return single(ServerRequest(method="GET", path="/ready", results=frozenset({200, 503})), read, timeout_s)
