"""Read the files that most model folders have, whatever their models give: settings, no weights and no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from staged_pool.runtime.model import Similarity
from staged_pool.runtime.models.folders.foreign_formats import WEIGHT_FILES, check_quantization, file_names, name_cause
from staged_pool.runtime.models.folders.gte import with_native_config
from staged_pool.runtime.models.folders.readme import trained_for_shorter_vectors
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import Dense
from staged_pool.stages.errors import ConfigError

Level: TypeAlias = Literal["sentence_embedding", "token_embeddings"]
"""What a module works on, as sentence-transformers names it: one vector for each input, or one for each token."""

_TRANSFORMER_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def read_similarity(settings: JsonFile) -> Similarity | None:
    """How the folder wants two vectors to be compared. None: it does not say."""
    name = settings.get("similarity_fn_name", str, None)
    if name is not None and name not in get_args(Similarity):
        known = ", ".join(get_args(Similarity))
        raise ConfigError(f"{settings.name}: similarity_fn_name={name!r} is not known, only {known}")
    return cast("Similarity | None", name)


def read_chain(modules: JsonFile, path: Path) -> list[tuple[str, Path]]:
    """The modules in order: the last part of each one's type, and its folder. Dropout does nothing here."""
    chain = []
    for place, entry in enumerate(modules.content):
        module = JsonFile(f"{modules.name}[{place}]", entry)
        if not isinstance(entry, dict):
            raise ConfigError(f"{module.name}: must be an object")
        kind, folder = module.get("type", str, None), module.get("path", str, "")
        if kind is None:
            raise ConfigError(f"{module.name}: type is missing")
        if not (path / folder).resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"{module.name}: path={folder!r} leads out of the model folder")
        name = kind.rpartition(".")[2]
        if not kind.startswith(("sentence_transformers.", "pylate.")):
            raise ConfigError(f"{module.name}: module {kind} is the folder's own code, which is never run")
        if name != "Dropout":
            chain.append((name, path / folder))
    return chain


def read_dense(folder: Path, *, root: Path, level: Level = "sentence_embedding") -> Dense:
    """A Dense module, which must work on `level`."""
    file = required(folder / "config.json", root=root)
    expect_level(file, level)
    activation = file.get("activation_function", str, "torch.nn.modules.activation.Tanh")
    if not activation.startswith("torch.nn.") or activation.startswith("torch.nn.functional."):
        raise ConfigError(f"{file.name}: activation_function={activation!r} is not a module of torch.nn")
    return Dense(
        folder=folder,
        in_features=file.size("in_features"),
        out_features=file.size("out_features"),
        bias=file.get("bias", bool, True),
        activation=activation.rpartition(".")[2],
        residual=file.get("use_residual", bool, False),
    )


def read_prompts(settings: JsonFile) -> tuple[Mapping[str, str], str]:
    """All prompts by name, and the one that goes before every text."""
    prompts = settings.get("prompts", dict, {})
    for name, text in prompts.items():
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"{settings.name}: prompts[{name!r}] must be a text")
    prompts = {name: text or "" for name, text in prompts.items()}
    default = settings.get("default_prompt_name", str, None)
    if default is not None and default not in prompts:
        raise ConfigError(f"{settings.name}: default_prompt_name={default!r} is not among the prompts")
    return prompts, prompts[default] if default is not None else ""


def read_body_config(body: Path, *, root: Path) -> Mapping[str, Any]:
    """The transformer's config. That its weights are there is checked here too, before anything is built."""
    config = required(body / "config.json", root=root)
    check_quantization(config.content, body)
    if not any((body / name).is_file() for name in WEIGHT_FILES):
        cause = name_cause(file_names(body))
        found = f": found {cause}" if cause else ""
        raise ConfigError(
            f"{body}: no weights, neither model.safetensors nor pytorch_model.bin (nor their index){found}"
        )
    content: Mapping[str, Any] = config.content
    return with_native_config(content)


def read_transformer_settings(body: Path, *, root: Path) -> JsonFile:
    """What sentence-transformers keeps beside the transformer, under one of several names."""
    for name in _TRANSFORMER_FILES:
        if (file := JsonFile.read(body / name, root=root)) is not None:
            return file
    return JsonFile.empty()


def read_matryoshka(path: Path, config: Mapping[str, Any], settings: JsonFile) -> dict[str, Any]:
    """Whether vectors may be cut, and to which widths, as far as the folder says so.

    Folders say it as `is_matryoshka` and `matryoshka_dimensions` in `config.json`, or in the tags of their model card;
    one that cuts vectors by itself was trained for it too.
    """
    file = JsonFile("config.json", config)
    dimensions = file.get("matryoshka_dimensions", list, [])
    if not all(isinstance(width, int) and width > 0 for width in dimensions):
        raise ConfigError(f"config.json: matryoshka_dimensions={dimensions!r} must be whole numbers above 0")
    cuts = settings.positive("truncate_dim") is not None
    said = file.get("is_matryoshka", bool, False) or bool(dimensions) or cuts or trained_for_shorter_vectors(path)
    return {"matryoshka": said, "dimensions": tuple(sorted(dimensions))}


def expect_level(file: JsonFile, level: Level, *, default: Level | None = None) -> None:
    """Refuse a module that works on another level than the place where it stands in the chain."""
    for field in ("module_input_name", "module_output_name"):
        value = file.get(field, str, None) or default or level
        if value != level:
            raise ConfigError(f"{file.name}: {field}={value!r} is not supported, only {level}")


def required(path: Path, *, root: Path) -> JsonFile:
    """A file that the folder must have."""
    if (file := JsonFile.read(path, root=root)) is None:
        raise ConfigError(f"{root}: no {path.relative_to(root)}, so this is not a complete model folder")
    return file
