"""NomicBERT with experts by its paper, one token at a time, in float64.

The paper is https://arxiv.org/abs/2502.07972. Tensors have the names of the published checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.models.formulas import Tensors, linear, norm


def hidden(tensors: Tensors, config: Mapping[str, Any], ids: Sequence[int], *, renormalise: bool = False) -> Tensor:
    """The last layer's vectors of one text, [tokens, width]; `renormalise` is the usual rule, which is wrong here."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    heads, width = config["n_head"], config["n_embd"]
    epsilon = config["layer_norm_epsilon"]
    size = width // heads
    rows = tensors["embeddings.word_embeddings.weight"][list(ids)]
    if config["type_vocab_size"]:
        rows = rows + tensors["embeddings.token_type_embeddings.weight"][0]
    rows = norm(rows, tensors, "emb_ln", epsilon)
    for layer in range(config["n_layer"]):
        of = f"encoder.layers.{layer}."
        both = linear(rows, tensors, f"{of}attn.Wqkv")
        query, key, value = (both[:, part * width : (part + 1) * width] for part in range(3))
        seen = torch.zeros_like(rows)
        for head in range(heads):
            cut = slice(head * size, (head + 1) * size)
            turned = [_turned(part[:, cut], _base(config, len(ids), size)) for part in (query, key)]
            seen[:, cut] = torch.softmax(turned[0] @ turned[1].T / math.sqrt(size), dim=1) @ value[:, cut]
        rows = norm(rows + linear(seen, tensors, f"{of}attn.out_proj"), tensors, f"{of}norm1", epsilon)
        if f"{of}mlp.router.layer.weight" in tensors:
            changed = torch.stack([_experts(row, tensors, of, config, renormalise) for row in rows])
        elif f"{of}mlp.fc11.weight" in tensors:
            gate = functional.silu(linear(rows, tensors, f"{of}mlp.fc12"))
            changed = linear(linear(rows, tensors, f"{of}mlp.fc11") * gate, tensors, f"{of}mlp.fc2")
        else:
            changed = linear(functional.gelu(linear(rows, tensors, f"{of}mlp.fc1")), tensors, f"{of}mlp.fc2")
        rows = norm(rows + changed, tensors, f"{of}norm2", epsilon)
    return rows


def random_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Wide random weights, under the names that they have on the hub."""
    width, inner = config["n_embd"], config["n_inner"]
    matrices: dict[str, tuple[int, int]] = {"embeddings.word_embeddings": (config["vocab_size"], width)}
    if config["type_vocab_size"]:
        matrices["embeddings.token_type_embeddings"] = (config["type_vocab_size"], width)
    tensors: dict[str, Tensor] = {}
    norms = ["emb_ln"]
    biased: dict[str, tuple[int, int]] = {}
    for layer in range(config["n_layer"]):
        of = f"encoder.layers.{layer}."
        attention = biased if config["qkv_proj_bias"] else matrices
        attention |= {f"{of}attn.Wqkv": (3 * width, width), f"{of}attn.out_proj": (width, width)}
        norms += [f"{of}norm1", f"{of}norm2"]
        if config.get("num_experts") and layer % config["moe_every_n_layers"] == 1:
            matrices[f"{of}mlp.router.layer"] = (config["num_experts"], width)
            for name in ("w1", "w2"):
                tensors[f"{of}mlp.experts.mlp.{name}"] = torch.randn(config["num_experts"] * inner, width) * 0.3
            tensors[f"{of}mlp.experts.bias"] = torch.randn(width) * 0.3
        elif config["activation_function"] == "swiglu":
            matrices |= {
                f"{of}mlp.fc11": (inner, width),
                f"{of}mlp.fc12": (inner, width),
                f"{of}mlp.fc2": (width, inner),
            }
        else:
            biased |= {f"{of}mlp.fc1": (inner, width), f"{of}mlp.fc2": (width, inner)}
    tensors |= {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in (matrices | biased).items()}
    tensors |= {f"{name}.bias": torch.randn(shape[0]) * 0.3 for name, shape in biased.items()}
    for name in norms:
        tensors |= {f"{name}.weight": 1 + torch.randn(width) * 0.2, f"{name}.bias": torch.randn(width) * 0.2}
    return tensors


def _experts(row: Tensor, tensors: Tensors, of: str, config: Mapping[str, Any], renormalise: bool) -> Tensor:
    """Output of the experts for one token: x W1^T, then W2 as it is stored, weighted; one bias at the end."""
    inner = config["n_inner"]
    probabilities = torch.softmax(tensors[f"{of}mlp.router.layer.weight"] @ row, dim=0)
    best = sorted(range(len(probabilities)), key=lambda number: -float(probabilities[number]))[: config["moe_top_k"]]
    total = sum(float(probabilities[number]) for number in best) if renormalise else 1.0
    found = torch.zeros_like(row)
    for number in best:
        cut = slice(number * inner, (number + 1) * inner)
        up, down = tensors[f"{of}mlp.experts.mlp.w1"][cut], tensors[f"{of}mlp.experts.mlp.w2"][cut]
        found += probabilities[number] / total * (functional.gelu(up @ row) @ down)
    return found + tensors[f"{of}mlp.experts.bias"]


def _base(config: Mapping[str, Any], tokens: int, size: int) -> float:
    """Base of the frequencies: larger for texts longer than those of the training, if the config asks for it."""
    base: float = config["rotary_emb_base"]
    factor, trained = config["rotary_scaling_factor"], config["max_trained_positions"]
    if factor is None or tokens <= trained:
        return base
    return float(base * (factor * tokens / trained - (factor - 1)) ** (size / (size - 2)))


def _turned(rows: Tensor, base: float) -> Tensor:
    half = rows.shape[1] // 2
    angles = torch.outer(
        torch.arange(len(rows), dtype=torch.float64), base ** -(torch.arange(half, dtype=torch.float64) / half)
    )
    first, second = rows[:, :half], rows[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=1
    )
