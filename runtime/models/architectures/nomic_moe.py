"""NomicBERT with a mixture of experts (https://arxiv.org/abs/2502.07972): nomic-embed-text-v2-moe.

Every n-th layer sends each token to a few experts, and adds their outputs by the router's probabilities. These do not
sum to 1. Module names are those of the published weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from staged_pool.runtime.models.architectures.rotary import Angles
from staged_pool.runtime.models.specs.own_models import NOMIC_MOE


class NomicMoeConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers has no types
    """Sizes and settings, by the names of transformers where it has one; `folders/nomic.py` writes them."""

    model_type = NOMIC_MOE


class _Embeddings(nn.Module):
    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self._has_types = config.type_vocab_size > 0

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        vectors: Tensor = self.word_embeddings(input_ids)
        if not self._has_types:
            return vectors
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        typed: Tensor = vectors + self.token_type_embeddings(types)
        return typed


class _Attention(nn.Module):
    is_causal = False

    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.head_width = width // config.num_attention_heads
        self.Wqkv = nn.Linear(width, 3 * width, bias=config.qkv_proj_bias)
        self.out_proj = nn.Linear(width, width, bias=config.qkv_proj_bias)

    def forward(self, x: Tensor, angles: Angles, mask: Tensor | None, **settings: Any) -> Tensor:
        heads = self.Wqkv(x).view(*x.shape[:2], 3, -1, self.head_width)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
        attended: Tensor = attend(
            self, angles.turn(q), angles.turn(k), v, mask, scaling=self.head_width**-0.5, dropout=0.0, **settings
        )[0]
        projected: Tensor = self.out_proj(attended.reshape(x.shape))
        return projected


class _FeedForward(nn.Module):
    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_fc1_bias)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_fc2_bias)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return changed


class _Router(nn.Module):
    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        self.layer = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self._chosen = config.moe_top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts: [tokens, width] -> their probabilities and numbers, [tokens, chosen] each."""
        probabilities = torch.softmax(self.layer(x).float(), dim=-1)
        best = probabilities.topk(self._chosen, dim=-1)
        return best.values.to(x.dtype), best.indices


class _ExpertWeights(nn.Module):
    """Matrices of all experts, one below the other: [experts * inner, width] each. The second is not transposed."""

    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        rows = config.num_experts * config.intermediate_size
        self.w1 = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(rows, config.hidden_size))


class _Experts(nn.Module):
    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        self.mlp = _ExpertWeights(config)
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))
        self._count = config.num_experts

    def forward(self, x: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
        """Add the outputs of the chosen experts, and one bias: [tokens, width] -> [tokens, width]."""
        chosen = numbers.shape[1]
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=self._count).tolist()
        parts = x.index_select(0, order // chosen).split_with_sizes(counts)
        matrices = zip(self.mlp.w1.chunk(self._count), self.mlp.w2.chunk(self._count), strict=True)
        outputs = [
            nn.functional.gelu(part @ up.T) @ down
            for part, (up, down) in zip(parts, matrices, strict=True)
            if len(part)
        ]
        sorted_back = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        sorted_back.index_copy_(0, order, torch.cat(outputs))
        return (sorted_back.view(len(x), chosen, -1) * weights.unsqueeze(2)).sum(dim=1) + self.bias


class _ExpertLayer(nn.Module):
    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        self.router = _Router(config)
        self.experts = _Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        changed: Tensor = self.experts(tokens, *self.router(tokens))
        return changed.view(x.shape)


class _Layer(nn.Module):
    def __init__(self, config: NomicMoeConfig, place: int) -> None:
        super().__init__()
        every = config.moe_every_n_layers
        self.attn = _Attention(config)
        self.mlp = _ExpertLayer(config) if every > 0 and place % every == 1 else _FeedForward(config)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, angles: Angles, mask: Tensor | None, **settings: Any) -> Tensor:
        x = self.norm1(x + self.attn(x, angles, mask, **settings))
        changed: Tensor = self.norm2(x + self.mlp(x))
        return changed


class _Encoder(nn.Module):
    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(config, place) for place in range(config.num_hidden_layers)])

    def forward(self, x: Tensor, angles: Angles, mask: Tensor | None, **settings: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, angles, mask, **settings)
        return x


class NomicMoeModel(PreTrainedModel):  # type: ignore[misc]
    """Transformer that gives a vector of each token."""

    config_class = NomicMoeConfig
    base_model_prefix = "bert"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.emb_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = _Encoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **settings: Any,
    ) -> BaseModelOutput:
        """Compute token vectors: [rows, tokens] -> [rows, tokens, width].

        Args:
            input_ids: Token ids.
            attention_mask: 1 at a token, 0 at padding. None: there is no padding.
            token_type_ids: Segment of each token. None: the first.
            position_ids: Position of each token. None: those of a row count from 0.
            settings: Settings of the attention function.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        x = self.emb_ln(self.embeddings(input_ids, token_type_ids))
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        width = self.config.hidden_size // self.config.num_attention_heads
        angles = Angles.of(position_ids, self.config.rope_theta, width, x.dtype)
        return BaseModelOutput(last_hidden_state=self.encoder(x, angles, mask, **settings))
