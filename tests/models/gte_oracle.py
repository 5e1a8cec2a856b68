"""GTE's transformer by its paper (https://arxiv.org/abs/2407.19669, appendix A) and its published config, in torch.

Takes the tensors of a checkpoint by the names that they have on the hub, and shares no code with transformers' class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.models.formulas import Tensors, linear, norm


def hidden(
    tensors: Tensors, config: Mapping[str, Any], ids: Sequence[int], types: Sequence[int] | None = None
) -> Tensor:
    """The last layer's vectors of one text, [tokens, width]."""
    tensors = {name.removeprefix("new."): tensor for name, tensor in tensors.items()}
    heads, width = config["num_attention_heads"], config["hidden_size"]
    epsilon = config["layer_norm_eps"]
    given = tensors["embeddings.word_embeddings.weight"][list(ids)]
    if config["type_vocab_size"]:
        given = given + tensors["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    rows = norm(given, tensors, "embeddings.LayerNorm", epsilon)
    angles = torch.outer(torch.arange(len(ids), dtype=torch.float64), _frequencies(config, width // heads))
    for layer in range(config["num_hidden_layers"]):
        of = f"encoder.layer.{layer}."
        query, key, value = (
            part.view(-1, heads, width // heads).transpose(0, 1)
            for part in linear(rows, tensors, f"{of}attention.qkv_proj").tensor_split(3, dim=1)
        )
        query, key = _turned(query, angles), _turned(key, angles)
        weights = torch.softmax(query @ key.transpose(1, 2) / (width // heads) ** 0.5, dim=2)
        seen = (weights @ value).transpose(0, 1).reshape(len(ids), width)
        rows = norm(rows + linear(seen, tensors, f"{of}attention.o_proj"), tensors, f"{of}attn_ln", epsilon)
        up, gate = functional.linear(rows, tensors[f"{of}mlp.up_gate_proj.weight"]).chunk(2, dim=1)
        changed = linear(functional.gelu(gate) * up, tensors, f"{of}mlp.down_proj")
        rows = norm(rows + changed, tensors, f"{of}mlp_ln", epsilon)
    return rows


def random_tensors(config: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Wide random weights of a transformer, under the names that they have on the hub."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (config["vocab_size"], width)}
    if config["type_vocab_size"]:
        shapes["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        of = f"encoder.layer.{layer}."
        shapes |= {
            f"{of}attention.qkv_proj.weight": (3 * width, width),
            f"{of}attention.qkv_proj.bias": (3 * width,),
            f"{of}attention.o_proj.weight": (width, width),
            f"{of}attention.o_proj.bias": (width,),
            f"{of}mlp.up_gate_proj.weight": (2 * inner, width),
            f"{of}mlp.down_proj.weight": (width, inner),
            f"{of}mlp.down_proj.bias": (width,),
        }
    tensors = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    norms = ["embeddings.LayerNorm"]
    norms += [
        f"encoder.layer.{layer}.{part}"
        for layer in range(config["num_hidden_layers"])
        for part in ("attn_ln", "mlp_ln")
    ]
    for name in norms:
        tensors |= {f"{name}.weight": 1 + torch.randn(width) * 0.2, f"{name}.bias": torch.randn(width) * 0.2}
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _frequencies(config: Mapping[str, Any], width: int) -> Tensor:
    """Return the frequency of each pair of values; NTK scaling by its equation."""
    factor = (config.get("rope_scaling") or {}).get("factor", 1.0)
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies: Tensor = 1 / ((config["rope_theta"] * factor) ** exponents) / factor ** (2 / width)
    return frequencies


def _turned(rows: Tensor, angles: Tensor) -> Tensor:
    cosine, sine = angles.cos().float(), angles.sin().float()
    first, second = rows.chunk(2, dim=2)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=2)
