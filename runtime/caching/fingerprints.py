"""Fingerprints of inputs: a strong hash of all that the device reads of one.

It is taken after preprocess. By then prompts, roles, truncation and special tokens have become token ids, and the
settings of an image its pixels, so nothing that matters can be left out.

Equal inputs share a row only within a scope: a tenant and a salt. Otherwise a caller could learn from the time of an
answer what other tenants have asked.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage
from staged_pool.runtime.requests import Output, Outputs
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.work import Prepared

IDENTITY_BYTES: Final = 16
"""Length of an identity.

The key is secret, so nobody can search for collisions. By chance 10^12 inputs collide with a probability below 10^-14
(n^2 / 2^129).
"""

_Outcome: TypeAlias = Prepared[Payload] | tuple[Prepared[Payload], ...] | StagedPoolError

_NUMBERS: Final = struct.Struct("12q")
_SEQUENCE: Final = 0
_IMAGE: Final = 1
_NONE: Final = -1


def new_secret() -> bytes:
    """Return a new key for hashes that nobody else can make."""
    return secrets.token_bytes(32)


class SharingScopes:
    """Makes the scopes within which rows and prepared images are shared.

    Args:
        between_tenants: The setting `share_between_tenants`: True if tenants share them with each other.
        secret: Key of the hash of salts. None: one of its own, so that scopes are valid within this object only.
    """

    def __init__(self, *, between_tenants: bool, secret: bytes | None = None) -> None:
        self._between_tenants = between_tenants
        self._hash = blake2b(digest_size=IDENTITY_BYTES, key=secret or new_secret())

    def scope(self, tenant: Hashable, salt: str | None) -> Hashable:
        """Return the scope of a request; None for requests without tenant and salt.

        Args:
            tenant: Owner of the request. None is a tenant, too.
            salt: Salt of the request. The scope holds its hash.
        """
        owner = None if self._between_tenants else tenant
        if salt is None:
            return None if owner is None else (owner, None)
        made = self._hash.copy()
        made.update(salt.encode(errors="surrogatepass"))
        return owner, made.digest()


class Identities:
    """Makes identities. Thread-safe.

    Args:
        secret: Key of the hash. None: one of its own, so that identities are valid within this object only.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._hash = blake2b(digest_size=IDENTITY_BYTES, key=secret or new_secret())

    def of(self, payload: Payload) -> bytes:
        """Return the identity of a payload: equal for equal payloads, and for no others."""
        made = self._hash.copy()
        # Each number says what follows it, so no two payloads are written alike.
        if isinstance(payload, PreparedImage):
            made.update(_NUMBERS.pack(_IMAGE, _outputs(payload.outputs), payload.tokens, *[0] * 9))
            _add_pixels(made, payload.pixels)
            return made.digest()
        ids, first, kept, spans = payload.ids, payload.first_tokens, payload.kept, payload.spans
        adapter = None if payload.adapter is None else payload.adapter.encode(errors="surrogatepass")
        made.update(
            _NUMBERS.pack(
                _SEQUENCE,
                _outputs(payload.outputs),
                _NONE if first is None else first,
                payload.prompt_tokens,
                payload.unseen_tokens,
                _NONE if kept is None else len(kept),
                _NONE if spans is None else len(spans),
                len(payload.images),
                payload.looked_up,
                _NONE if payload.chunks is None else len(payload.chunks),
                _NONE if adapter is None else len(adapter),
                len(ids),
            )
        )
        made.update(struct.pack(f"{len(ids)}i", *ids))
        if kept is not None:
            made.update(struct.pack(f"{len(kept)}i", *kept))
        for span in spans or ():
            made.update(struct.pack("3q", span.start, span.end, _NONE if span.word is None else span.word))
        if payload.chunks is not None:
            made.update(struct.pack(f"{len(payload.chunks)}i", *payload.chunks))
        made.update(adapter or b"")
        for pixels in payload.images:
            _add_pixels(made, pixels)
        return made.digest()

    def given_to(
        self, preprocess: Callable[[Sequence[ModelInput]], Sequence[_Outcome]]
    ) -> Callable[[Sequence[ModelInput]], Sequence[_Outcome]]:
        """Wrap a preprocess function so that its payloads have identities."""

        def prepare(inputs: Sequence[ModelInput]) -> Sequence[_Outcome]:
            return [self._identified(outcome) for outcome in preprocess(inputs)]

        return prepare

    def _identified(self, outcome: _Outcome) -> _Outcome:
        if isinstance(outcome, Prepared):
            return self._with_identity(outcome)
        return tuple(map(self._with_identity, outcome)) if isinstance(outcome, tuple) else outcome

    def _with_identity(self, made: Prepared[Payload]) -> Prepared[Payload]:
        return Prepared(made.payload, made.tokens, made.batch_key, self.of(made.payload))


def _add_pixels(made: blake2b, pixels: Pixels) -> None:
    values = np.ascontiguousarray(pixels.values)
    made.update(f"{values.dtype.str}{values.shape}{pixels.grid}{pixels.steps} {pixels.step_s};".encode())
    made.update(values.reshape(-1).data)


@cache
def _outputs(outputs: Outputs) -> int:
    return sum(1 << place for place, output in enumerate(Output) if output in outputs)
