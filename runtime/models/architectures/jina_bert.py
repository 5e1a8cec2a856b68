"""JinaBERT: BERT without position vectors, with ALiBi and gated linear units (https://arxiv.org/abs/2310.19923).

Module names are those of the published weights. There are two forms: that of jina-embeddings-v2, and that of
jina-embeddings-v2-base-code, which normalises queries and keys and has two more norms in each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from staged_pool.runtime.models.architectures.distance_bias import biased_mask, head_slopes
from staged_pool.runtime.models.specs.own_models import JINA_BERT

_ACTIVATIONS: Final[Mapping[str, Callable[[], nn.Module]]] = {"geglu": nn.GELU, "reglu": nn.ReLU}
"""Activation of the gate, by `feed_forward_type`."""


class JinaBertConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers has no types
    """Fields of the published config, and `qk_norm`: the form with normalised queries and keys."""

    model_type = JINA_BERT


class _Embeddings(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        vectors: Tensor = self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(types))
        return vectors


class _SelfAttention(nn.Module):
    is_causal = False

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.head_width = width // config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        if config.qk_norm:
            self.layer_norm_q = nn.LayerNorm(width, eps=config.layer_norm_eps)
            self.layer_norm_k = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.config.qk_norm:
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        shape = (*x.shape[:2], -1, self.head_width)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        attended: Tensor = attend(self, q, k, v, mask, scaling=self.head_width**-0.5, dropout=0.0, **settings)[0]
        return attended.reshape(x.shape)


class _Added(nn.Module):
    """A linear layer, whose result is added to the layer's input and normalised."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        added: Tensor = self.LayerNorm(self.dense(x) + before)
        return added


class _Attention(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _Added(config)

    def forward(self, x: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
        attended: Tensor = self.output(self.self(x, mask, **settings), x)
        return attended


class _GatedUnit(nn.Module):
    """Feed-forward half of jina-embeddings-v2: the first half of `gated_layers` is the gate."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.activation = _ACTIVATIONS[config.feed_forward_type]()
        self.gated_layers = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, width)
        self.layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gated_layers(x).chunk(2, dim=-1)
        added: Tensor = self.layernorm(self.wo(self.activation(gate) * up) + x)
        return added


class _CodeGatedUnit(nn.Module):
    """Feed-forward half of the code model: the second half of `up_gated_layer` is the gate."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.feed_forward_type]()
        self.up_gated_layer = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_layer = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_gated_layer(x).chunk(2, dim=-1)
        changed: Tensor = self.down_layer(up * self.activation(gate))
        return changed


class _Layer(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.mlp = _GatedUnit(config)

    def forward(self, x: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
        changed: Tensor = self.mlp(self.attention(x, mask, **settings))
        return changed


class _CodeLayer(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.layer_norm_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layer_norm_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = _CodeGatedUnit(config)

    def forward(self, x: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
        x = self.layer_norm_1(x + self.attention(x, mask, **settings))
        changed: Tensor = self.layer_norm_2(x + self.mlp(x))
        return changed


class _Encoder(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        kind = _CodeLayer if config.qk_norm else _Layer
        self.layer = nn.ModuleList([kind(config) for _ in range(config.num_hidden_layers)])

    def forward(self, x: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask, **settings)
        return x


class _Pooler(nn.Module):
    """Layer on the first token, which heads of labels read."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.activation(self.dense(x[:, 0]))
        return pooled


class JinaBertPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Settings of the classes for transformers."""

    config_class = JinaBertConfig
    base_model_prefix = "bert"
    _supports_sdpa = True
    _supports_attention_backend = True


class JinaBertModel(JinaBertPreTrainedModel):
    """Transformer that gives a vector of each token."""

    def __init__(self, config: JinaBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.pooler = _Pooler(config) if add_pooling_layer else None
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
    ) -> BaseModelOutputWithPooling:
        """Compute token vectors: [rows, tokens] -> [rows, tokens, width]. Only distances matter, not positions.

        Args:
            input_ids: Token ids.
            attention_mask: 1 at a token, 0 at padding. None: there is no padding.
            token_type_ids: Segment of each token. None: the first.
            position_ids: Ignored: a packed batch has the same distances inside of each sequence.
            settings: Settings of the attention function.
        """
        del position_ids
        x = self.embeddings(input_ids, token_type_ids)
        slopes = head_slopes(self.config.num_attention_heads, x.device)
        if "packed_groups" in settings:
            x = self.encoder(x, None, distance_slopes=slopes, **settings)
        else:
            x = self.encoder(x, biased_mask(slopes, attention_mask, x.shape[1], x.dtype))
        return BaseModelOutputWithPooling(
            last_hidden_state=x, pooler_output=None if self.pooler is None else self.pooler(x)
        )


class JinaBertForSequenceClassification(JinaBertPreTrainedModel):
    """The transformer with a linear layer on its pooler, as in jina-reranker-v1-turbo-en."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, **settings: Any) -> SequenceClassifierOutput:
        """Compute the logits of each row: [rows, tokens] -> [rows, labels]."""
        pooled = self.bert(input_ids, **settings).pooler_output
        return SequenceClassifierOutput(logits=self.classifier(pooled))
