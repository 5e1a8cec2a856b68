"""Names of the transformers that have a class of their own here."""

from __future__ import annotations

from typing import Final

JINA_BERT: Final = "jina_bert"
"""`model_type` of JinaBERT."""
OWN_TYPES: Final = frozenset({JINA_BERT})
"""Each `model_type` with a class in `runtime/models/architectures/`."""
HEADLESS: Final = frozenset({"JinaBertModel"})
"""Their classes without a head."""
