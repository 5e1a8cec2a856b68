"""Late interaction (ColBERT) folders, in their three layouts.

The layouts are PyLate's, that of sentence-transformers' MultiVectorEncoder, and ColBERT's original one. The original
has its projection among the transformer's weights and its settings in `artifact.metadata`. The three have the same
settings under different names. A missing setting has the default of sentence-transformers.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.card import Role
from staged_pool.runtime.models.folders.common_files import (
    expect_level,
    read_body_config,
    read_chain,
    read_dense,
    read_prompts,
    read_transformer_settings,
    required,
)
from staged_pool.runtime.models.folders.query_expansion import (
    DEFAULT_QUERY_TOKENS,
    MOST_EXPANDED,
    PREFIXES,
    QueryExpansion,
    read_expansion,
)
from staged_pool.runtime.models.folders.transformer_settings import check_modalities
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.layers import Projection
from staged_pool.runtime.models.specs.model import HeadModule, ModelFolder, MultiVectorSpec, Normalize, RoleSettings
from staged_pool.stages.errors import ConfigError

_ORIGINAL: Final = "HF_ColBERT"
"""The class in `architectures` of the original layout."""

_PUNCTUATION: Final = tuple(string.punctuation)


@dataclass(frozen=True, slots=True)
class _Mask:
    """Tokens whose vectors are dropped, and the roles for which they are."""

    words: tuple[str, ...]
    roles: tuple[str, ...] = ("document",)


def is_multi_vector(path: Path, modules: JsonFile | None, settings: JsonFile) -> bool:
    """True for the folder of a late interaction model."""
    kind = settings.get("model_type", str, None)
    if kind is not None:
        return kind in ("MultiVectorEncoder", "ColBERT")
    if modules is None:
        config = JsonFile.read(path / "config.json", root=path) or JsonFile.empty()
        return _ORIGINAL in config.get("architectures", list, [])
    kinds = [str(entry.get("type")) for entry in modules.content if isinstance(entry, dict)]
    if any(kind.endswith(".Pooling") for kind in kinds):
        return False
    return any(kind.startswith("pylate.") for kind in kinds) or any(name in settings.content for name in PREFIXES)


def read_multi_vector_folder(path: Path, modules: JsonFile | None, settings: JsonFile) -> ModelFolder:
    """Read the folder of a late interaction model.

    Raises:
        ConfigError: A file is missing or malformed, or a module or setting is not supported; the message names it.
    """
    if modules is None:
        return _original_folder(path)
    chain = read_chain(modules, path)
    if not chain or chain[0][0] != "Transformer":
        raise ConfigError(
            f"modules.json: must begin with a Transformer, but begins with {chain[0][0] if chain else 'nothing'}"
        )
    body = chain[0][1]
    transformer = read_transformer_settings(body, root=path)
    _check_transformer(transformer)
    native = settings.get("model_type", str, None) == "MultiVectorEncoder"
    head, mask = _head(chain[1:], native=native, root=path)
    if not native:
        words = settings.get("skiplist_words", list, None)
        mask = mask or _Mask(_PUNCTUATION if words is None else _words(words, settings.name))
    prompts, default = read_prompts(settings)
    prompts = {"query": default, "document": default, **prompts}
    _check_similarity(settings)
    expansion = read_expansion(transformer, settings)
    query_length = transformer.positive("query_length")
    if query_length is None and (expansion is None or "query_expansion" in settings.content):
        query_length = settings.positive("query_length")
    document_length = transformer.positive("document_length") or settings.positive("document_length")
    longest = transformer.positive("max_seq_length")
    if longest is not None:  # it does not bound the lengths of the roles; only the model's positions do
        longest = max(longest, query_length or 0, document_length or 0, expansion.length if expansion else 0)
    return ModelFolder(
        path=path,
        body=body,
        config=read_body_config(body, root=path),
        heads=(MultiVectorSpec(modules=head),),
        scoring="late-interaction",
        max_seq_length=longest,
        lower_case=transformer.get("do_lower_case", bool, False),
        prompts=prompts,
        default_prompt=prompts["document"],
        roles=_roles(
            markers=(settings.get("query_prefix", str, ""), settings.get("document_prefix", str, "")),
            lengths=(query_length, document_length),
            expansion=expansion,
            mask=mask,
        ),
    )


def _original_folder(path: Path) -> ModelFolder:
    """Read ColBERT's original layout."""
    file = JsonFile.read(path / "artifact.metadata", root=path)
    settings = file or JsonFile.empty()
    similarity = settings.get("similarity", str, "cosine")
    if similarity != "cosine":
        raise ConfigError(f"{settings.name}: similarity={similarity!r} is not supported, only cosine")
    expansion = QueryExpansion(
        settings.positive("query_maxlen", MOST_EXPANDED) or DEFAULT_QUERY_TOKENS,
        fixed=True,
        attend=settings.get("attend_to_mask_tokens", bool, False),
    )
    projection = Projection(
        files=(path / "model.safetensors", path / "pytorch_model.bin"), weight="linear.weight", bias=None
    )
    return ModelFolder(
        path=path,
        body=path,
        config=read_body_config(path, root=path),
        heads=(MultiVectorSpec(modules=(projection,)),),
        scoring="late-interaction",
        prompts={},
        roles=_roles(
            markers=(
                settings.get("query_token_id", str, "[unused0]"),
                settings.get("doc_token_id", str, "[unused1]"),
            ),
            lengths=(None, settings.positive("doc_maxlen")),
            expansion=expansion,
            mask=_Mask(_PUNCTUATION if settings.get("mask_punctuation", bool, True) else ()),
        ),
        notes=() if file else ("no artifact.metadata: the usual markers and lengths of ColBERT are assumed",),
    )


