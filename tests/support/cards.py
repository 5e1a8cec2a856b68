"""Cards of models for the double: each names the lanes and the outputs of one kind of model."""

from __future__ import annotations

from dataclasses import replace

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import Output

CARD = ModelCard(
    name="letters",
    architecture="LetterCounter",
    parameters=0,
    width=4,
    matryoshka=True,
    max_tokens=512,
    vocabulary=0x110000,
    pooling="mean",
    normalize=False,
    dtype="float32",
    device="cpu",
    attention="packed",
    torch_threads=1,
    forward_workers=1,
    load_s=0.0,
)
"""Card of a model that makes dense vectors of texts."""
BOTH_LANES = replace(CARD, lanes=("text", "image"))
EMBEDDER = replace(
    CARD,
    outputs=(Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR),
    dimensions=(2, 4),
    prompts={"query": "q:", "passage": "p:"},
)
LABELS = ("a", "b", "c")
CLASSIFIER = replace(
    CARD, outputs=(Output.LABELS,), labels=LABELS, activation="softmax", scoring=None, width=0, matryoshka=False
)
CROSS_ENCODER = replace(CLASSIFIER, labels=("",), activation="sigmoid", scoring="cross-encoder")
TAGGER = replace(CLASSIFIER, outputs=(Output.TOKEN_LABELS,), labels=("O", "CAPITAL"))
