"""Files around a transformer in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.models.tiny.bodies import WIDTH

MODERN = "sentence_transformers.sentence_transformer.modules"
"""Module path of the newest sentence-transformers, as `modules.json` names it."""


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def edit_json(path: Path, **changes: Any) -> None:
    """Change some fields of a file that is there."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edited(name: str, **values: object) -> Callable[[Path], None]:
    """Return a change of some fields of a file in a folder."""
    return lambda folder: edit_json(folder / name, **values)


def without(name: str) -> Callable[[Path], None]:
    """Return the removal of a file from a folder."""
    return lambda folder: (folder / name).unlink()


def write_modules(
    folder: Path,
    *modules: tuple[str, Mapping[str, Any]],
    body: str = "",
    first: str = "sentence_transformers.models.Transformer",
) -> None:
    """Write `modules.json` for a Transformer in `body` and its successors, with their settings."""
    entries = [{"idx": 0, "name": "0", "path": body, "type": first}]
    for place, (kind, settings) in enumerate(modules, start=1):
        path = f"{place}_{kind.rpartition('.')[2]}"
        full = kind if "." in kind else f"sentence_transformers.models.{kind}"
        entries.append({"idx": place, "name": str(place), "path": path, "type": full})
        if settings:
            write_json(folder / path / "config.json", settings)
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "modules.json", entries)


def write_prompts(folder: Path, prompts: Mapping[str, str], **others: Any) -> None:
    """Write `config_sentence_transformers.json` of an embedding model."""
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            **others,
        },
    )


def pooling_flags(mode: str, **others: Any) -> dict[str, Any]:
    """Return pooling settings as written before sentence-transformers 5.4."""
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens")}
    return {"word_embedding_dimension": WIDTH, **flags, **others}
