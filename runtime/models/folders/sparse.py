"""SPLADE folders: masked language models whose logits are pooled over an input's tokens.

A Router may send queries another way: the weights of their tokens are looked up, and nothing is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast, get_args

from staged_pool.runtime.card import Similarity
from staged_pool.runtime.models.folders.common_files import (
    read_body_config,
    read_chain,
    read_prompts,
    read_similarity,
    read_transformer_settings,
    required,
)
from staged_pool.runtime.models.folders.transformer_settings import check_modalities
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import ModelFolder, SpladeActivation, SpladePooling, SpladeSpec
from staged_pool.stages.errors import ConfigError

_SIMILARITIES: Final[tuple[Similarity, ...]] = ("dot", "cosine")


def read_sparse_folder(path: Path, modules: JsonFile | None, settings: JsonFile) -> ModelFolder:
    """Read a SparseEncoder of sentence-transformers, or a masked language model without modules.

    Raises:
        ConfigError: A file is missing or malformed, or a module or setting is not supported; the message names it.
    """
    if modules is None:
        body, spec, is_old = path, SpladeSpec(), True
        notes: tuple[str, ...] = ("no modules.json: the maximum of log(1 + relu(logits)) is assumed, as in SPLADE",)
    else:
        routes = _routes(read_chain(modules, path), path)
        body, spec = _chain(routes.document, path, queries=routes.queries)
        is_old = routes.document[0][0] == "MLMTransformer"
        notes = ()
    config = read_body_config(body, root=path)
    architectures = JsonFile("config.json", config).get("architectures", list, [])
    if not any(str(name).endswith("ForMaskedLM") for name in architectures):
        raise ConfigError(
            f"config.json: architectures={architectures!r} is not a masked language model, which SPLADE needs"
        )
    transformer = read_transformer_settings(body, root=path)
    _check_transformer(transformer, is_old=is_old)
    similarity = read_similarity(settings) or "dot"
    if similarity not in _SIMILARITIES:
        raise ConfigError(f"{settings.name}: similarity_fn_name={similarity!r} is not supported for sparse vectors")
    prompts, prompt = read_prompts(settings)
    return ModelFolder(
        path=path,
        body=body,
        config=config,
        architecture="masked language model",
        heads=(replace(spec, max_active_dims=settings.positive("max_active_dims")),),
        scoring="sparse",
        similarity=similarity,
        max_seq_length=transformer.positive("max_seq_length"),
        lower_case=transformer.get("do_lower_case", bool, False),
        prompts=prompts,
        default_prompt=prompt,
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Routes:
    """The ways of an input through a sparse model."""

    document: list[tuple[str, Path]]
    """Modules for documents, by name and folder."""
    queries: Path | None = None
    """Folder of the static weights for queries. None: they go the way of documents."""


def _routes(chain: list[tuple[str, Path]], path: Path) -> _Routes:
    """Read the ways of queries and documents: those of a Router, or the chain for both.

    Raises:
        ConfigError: The Router has other routes than `query` with static weights and `document`.
    """
    if [name for name, _ in chain] != ["Router"]:
        return _Routes(chain)
    folder = chain[0][1]
    file = JsonFile.read(folder / "router_config.json", root=path) or required(folder / "config.json", root=path)
    types, structure = file.get("types", dict, {}), file.get("structure", dict, {})
    parameters = JsonFile(f"{file.name}: parameters", file.get("parameters", dict, {}))
    if set(structure) != {"query", "document"} or parameters.get("route_mappings", dict, None):
        raise ConfigError(f"{file.name}: the routes {sorted(structure)} are not supported, only query and document")
    if parameters.get("default_route", str, None) not in (None, "document"):
        raise ConfigError(f"{file.name}: default_route must be document, for inputs of no role")
    found = {}
    for route, names in structure.items():
        entries = [{"type": types.get(name), "path": str((folder / name).relative_to(path))} for name in names]
        found[route] = read_chain(JsonFile(f"{file.name}: {route}", entries), path)
    (query, *more) = found["query"] or [("nothing", path)]
    if query[0] not in ("SparseStaticEmbedding", "IDF") or more:
        raise ConfigError(f"{file.name}: the query route must be one SparseStaticEmbedding, but begins with {query[0]}")
    return _Routes(found["document"], query[1])


def _chain(chain: list[tuple[str, Path]], path: Path, *, queries: Path | None) -> tuple[Path, SpladeSpec]:
    """Read the chain of a SPLADE model: the transformer's folder, and the pooling."""
    names = [name for name, _ in chain]
    if len(chain) != 2 or names[0] not in ("Transformer", "MLMTransformer") or names[1] != "SpladePooling":
        raise ConfigError(
            "modules.json: a sparse model must be a Transformer followed by a SpladePooling, but the chain is "
            f"{' -> '.join(names) or 'empty'}"
        )
    file = required(chain[1][1] / "config.json", root=path)
    pooling = file.get("pooling_strategy", str, "max")
    activation = file.get("activation_function", str, "relu")
    for field, value, known in (
        ("pooling_strategy", pooling, get_args(SpladePooling)),
        ("activation_function", activation, get_args(SpladeActivation)),
    ):
        if value not in known:
            raise ConfigError(f"{file.name}: {field}={value!r} is not known, only {', '.join(known)}")
    spec = SpladeSpec(
        pooling=cast("SpladePooling", pooling), activation=cast("SpladeActivation", activation), queries=queries
    )
    return chain[0][1], spec


def _check_transformer(file: JsonFile, *, is_old: bool) -> None:
    """Reject unsupported settings. The old MLMTransformer implies its task; the new Transformer must name it."""
    task = file.get("transformer_task", str, "fill-mask" if is_old else "feature-extraction")
    if task != "fill-mask":
        raise ConfigError(f"{file.name or 'sentence_bert_config.json'}: transformer_task={task!r} must be fill-mask")
    if file.get("processing_kwargs", dict, {}):
        raise ConfigError(f"{file.name}: processing_kwargs is not supported")
    check_modalities(file, output="logits")
