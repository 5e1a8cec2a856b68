"""Folders of static token vectors: StaticEmbedding of sentence-transformers, and model2vec.

Such a model has no transformer. The vector of a text is the mean of its tokens' rows in a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from staged_pool.runtime.models.folders.common_files import (
    read_chain,
    read_matryoshka,
    read_prompts,
    read_similarity,
)
from staged_pool.runtime.models.folders.foreign_formats import WEIGHT_FILES
from staged_pool.runtime.models.folders.pooling_modules import read_head
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import DenseSpec, HeadModule, ModelFolder
from staged_pool.stages.errors import ConfigError

STATIC_MODEL: Final = "staged-pool-static"
"""`model_type` of the config of a model without a transformer."""


def is_static(path: Path, modules: JsonFile | None) -> bool:
    """True for a folder of static token vectors: by its first module, or as model2vec's `config.json` says."""
    if modules is not None:
        chain = read_chain(modules, path)
        return bool(chain) and chain[0][0] == "StaticEmbedding"
    config = JsonFile.read(path / "config.json", root=path) or JsonFile.empty()
    return config.content.get("model_type") == "model2vec" or "StaticModel" in config.get("architectures", list, [])


def read_static_folder(path: Path, modules: JsonFile | None, settings: JsonFile) -> ModelFolder:
    """Read a StaticEmbedding with its modules, or a folder of model2vec without `modules.json`.

    Raises:
        ConfigError: A file is missing or malformed, or a module is not supported; the message names it.
    """
    body, head = path, tuple[HeadModule, ...]()
    config = JsonFile.read(path / "config.json", root=path) or JsonFile.empty()
    if modules is None:
        normalize = config.get("normalize", bool, False)
    else:
        chain = read_chain(modules, path)
        body = chain[0][1]
        head, normalize = read_head(chain[1:], root=path)
    if not any((body / name).is_file() for name in WEIGHT_FILES):
        raise ConfigError(f"{body}: no weights, neither model.safetensors nor pytorch_model.bin")
    prompts, prompt = read_prompts(settings)
    return ModelFolder(
        path=path,
        body=body,
        config={"model_type": STATIC_MODEL},
        architecture="static embedding",
        heads=(
            DenseSpec(
                pooling=("mean",), modules=head, normalize=normalize, truncate_dim=settings.positive("truncate_dim")
            ),
        ),
        similarity=read_similarity(settings),
        **read_matryoshka(path, config.content, settings),
        prompts=prompts,
        default_prompt=prompt,
    )
