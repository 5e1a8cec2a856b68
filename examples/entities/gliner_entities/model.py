"""Span model of GLiNER: scores of all spans of words, for labels that stand in the prompt.

Zaratiana et al., 2023, GLiNER, https://arxiv.org/abs/2311.08526, section 2. The names of the weights are those of the
library gliner, whose folders are read.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel

from gliner_entities.prompt import Prompt
from gliner_entities.settings import GlinerSettings
from staged_pool import ConfigError

_FILES: Final = ("model.safetensors", "pytorch_model.bin")
_BUFFER: Final = "position_ids"
"""Buffer that older versions of transformers saved; the encoder makes it."""


def projection(width: int, out: int) -> nn.Sequential:
    """Two layers with ReLU. Places 0 and 3 have the weights; 2 is for the dropout of training."""
    return nn.Sequential(nn.Linear(width, out * 4), nn.ReLU(), nn.Identity(), nn.Linear(out * 4, out))


class _Encoder(nn.Module):
    """A transformer, and a projection if its width is another."""

    def __init__(self, settings: GlinerSettings) -> None:
        super().__init__()
        kind = settings.encoder["model_type"]
        if kind not in CONFIG_MAPPING:
            raise ConfigError(f"gliner_config.json: encoder_config: model_type={kind!r} is not known to transformers")
        config = CONFIG_MAPPING[kind].from_dict(dict(settings.encoder))
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(f"gliner_config.json: encoder_config: model_type={kind!r} is no encoder alone")
        self.bert_layer = nn.ModuleDict({"model": AutoModel.from_config(config)})
        if config.hidden_size != settings.hidden_size:
            self.projection = nn.Linear(config.hidden_size, settings.hidden_size)

    @property
    def config(self) -> Any:
        return self.bert_layer["model"].config

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[texts, tokens] -> [texts, tokens, width]."""
        vectors: Tensor = self.bert_layer["model"](input_ids=ids, attention_mask=mask)[0]
        return self.projection(vectors) if hasattr(self, "projection") else vectors


class _Recurrent(nn.Module):
    """A bidirectional LSTM over the words of each text."""

    def __init__(self, settings: GlinerSettings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.lstm = nn.LSTM(width, width // 2, settings.lstm_layers, bidirectional=True, batch_first=True)

    def forward(self, words: Tensor, lengths: list[int]) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(words, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        out: Tensor = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        return out


class _Spans(nn.Module):
    """Vectors of spans, from their first and last words ("markerV0")."""

    def __init__(self, settings: GlinerSettings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.project_start = projection(width, width)
        self.project_end = projection(width, width)
        self.out_project = projection(2 * width, width)

    def forward(self, words: Tensor, ends: Tensor) -> Tensor:
        """Make the vectors of the spans that begin at each word.

        Args:
            words: [texts, words, width].
            ends: Index of the last word of each span, [words, widths].

        Returns:
            [texts, words, widths, width].
        """
        first = self.project_start(words).unsqueeze(2).expand(-1, -1, ends.shape[1], -1)
        last = self.project_end(words)[:, ends]
        vectors: Tensor = self.out_project(torch.cat([first, last], dim=-1).relu())
        return vectors


class GlinerModel(nn.Module):
    """The whole model, in eval mode on the CPU. Load weights by `load_model`."""

    def __init__(self, settings: GlinerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.token_rep_layer = _Encoder(settings)
        if settings.lstm_layers:
            self.rnn = _Recurrent(settings)
        self.span_rep_layer = nn.ModuleDict({"span_rep_layer": _Spans(settings)})
        self.prompt_rep_layer = projection(settings.hidden_size, settings.hidden_size)
        self.eval().requires_grad_(False)

    @property
    def max_tokens(self) -> int | None:
        """Longest prompt in tokens: rows of the position table. None: positions are relative."""
        config = self.token_rep_layer.config
        if not getattr(config, "position_biased_input", True) or not hasattr(config, "max_position_embeddings"):
            return None
        if getattr(config, "rope_parameters", None) is not None:
            return int(config.max_position_embeddings)
        return int(config.max_position_embeddings) - (2 if "roberta" in config.model_type else 0)

    def forward(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Score the spans of several texts.

        Returns:
            For each text, the probabilities [words, widths, labels]. Spans that reach over the end of the text have 0.
        """
        device = next(self.parameters()).device
        ids = _padded([torch.tensor(prompt.ids) for prompt in prompts]).to(device)
        lengths = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
        mask = (torch.arange(ids.shape[1], device=device) < lengths.unsqueeze(1)).long()
        tokens = self.token_rep_layer(ids, mask)
        words = _padded([_rows(tokens[row], prompt.words) for row, prompt in enumerate(prompts)])
        if self.settings.lstm_layers:
            words = self.rnn(words, [len(prompt.words) for prompt in prompts])
        count, widths = words.shape[1], self.settings.max_width
        ends = torch.arange(count, device=device).unsqueeze(1) + torch.arange(widths, device=device)
        spans = self.span_rep_layer["span_rep_layer"](words, ends.clamp(max=count - 1))
        found = []
        for row, prompt in enumerate(prompts):
            labels = self.prompt_rep_layer(_rows(tokens[row], prompt.labels))
            length = len(prompt.words)
            scores = torch.sigmoid(spans[row, :length] @ labels.T)
            found.append(scores * (ends[:length] < length).unsqueeze(-1))
        return found


def load_model(folder: Path, settings: GlinerSettings) -> GlinerModel:
    """Load the weights of a folder: safetensors first, else a pickle of bare tensors, whose code never runs.

    Raises:
        ConfigError: Weights are missing, damaged, of another shape, or belong to another architecture.
    """
    model = GlinerModel(settings)
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise ConfigError(f"{folder}: no weights, neither {' nor '.join(_FILES)}")
    try:
        stored = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise ConfigError(f"{file.name}: the weights cannot be read as bare tensors: {error}") from error
    stored = {name: value for name, value in stored.items() if name.rpartition(".")[2] != _BUFFER}
    try:
        left = model.load_state_dict(stored, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"{file.name}: the weights do not fit gliner_config.json: {error}") from error
    missing = [name for name in left.missing_keys if name.rpartition(".")[2] != _BUFFER]
    if missing or left.unexpected_keys:
        raise ConfigError(
            f"{file.name}: the weights are of another architecture than gliner_config.json describes: "
            f"missing {sorted(missing)[:3]}, unread {sorted(left.unexpected_keys)[:3]}"
        )
    return model.float()


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _rows(vectors: Tensor, places: Sequence[int | None]) -> Tensor:
    """Select the vectors of places; None gets zeros."""
    known = torch.tensor([place or 0 for place in places], device=vectors.device)
    present = torch.tensor([place is not None for place in places], device=vectors.device)
    return vectors[known] * present.unsqueeze(1)
