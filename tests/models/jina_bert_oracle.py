"""JinaBERT by its paper, one text and one head at a time, in float64.

The paper is https://arxiv.org/abs/2310.19923, section 2.1. Tensors have the names of the published checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.models.formulas import Tensors, linear, norm


def slopes(heads: int) -> list[float]:
    """Slopes as the authors of ALiBi choose them: geometric, and interleaved where the number is no power of two."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (place + 1) / heads) for place in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes(below) + slopes(2 * below)[::2][: heads - below]


def hidden(
    tensors: Tensors, config: Mapping[str, Any], ids: Sequence[int], types: Sequence[int] | None = None
) -> Tensor:
    """The last layer's vectors of one text, [tokens, width]."""
    tensors = {name.removeprefix("bert."): tensor.double() for name, tensor in tensors.items()}
    heads = config["num_attention_heads"]
    epsilon = config["layer_norm_eps"]
    given = tensors["embeddings.word_embeddings.weight"][list(ids)]
    given = given + tensors["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    rows = norm(given, tensors, "embeddings.LayerNorm", epsilon)
    for layer in range(config["num_hidden_layers"]):
        of = f"encoder.layer.{layer}."
        query, key, value = (linear(rows, tensors, f"{of}attention.self.{part}") for part in ("query", "key", "value"))
        code = f"{of}attention.self.layer_norm_q.weight" in tensors
        if code:
            query = norm(query, tensors, f"{of}attention.self.layer_norm_q", epsilon)
            key = norm(key, tensors, f"{of}attention.self.layer_norm_k", epsilon)
        seen = torch.zeros_like(rows)
        width = rows.shape[1] // heads
        for head, slope in enumerate(slopes(heads)):
            cut = slice(head * width, (head + 1) * width)
            for place in range(len(ids)):
                scores = key[:, cut] @ query[place, cut] / math.sqrt(width)
                scores -= slope * torch.tensor([abs(place - other) for other in range(len(ids))])
                seen[place, cut] = torch.softmax(scores, 0) @ value[:, cut]
        attended = norm(
            linear(seen, tensors, f"{of}attention.output.dense") + rows,
            tensors,
            f"{of}attention.output.LayerNorm",
            epsilon,
        )
        act = functional.gelu if config["feed_forward_type"] == "geglu" else functional.relu
        inner = config["intermediate_size"]
        if code:
            rows = norm(rows + attended, tensors, f"{of}layer_norm_1", epsilon)
            both = rows @ tensors[f"{of}mlp.up_gated_layer.weight"].T
            changed = linear(both[:, :inner] * act(both[:, inner:]), tensors, f"{of}mlp.down_layer")
            rows = norm(rows + changed, tensors, f"{of}layer_norm_2", epsilon)
        else:
            both = attended @ tensors[f"{of}mlp.gated_layers.weight"].T
            changed = linear(act(both[:, :inner]) * both[:, inner:], tensors, f"{of}mlp.wo")
            rows = norm(changed + attended, tensors, f"{of}mlp.layernorm", epsilon)
    return rows


def random_tensors(config: Mapping[str, Any], prefix: str, *, code: bool) -> dict[str, Tensor]:
    """Wide random weights of a transformer, under the names that they have on the hub."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    matrices: dict[str, tuple[int, int]] = {
        "embeddings.word_embeddings": (config["vocab_size"], width),
        "embeddings.token_type_embeddings": (config["type_vocab_size"], width),
    }
    biased: dict[str, tuple[int, int]] = {}
    norms = ["embeddings.LayerNorm"]
    for layer in range(config["num_hidden_layers"]):
        of = f"encoder.layer.{layer}."
        attention = f"{of}attention.self."
        biased |= {f"{attention}{part}": (width, width) for part in ("query", "key", "value")}
        biased[f"{of}attention.output.dense"] = (width, width)
        norms.append(f"{of}attention.output.LayerNorm")
        matrices[f"{of}mlp.{'up_gated_layer' if code else 'gated_layers'}"] = (2 * inner, width)
        biased[f"{of}mlp.{'down_layer' if code else 'wo'}"] = (width, inner)
        own = ["layer_norm_1", "layer_norm_2", "attention.self.layer_norm_q", "attention.self.layer_norm_k"]
        norms += [f"{of}{name}" for name in (own if code else ["mlp.layernorm"])]
    tensors = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in (matrices | biased).items()}
    tensors |= {f"{name}.bias": torch.randn(shape[0]) * 0.3 for name, shape in biased.items()}
    for name in norms:
        tensors |= {f"{name}.weight": 1 + torch.randn(width) * 0.2, f"{name}.bias": torch.randn(width) * 0.2}
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