def _check_transformer(file: JsonFile) -> None:
    task = file.get("transformer_task", str, "feature-extraction")
    if task != "feature-extraction":
        raise ConfigError(f"{file.name}: transformer_task={task!r} is not supported, only feature-extraction")
    if file.get("processing_kwargs", dict, {}):
        raise ConfigError(f"{file.name}: processing_kwargs is not supported")
    check_modalities(file, output="last_hidden_state")


def _check_similarity(settings: JsonFile) -> None:
    """Reject any similarity but maxsim.

    `cosine` and `dot` have no effect: they remain in models that were trained from embedding models.
    """
    name = settings.get("similarity_fn_name", str, "maxsim")
    if name.lower() not in ("maxsim", "cosine", "dot"):
        raise ConfigError(f"{settings.name}: similarity_fn_name={name!r} is not supported, only maxsim")


def _head(chain: list[tuple[str, Path]], *, native: bool, root: Path) -> tuple[tuple[HeadModule, ...], _Mask | None]:
    """Read the modules after the transformer, and the mask.

    PyLate lists neither the mask nor the normalisation, but always applies both.

    Returns:
        The modules without the normalisation at the end, and the tokens whose vectors are dropped.
    """
    head: list[HeadModule] = []
    mask: _Mask | None = None
    for name, folder in chain:
        if name == "Dense":
            head.append(read_dense(folder, root=root, level="token_embeddings"))
        elif name == "Normalize":
            file = JsonFile.read(folder / "config.json", root=root) or JsonFile.empty()
            expect_level(file, "token_embeddings", default="sentence_embedding")
            head.append(Normalize())
        elif name == "MultiVectorMask":
            mask = _mask(required(folder / "config.json", root=root))
        else:
            raise ConfigError(f"modules.json: module {name} is not supported in a late interaction model")
    normalizes = not native
    while head and isinstance(head[-1], Normalize):
        head.pop()
        normalizes = True
    if not normalizes:
        raise ConfigError("modules.json: the last module of a late interaction model must be a Normalize")
    return tuple(head), mask


def _mask(file: JsonFile) -> _Mask:
    if file.get("keep_only_token_ids", list, None):
        raise ConfigError(f"{file.name}: keep_only_token_ids is not supported")
    roles = file.content.get("skiplist_tasks")
    roles = ["document"] if roles is None else [roles] if isinstance(roles, str) else roles
    if not isinstance(roles, list) or not set(roles) <= {"query", "document"}:
        raise ConfigError(f"{file.name}: skiplist_tasks={roles!r} must name query, document or both")
    return _Mask(_words(file.get("skiplist_words", list, []), file.name), tuple(roles))


def _words(words: list[Any], name: str) -> tuple[str, ...]:
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{name}: skiplist_words must be texts")
    return tuple(words)


def _roles(
    *,
    markers: tuple[str, str],
    lengths: tuple[int | None, int | None],
    expansion: QueryExpansion | None,
    mask: _Mask | None,
) -> Mapping[Role, RoleSettings]:
    """Settings of queries and documents; `markers` and `lengths` are (query, document)."""
    skipped: dict[Role, tuple[str, ...]] = {
        "query": mask.words if mask and "query" in mask.roles else (),
        "document": mask.words if mask and "document" in mask.roles else (),
    }
    longest = lengths[0]
    if expansion is not None and (expansion.fixed or longest is not None):
        longest = expansion.length if expansion.fixed else max(longest or 0, expansion.length)
    query = RoleSettings(
        marker=markers[0],
        max_tokens=longest,
        always_cut=expansion is not None and expansion.fixed,
        expand_to=expansion.length if expansion else 0,
        expansion=expansion.token if expansion else None,
        attend_to_expansion=expansion is not None and expansion.attend,
        skipped=skipped["query"],
    )
    document = RoleSettings(marker=markers[1], max_tokens=lengths[1], skipped=skipped["document"])
    return {"query": query, "document": document}
