"""Registration of this folder's classes with the Auto classes of transformers."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from staged_pool.runtime.models.architectures.jina_bert import (
    JinaBertConfig,
    JinaBertForSequenceClassification,
    JinaBertModel,
)
from staged_pool.runtime.models.architectures.nomic_moe import NomicMoeConfig, NomicMoeModel


def register_architectures() -> None:
    """Make the classes known to transformers, under the names of `specs/own_models.py`."""
    AutoConfig.register(JinaBertConfig.model_type, JinaBertConfig, exist_ok=True)
    AutoModel.register(JinaBertConfig, JinaBertModel, exist_ok=True)
    AutoConfig.register(NomicMoeConfig.model_type, NomicMoeConfig, exist_ok=True)
    AutoModel.register(NomicMoeConfig, NomicMoeModel, exist_ok=True)
    AutoModelForSequenceClassification.register(JinaBertConfig, JinaBertForSequenceClassification, exist_ok=True)
