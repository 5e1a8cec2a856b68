"""Run the head that a checkpoint's own class has, on token vectors that were made elsewhere.

transformers keeps a head and its transformer in one class, whose `forward` runs both: a pooler, a projection, a
classifier, whatever the architecture has. Here that `forward` runs as it is written, with something in the place of
the transformer that gives the token vectors it is handed. So no architecture needs code of its own here, and a packed
batch can run through the transformer first. What the head makes is compared, at load, with what the whole model makes
of the same token ids (`run_alone`): an architecture whose head wants more than token vectors is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from staged_pool.runtime.model import TokenSequence
from staged_pool.runtime.models.kernels.self_check import MISUSE_ERRORS
from staged_pool.runtime.requests import Outputs
from staged_pool.stages.errors import ConfigError

_PROBE_LENGTHS: Final = (7, 1, 12, 5)


class TransplantedHead:
    """The head of a model without its transformer, on the device of its weights. Several threads may call it at once.

    Keeps the head's weights, and of the transformer only what the head reads: BERT's pooler.

    Args:
        whole: A model such as `BertForSequenceClassification`, in eval mode. It stays as it is.
        dtype: Copy the head's weights into this dtype. None: share those of `whole`, which may be tied to its
            embeddings.
        entries: Keep only these rows of the output embeddings: those of a language model of which only a few entries
            of the vocabulary are wanted. None: all.

    Raises:
        ConfigError: The transformer is not a part of the model that can be replaced.
    """

    def __init__(
        self, whole: PreTrainedModel, *, dtype: torch.dtype | None = None, entries: Sequence[int] | None = None
    ) -> None:
        base, prefix = whole.base_model, whole.base_model_prefix
        if base is whole or whole._modules.get(prefix) is not base:
            raise ConfigError(f"{type(whole).__name__} does not keep its head apart from its transformer")
        self._model = _shallow_copy(whole)
        self._model._modules[prefix] = _GivenStates(base)
        if entries is not None:
            _narrow(self._model, whole.get_output_embeddings(), entries)
        inherited = {id(parameter) for parameter in base.parameters()}
        self._parameters: int = sum(p.numel() for p in self._model.parameters() if id(p) not in inherited)
        self._dtype = dtype or whole.dtype
        if dtype is not None:
            self._model = copy.deepcopy(self._model).to(dtype)

    @property
    def name(self) -> str:
        """The class of the whole model."""
        return type(self._model).__name__

    def parameters(self) -> int:
        """How many there are, without those of the transformer (or tied to it)."""
        return self._parameters

    def __call__(self, hidden: Tensor) -> Tensor:
        """The head's logits.

        Args:
            hidden: [sequences, tokens, width]: what the transformer would give, of sequences without padding.

        Returns:
            What the whole model calls its logits: [sequences, labels], or [sequences, tokens, labels] where it has
            them for every token.
        """
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        before = _HIDDEN.set(hidden.to(self._dtype))
        try:
            logits: Tensor = self._model(input_ids=ids).logits
        finally:
            _HIDDEN.reset(before)
        return logits


_HIDDEN: Final[ContextVar[Tensor]] = ContextVar("hidden")
"""What the transformer of the head that runs in this thread is to have given: [sequences, tokens, width]."""


class _GivenStates(nn.Module):
    """Stands in the place of a transformer, and gives the states that are given to it, and what it pools of them."""

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__()
        self.pooler: nn.Module | None = getattr(base, "pooler", None)
        self.activation: nn.Module | None = getattr(base, "pooler_activation", None)

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPoolingAndCrossAttentions:
        hidden, pooled = _HIDDEN.get(), None
        if self.pooler is not None and self.activation is not None:
            pooled = self.activation(self.pooler(hidden[:, 0]))  # ALBERT's, whose pooler is a bare layer
        elif self.pooler is not None:
            pooled = self.pooler(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)


def _shallow_copy(whole: PreTrainedModel) -> PreTrainedModel:
    """A model of the same parts, which can be exchanged without changing `whole`."""
    model = copy.copy(whole)
    model._modules = dict(whole._modules)
    model.config = copy.deepcopy(whole.config)
    # Heads that look for the last token that is not padding refuse batches where no token is.
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0
    return model


def _narrow(model: PreTrainedModel, outputs: nn.Module | None, entries: Sequence[int]) -> None:
    """Put a few rows of the output embeddings in their place."""
    name = next((name for name, part in model._modules.items() if part is outputs), None)
    if name is None or not isinstance(outputs, nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no output embeddings that can be read by rows")
    if wrong := [entry for entry in entries if not 0 <= entry < outputs.out_features]:
        raise ConfigError(f"token id {wrong[0]} is none of the {outputs.out_features} that the model has logits for")
    narrow = nn.Linear(outputs.in_features, len(entries), bias=outputs.bias is not None, device="meta")
    rows = list(entries)
    narrow.weight = nn.Parameter(outputs.weight.detach()[rows].clone(), requires_grad=False)
    if outputs.bias is not None:
        narrow.bias = nn.Parameter(outputs.bias.detach()[rows].clone(), requires_grad=False)
    model._modules[name] = narrow


@dataclass(frozen=True, slots=True)
class Alone:
    """What the whole model makes of one sequence that runs by itself, without padding."""

    sequence: TokenSequence
    hidden: Tensor
    """[tokens, width]: what its transformer gives to its head."""
    logits: Tensor
    """[labels], or [tokens, labels] where there are some for every token."""


def run_alone(whole: PreTrainedModel, sequences: Sequence[TokenSequence]) -> list[Alone]:
    """Run a whole model, its own head included, on one sequence after the other.

    Raises:
        ConfigError: It does not run on token ids alone.
    """
    seen: list[Tensor] = []
    hook = whole.base_model.register_forward_hook(lambda _module, _arguments, given: seen.append(given[0][0]))
    alone = []
    try:
        for sequence in sequences:
            ids = torch.tensor([sequence.ids], device=whole.device)
            types = {}
            if sequence.first_tokens is not None and takes_types(whole):
                second = torch.arange(ids.shape[1], device=whole.device) >= sequence.first_tokens
                types["token_type_ids"] = second.long().unsqueeze(0)
            with torch.inference_mode():
                logits = whole(input_ids=ids, attention_mask=torch.ones_like(ids), **types).logits[0]
            alone.append(Alone(sequence, seen[-1], logits))
    except MISUSE_ERRORS as error:
        raise ConfigError(f"{type(whole).__name__} does not run on token ids alone: {error}") from error
    finally:
        hook.remove()
    return alone


def takes_types(model: PreTrainedModel) -> bool:
    """Whether it tells the two segments of a pair apart."""
    known = getattr(model.config, "type_vocab_size", None) or 0
    return known > 1 and "token_type_ids" in inspect.signature(model.forward).parameters


def probe_sequences(
    *, vocabulary: int, padding: int | None, max_tokens: int, outputs: Outputs, pairs: bool
) -> list[TokenSequence]:
    """Random sequences of different lengths, without the padding token, whose meaning may differ by place.

    Args:
        vocabulary: Token ids run from 0 to one less.
        padding: The padding token, if there is one.
        max_tokens: Longest input of the model.
        outputs: What the sequences are to give.
        pairs: Whether some of them have two segments.
    """
    random = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(vocabulary), [] if padding is None else [padding])
    return [
        TokenSequence(
            random.choice(allowed, size=min(length, max_tokens)).tolist(),
            outputs,
            first_tokens=min(length, max_tokens) // 2 if pairs and place % 2 == 0 else None,
        )
        for place, length in enumerate(_PROBE_LENGTHS)
    ]
