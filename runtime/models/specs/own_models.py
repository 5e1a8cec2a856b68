"""Names of the transformers that have a class of their own here."""

from __future__ import annotations

from typing import Final

JINA_BERT: Final = "jina_bert"
"""`model_type` of JinaBERT."""
NOMIC_MOE: Final = "nomic_bert_moe"
"""`model_type` of NomicBERT with GELU, whose layers may have experts."""
OWN_TYPES: Final = frozenset({JINA_BERT, NOMIC_MOE})
"""Each `model_type` with a class in `runtime/models/architectures/`."""
HEADLESS: Final = frozenset({"JinaBertModel", "NomicMoeModel"})
"""Their classes without a head."""
