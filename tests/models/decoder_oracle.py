"""Llama's and Qwen3's transformers by their papers, in torch, with attention in both directions.

Takes the tensors of a checkpoint by the names that they have on the hub, and shares no code with transformers' classes.
Llama: https://arxiv.org/abs/2407.21783. Qwen3 normalises queries and keys: https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Tensors = Mapping[str, Tensor]


def hidden(tensors: Tensors, config: Mapping[str, Any], ids: Sequence[int], *, causal: bool = False) -> Tensor:
    """The last layer's vectors of one text, [tokens, width], normalised."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rows = tensors["embed_tokens.weight"][list(ids)]
    angles = torch.outer(torch.arange(len(ids), dtype=torch.float64), _frequencies(config))
    hide = torch.ones(len(ids), len(ids)).triu(1).bool() if causal else torch.zeros(len(ids), len(ids)).bool()
    for layer in range(config["num_hidden_layers"]):
        of = f"layers.{layer}."
        given = _norm(rows, tensors[f"{of}input_layernorm.weight"], config)
        query, key, value = (
            (given @ tensors[f"{of}self_attn.{name}_proj.weight"].T).view(len(ids), -1, size).transpose(0, 1)
            for name in "qkv"
        )
        if f"{of}self_attn.q_norm.weight" in tensors:
            query = _norm(query, tensors[f"{of}self_attn.q_norm.weight"], config)
            key = _norm(key, tensors[f"{of}self_attn.k_norm.weight"], config)
        query, key = _turned(query, angles), _turned(key, angles).repeat_interleave(heads // groups, dim=0)
        scores = (query @ key.transpose(1, 2) / size**0.5).masked_fill(hide, -math.inf)
        seen = torch.softmax(scores, dim=2) @ value.repeat_interleave(heads // groups, dim=0)
        rows = rows + seen.transpose(0, 1).reshape(len(ids), -1) @ tensors[f"{of}self_attn.o_proj.weight"].T
        given = _norm(rows, tensors[f"{of}post_attention_layernorm.weight"], config)
        gate, up = (given @ tensors[f"{of}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        rows = rows + functional.silu(gate) * up @ tensors[f"{of}mlp.down_proj.weight"].T
    return _norm(rows, tensors["norm.weight"], config)


def random_tensors(config: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Wide random weights, under the names that they have on the hub."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    outer, shared = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    found = {"embed_tokens.weight": torch.randn(config["vocab_size"], width), "norm.weight": _factors(width)}
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (outer, width),
            "self_attn.k_proj": (shared, width),
            "self_attn.v_proj": (shared, width),
            "self_attn.o_proj": (width, outer),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        of = f"layers.{layer}."
        found |= {f"{of}{name}.weight": torch.randn(shape) * shape[1] ** -0.5 * 1.5 for name, shape in shapes.items()}
        norms = {"input_layernorm": width, "post_attention_layernorm": width}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
        found |= {f"{of}{name}.weight": _factors(length) for name, length in norms.items()}
    return {prefix + name: tensor for name, tensor in found.items()}


def _factors(length: int) -> Tensor:
    return 1 + 0.2 * torch.randn(length)


def _norm(rows: Tensor, factors: Tensor, config: Mapping[str, Any]) -> Tensor:
    mean: Tensor = rows.pow(2).mean(dim=-1, keepdim=True) + config["rms_norm_eps"]
    return rows * mean.rsqrt() * factors


def _turned(rows: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of the first and second half of [heads, tokens, size]."""
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _frequencies(config: Mapping[str, Any]) -> Tensor:
    size = config["head_dim"]
    found: Tensor = config["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    scaling = config.get("rope_scaling")
    if not scaling:
        return found
    assert scaling["rope_type"] == "llama3"
    trained = scaling["original_max_position_embeddings"]
    turns = trained * found / (2 * math.pi)  # of each pair, over the trained length
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = share * found + (1 - share) * found / scaling["factor"]
    return scaled
