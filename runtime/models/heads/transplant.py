"""Heads of a checkpoint's class, run on token vectors that a packed transformer has computed.

transformers keeps a head (pooler, projection, classifier) and its transformer in one class, whose `forward` runs both.
Here that `forward` runs unchanged, but a stub in the place of the transformer returns given token vectors. So no
architecture needs code of its own. At load, the logits are compared with those of the whole model
(`run_whole_model`). An architecture whose head reads more than token vectors is rejected.
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
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions, Seq2SeqModelOutput

from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Outputs
from staged_pool.stages.errors import ConfigError

_PROBE_LENGTHS: Final = (7, 1, 12, 5)


class TransplantedHead:
    """Head of a model without its transformer, on the device of its weights. Thread-safe.

    It keeps the weights of the head, and of the transformer only the pooler, which some heads read.

    Args:
        whole: A model such as `BertForSequenceClassification`, in eval mode. It is not changed.
        dtype: Copy the weights of the head in this dtype. None: share those of `whole`, which may be tied to its
            embeddings.
        entries: Token ids: keep only these rows of the output embeddings of a language model. None: keep all.

    Raises:
        ConfigError: The transformer cannot be replaced in the model.
    """

    def __init__(
        self, whole: PreTrainedModel, *, dtype: torch.dtype | None = None, entries: Sequence[int] | None = None
    ) -> None:
        base, prefix = whole.base_model, whole.base_model_prefix
        if base is whole or whole._modules.get(prefix) is not base:
            raise ConfigError(f"{type(whole).__name__} does not keep its head apart from its transformer")
        self._model = _shallow_copy(whole)
        self._model._modules[prefix] = _TransformerStub(base)
        if entries is not None:
            _narrow(self._model, whole.get_output_embeddings(), entries)
        inherited = {id(parameter) for parameter in base.parameters()}
        self._parameters: int = sum(p.numel() for p in self._model.parameters() if id(p) not in inherited)
        self._dtype = dtype or whole.dtype
        self._any_id: int = end_token(whole) or 0
        if dtype is not None:
            self._model = copy.deepcopy(self._model).to(dtype)

    @property
    def name(self) -> str:
        """Name of the class of the whole model."""
        return type(self._model).__name__

    def parameters(self) -> int:
        """Return the number of weights of the head, without those shared with the transformer."""
        return self._parameters

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute the logits of the head.

        Args:
            hidden: [sequences, tokens, width]: output of the transformer, for sequences without padding.

        Returns:
            `logits` of the whole model: [sequences, labels], or [sequences, tokens, labels] for a head on every token.
        """
        ids = torch.full(hidden.shape[:2], self._any_id, device=hidden.device)
        before = _HIDDEN.set(hidden.to(self._dtype))
        try:
            logits: Tensor = self._model(input_ids=ids).logits
        finally:
            _HIDDEN.reset(before)
        return logits


_HIDDEN: Final[ContextVar[Tensor]] = ContextVar("hidden")
"""Output of the stub of the head that this thread runs: [sequences, tokens, width]."""


class _TransformerStub(nn.Module):
    """Stub of a transformer: returns given token vectors, and the result of its pooler."""

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__()
        self.pooler: nn.Module | None = getattr(base, "pooler", None)
        self.activation: nn.Module | None = getattr(base, "pooler_activation", None)
        self._has_decoder: bool = base.config.is_encoder_decoder

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPoolingAndCrossAttentions | Seq2SeqModelOutput:
        hidden, pooled = _HIDDEN.get(), None
        if self._has_decoder:
            return Seq2SeqModelOutput(last_hidden_state=hidden)
        if self.pooler is not None and self.activation is not None:
            pooled = self.activation(
                self.pooler(hidden[:, 0])
            )  # ALBERT: its pooler is a linear layer without activation
        elif self.pooler is not None:
            pooled = self.pooler(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)


def _shallow_copy(whole: PreTrainedModel) -> PreTrainedModel:
    """Copy a model but not its parts, so that replacing them does not change `whole`."""
    model = copy.copy(whole)
    model._modules = dict(whole._modules)
    model.config = copy.deepcopy(whole.config)
    # Heads that look for the last token before padding reject batches if no padding token is set.
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0
    return model


def _narrow(model: PreTrainedModel, outputs: nn.Module | None, entries: Sequence[int]) -> None:
    """Replace the output embeddings by a few of their rows.

    Raises:
        ConfigError: The model has no such rows.
    """
    name = next((name for name, part in model._modules.items() if part is outputs), None)
    if name is None or not isinstance(outputs, nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear output embeddings")
    if wrong := [entry for entry in entries if not 0 <= entry < outputs.out_features]:
        raise ConfigError(f"token id {wrong[0]} is not one of the {outputs.out_features} that the model has logits for")
    narrow = nn.Linear(outputs.in_features, len(entries), bias=outputs.bias is not None, device="meta")
    rows = list(entries)
    narrow.weight = nn.Parameter(outputs.weight.detach()[rows].clone(), requires_grad=False)
    if outputs.bias is not None:
        narrow.bias = nn.Parameter(outputs.bias.detach()[rows].clone(), requires_grad=False)
    model._modules[name] = narrow


@dataclass(frozen=True, slots=True)
class WholeRun:
    """Forward of a whole model on one sequence, without padding."""

    sequence: TokenSequence
    hidden: Tensor
    """[tokens, width]: output of the transformer, input of the head."""
    logits: Tensor
    """[labels], or [tokens, labels] for a head on every token."""


def run_whole_model(whole: PreTrainedModel, sequences: Sequence[TokenSequence]) -> list[WholeRun]:
    """Run a whole model, head included, on one sequence after the other.

    Raises:
        ConfigError: The model needs other inputs than token ids.
    """
    outputs: list[Tensor] = []
    hook = whole.base_model.register_forward_hook(lambda _module, _arguments, output: outputs.append(output[0][0]))
    runs = []
    try:
        for sequence in sequences:
            ids = torch.tensor([sequence.ids], device=whole.device)
            types = {}
            if sequence.first_tokens is not None and takes_types(whole):
                second = torch.arange(ids.shape[1], device=whole.device) >= sequence.first_tokens
                types["token_type_ids"] = second.long().unsqueeze(0)
            with torch.inference_mode():
                logits = whole(input_ids=ids, attention_mask=torch.ones_like(ids), **types).logits[0]
            runs.append(WholeRun(sequence, outputs[-1], logits))
    except MISUSE_ERRORS as error:
        raise ConfigError(f"{type(whole).__name__} does not run on token ids alone: {error}") from error
    finally:
        hook.remove()
    return runs


def end_token(whole: PreTrainedModel) -> int | None:
    """Return the token whose vector the head of an encoder-decoder reads. None: the model is of another kind."""
    end: int | None = whole.config.eos_token_id if whole.config.is_encoder_decoder else None
    return end


def takes_types(model: PreTrainedModel) -> bool:
    """Tell whether a model distinguishes the two segments of a pair."""
    known = getattr(model.config, "type_vocab_size", None) or 0
    return known > 1 and "token_type_ids" in inspect.signature(model.forward).parameters


def probe_sequences(
    *, vocabulary: int, padding: int | None, max_tokens: int, outputs: Outputs, pairs: bool
) -> list[TokenSequence]:
    """Make random sequences of different lengths, without padding tokens, which heads may treat specially.

    Args:
        vocabulary: Number of token ids.
        padding: Id of the padding token. None: there is none.
        max_tokens: Longest input of the model.
        outputs: Outputs that the sequences request.
        pairs: Give every other sequence two segments.
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
