"""Plugin `gliner_entities`: the hooks of a request, in their order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from gliner_entities.decode import Scores, find_entities
from gliner_entities.model import load_model
from gliner_entities.prompt import Prompt, PromptWriter, Word, split_words
from gliner_entities.request import EntitiesRequest, parse_request
from gliner_entities.settings import read_settings
from staged_pool import ConfigError, PluginContext, PluginSetup, Processor

VARIABLE: Final = "GLINER_MODEL"
"""Variable of the environment that names the model folder."""


class GlinerEntities(Processor):
    """Finds entities of the labels of each request, with a GLiNER model.

    Args:
        setup: Names the device.
        folder: The model folder. None: that of the variable `GLINER_MODEL`.

    Raises:
        ConfigError: The folder is not named, cannot be read, or has a model of another architecture.
    """

    name = "gliner_entities"

    def __init__(self, setup: PluginSetup, folder: str | Path | None = None) -> None:
        named = folder or os.environ.get(VARIABLE)
        if not named:
            raise ConfigError(f"{VARIABLE} is not set: it names the folder of the GLiNER model")
        path = Path(named)
        settings = read_settings(path)
        self._model = load_model(path, settings).to(setup.device)
        self._writer = PromptWriter(path, settings, self._model.max_tokens)

    @classmethod
    def of(cls, folder: str | Path) -> type[GlinerEntities]:
        """Return the plugin of a folder, for `open_engine(plugins=[GlinerEntities.of("./gliner")])`."""

        class OfFolder(cls):  # type: ignore[misc, valid-type]
            def __init__(self, setup: PluginSetup) -> None:
                super().__init__(setup, folder)

        return OfFolder

    async def parse(self, data: object, context: PluginContext) -> EntitiesRequest:
        """Check the fields of a request. It is quick, and needs no thread."""
        request = parse_request(data)
        self._writer.check_labels(request.labels)
        return request

    def preprocess(self, request: EntitiesRequest, context: PluginContext) -> Sequence[Prompt]:
        """Split and tokenize each text, behind the labels. A text without words needs no forward."""
        prompts: list[Prompt] = []
        words: list[list[Word]] = []
        for number, text in enumerate(request.texts):
            context.check()
            words.append(split_words(text))
            if words[-1]:
                prompts.append(self._writer.write(text, words[-1], request.labels, request.place(number)))
        context.state = request, words
        return prompts

    def tokens(self, item: Prompt) -> int:
        """Return the tokens of a prompt."""
        return len(item.ids)

    def forward(self, batch: Sequence[Prompt]) -> Sequence[Scores]:
        """Score the spans of texts of any requests together."""
        with torch.inference_mode():
            return [scores.cpu().numpy() for scores in self._model(batch)]

    def postprocess(self, rows: Sequence[Scores], context: PluginContext) -> dict[str, Any]:
        """Choose entities, and give their places in the texts."""
        request, words = context.state
        scores = iter(rows)
        found = [_entities(text, each, next(scores), request) if each else []
                 for text, each in zip(request.texts, words, strict=True)]  # fmt: skip
        return {"entities": found if request.is_list else found[0]}


def _entities(text: str, words: Sequence[Word], scores: Scores, request: EntitiesRequest) -> list[dict[str, Any]]:
    """Return the entities of one text. `start` and `end` count characters."""
    spans = find_entities(scores, request.threshold, nested=request.nested, multi_label=request.multi_label)
    return [
        {
            "start": words[span.first].start,
            "end": words[span.last].end,
            "text": text[words[span.first].start : words[span.last].end],
            "label": request.labels[span.label],
            "score": span.score,
        }
        for span in spans
    ]
