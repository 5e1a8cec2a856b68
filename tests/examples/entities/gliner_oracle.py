"""Tiny GLiNER folders, and their entities by plain formulas.

The library gliner does not run beside the newest transformers. So the formulas of its paper and of its sources are
written out here, word by word and step by step: only the encoder is a class of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.tiny.bodies import widen
from tests.models.tiny.vocabularies import unigram

WIDTH, ENCODER, WIDTHS = 24, 32, 4
"""Widths of words and of the encoder, and most words of an entity."""
ENCODER_NAME = "token_rep_layer.bert_layer.model."

Entity = tuple[int, int, str, float]


def make_folder(folder: Path, *, pickled: bool = False, encoder: str = "deberta-v2", **settings: Any) -> Path:
    """Write a folder as the library gliner saves it, with wide random weights."""
    folder.mkdir(parents=True)
    torch.manual_seed(11)
    tokenizer = unigram()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[FLERT]", "<<ENT>>", "<<SEP>>"]})
    tokenizer.save_pretrained(folder)
    content: dict[str, Any] = {
        "model_type": "gliner_uni_encoder_span",
        "model_name": "microsoft/deberta-v3-small",
        "hidden_size": WIDTH,
        "max_width": WIDTHS,
        "max_len": 30,
        "span_mode": "markerV0",
        "subtoken_pooling": "first",
        "num_rnn_layers": 1,
        "class_token_index": int(tokenizer.convert_tokens_to_ids("<<ENT>>")),
        "vocab_size": len(tokenizer),
        "ent_token": "<<ENT>>",
        "sep_token": "<<SEP>>",
        "encoder_config": _encoder_config(encoder),
        **settings,
    }
    (folder / "gliner_config.json").write_text(json.dumps(content))
    body = _encoder(content)
    widen(body)
    weights = {ENCODER_NAME + name: value for name, value in body.state_dict().items()}
    width, layers = content["hidden_size"], content["num_rnn_layers"]
    shapes: dict[str, tuple[int, ...]] = {}
    if width != body.config.hidden_size:
        shapes |= {"token_rep_layer.projection.weight": (width, ENCODER), "token_rep_layer.projection.bias": (width,)}
    for layer in range(layers):
        for way in ("", "_reverse"):
            shapes |= {f"rnn.lstm.weight_ih_l{layer}{way}": (2 * width, width)}
            shapes |= {f"rnn.lstm.weight_hh_l{layer}{way}": (2 * width, width // 2)}
            shapes |= {f"rnn.lstm.bias_{part}_l{layer}{way}": (2 * width,) for part in ("ih", "hh")}
    spans = "span_rep_layer.span_rep_layer."
    for name, wide in ((f"{spans}project_start", 1), (f"{spans}project_end", 1), (f"{spans}out_project", 2),
                       ("prompt_rep_layer", 1)):  # fmt: skip
        shapes |= {f"{name}.0.weight": (4 * width, wide * width), f"{name}.0.bias": (4 * width,)}
        shapes |= {f"{name}.3.weight": (width, 4 * width), f"{name}.3.bias": (width,)}
    for name, shape in shapes.items():
        spread = 0.3 if len(shape) == 1 else 1.3 * shape[1] ** -0.5
        weights[name] = torch.randn(shape) * spread
    weights = {name: value.contiguous() for name, value in weights.items()}
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def _encoder_config(kind: str) -> dict[str, Any]:
    shared = {"hidden_size": ENCODER, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    if kind == "bert":
        return {"model_type": kind, **shared, "max_position_embeddings": 128}
    return {
        "model_type": kind,
        **shared,
        "relative_attention": True,
        "position_buckets": 8,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
        "max_position_embeddings": 512,
    }


def _encoder(content: Mapping[str, Any]) -> Any:
    config = hf.CONFIG_MAPPING[content["encoder_config"]["model_type"]].from_dict(
        {**content["encoder_config"], "vocab_size": content["vocab_size"]}
    )
    return hf.AutoModel.from_config(config).eval()


class Oracle:
    """The model of a folder, one text at a time."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.content = json.loads((folder / "gliner_config.json").read_text())
        file = folder / "model.safetensors"
        self.weights = load_file(file) if file.exists() else torch.load(folder / "pytorch_model.bin")
        self.encoder = _encoder(self.content)
        self.encoder.load_state_dict(
            {name.removeprefix(ENCODER_NAME): value for name, value in self.weights.items() if ENCODER_NAME in name}
        )
        self.tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)

    def probabilities(self, text: str, labels: Sequence[str]) -> NDArray[np.float32]:
        """Probabilities [words, widths, labels]; 0 for spans that do not exist."""
        words = re.findall(r"\w+(?:[-_]\w+)*|\S", text)
        prompt = [part for label in labels for part in ("<<ENT>>", label)] + ["<<SEP>>"]
        encoded = self.tokenizer([*prompt, *words], is_split_into_words=True, return_tensors="pt")
        numbers = encoded.word_ids(0)
        with torch.inference_mode():
            vectors = self.encoder(**{name: encoded[name] for name in ("input_ids", "attention_mask")})[0][0]
            if "token_rep_layer.projection.weight" in self.weights:
                vectors = self._linear(vectors, "token_rep_layer.projection")
            marks = (encoded["input_ids"][0] == self.content["class_token_index"]).nonzero()[:, 0]
            marks = marks if self.content.get("embed_ent_token", True) else marks + 1
            asked = self._two_layers(vectors[marks], "prompt_rep_layer")
            read = torch.stack([vectors[numbers.index(len(prompt) + place)] for place in range(len(words))])
            for layer in range(self.content["num_rnn_layers"]):
                ahead = self._lstm(read, f"l{layer}")
                back = self._lstm(read.flip(0), f"l{layer}_reverse").flip(0)
                read = torch.cat([ahead, back], dim=1)
            found = np.zeros((len(words), self.content["max_width"], len(labels)), np.float32)
            spans = "span_rep_layer.span_rep_layer."
            for first in range(len(words)):
                for last in range(first, min(first + self.content["max_width"], len(words))):
                    ends = (
                        self._two_layers(read[first], f"{spans}project_start"),
                        self._two_layers(read[last], f"{spans}project_end"),
                    )
                    span = self._two_layers(torch.cat(ends).clamp(min=0), f"{spans}out_project")
                    found[first, last - first] = (1 / (1 + torch.exp(-(asked @ span)))).numpy()
        return found

    def _linear(self, values: Tensor, name: str) -> Tensor:
        return values @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _two_layers(self, values: Tensor, name: str) -> Tensor:
        return self._linear(self._linear(values, f"{name}.0").clamp(min=0), f"{name}.3")

    def _lstm(self, values: Tensor, name: str) -> Tensor:
        """Hochreiter and Schmidhuber's cell with gates in torch's order: input, forget, cell, output."""
        get = {
            part: self.weights[f"rnn.lstm.{part}_{name}"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        state = cell = torch.zeros(self.content["hidden_size"] // 2)
        out = []
        for value in values:
            gates = get["weight_ih"] @ value + get["bias_ih"] + get["weight_hh"] @ state + get["bias_hh"]
            opened, kept, new, shown = gates.chunk(4)
            cell = torch.sigmoid(kept) * cell + torch.sigmoid(opened) * torch.tanh(new)
            state = torch.sigmoid(shown) * torch.tanh(cell)
            out.append(state)
        return torch.stack(out)

    def entities(
        self, text: str, labels: Sequence[str], threshold: float, *, nested: bool = False, multi_label: bool = False
    ) -> list[Entity]:
        """Entities by first and last character, label and score, chosen one after the other."""
        places = [found.span() for found in re.finditer(r"\w+(?:[-_]\w+)*|\S", text)]
        scores = self.probabilities(text, labels)
        left = [
            (float(scores[first, width, label]), first, first + width, label)
            for first in range(scores.shape[0])
            for width in range(scores.shape[1])
            for label in range(scores.shape[2])
            if scores[first, width, label] > threshold
        ]
        chosen: list[tuple[float, int, int, int]] = []
        while left:
            best = max(left, key=lambda each: each[0])
            left.remove(best)
            chosen.append(best)
            left = [each for each in left if self._agree(best[1:3], each[1:3], nested, multi_label)]
        chosen.sort(key=lambda each: each[1])
        return [(places[first][0], places[last][1], labels[label], score) for score, first, last, label in chosen]

    @staticmethod
    def _agree(one: tuple[int, ...], other: tuple[int, ...], nested: bool, multi_label: bool) -> bool:
        if one == other:
            return multi_label
        shared = set(range(one[0], one[1] + 1)) & set(range(other[0], other[1] + 1))
        if not shared:
            return True
        return nested and len(shared) == min(one[1] - one[0], other[1] - other[0]) + 1
