"""Readers of the settings files that most model folders have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from staged_pool.runtime.card import Similarity
from staged_pool.runtime.models.folders.bidirectional import with_bidirectional_config
from staged_pool.runtime.models.folders.embedding_gemma import with_gemma_text_config
from staged_pool.runtime.models.folders.foreign_formats import (
    WEIGHT_FILES,
    check_quantization,
    describe_unreadable_weights,
    file_names,
)
from staged_pool.runtime.models.folders.gte import with_native_config
from staged_pool.runtime.models.folders.jina_bert import with_jina_config
from staged_pool.runtime.models.folders.jina_tasks import CUSTOM, has_tasks, with_task_config
from staged_pool.runtime.models.folders.nomic import with_nomic_config
from staged_pool.runtime.models.folders.readme import trained_with_matryoshka
from staged_pool.runtime.models.folders.xlm_flash import with_flash_config
from staged_pool.runtime.models.specs.inner_path import leads_out
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import Dense
from staged_pool.stages.errors import ConfigError

Level: TypeAlias = Literal["sentence_embedding", "token_embeddings"]
"""Input and output of a module in sentence-transformers' terms: one vector per input, or one per token."""

_TRANSFORMER_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def read_similarity(settings: JsonFile) -> Similarity | None:
    """The folder's similarity function. None: not set."""
    name = settings.get("similarity_fn_name", str, None)
    if name is not None and name not in get_args(Similarity):
        known = ", ".join(get_args(Similarity))
        raise ConfigError(f"{settings.name}: similarity_fn_name={name!r} is not known, only {known}")
    return cast("Similarity | None", name)


def read_chain(modules: JsonFile, path: Path) -> list[tuple[str, Path]]:
    """Read the chain of modules: the class name and the folder of each, in order.

    Dropout is left out: it has no effect on inference.

    Raises:
        ConfigError: An entry is malformed, leads out of the folder, or is the folder's own code.
    """
    chain = []
    for place, entry in enumerate(modules.content):
        module = JsonFile(f"{modules.name}[{place}]", entry)
        if not isinstance(entry, dict):
            raise ConfigError(f"{module.name}: must be an object")
        kind, folder = module.get("type", str, None), module.get("path", str, "")
        if kind is None:
            raise ConfigError(f"{module.name}: type is missing")
        if leads_out(folder):
            raise ConfigError(f"{module.name}: path={folder!r} leads out of the model folder")
        name = kind.rpartition(".")[2]
        published = kind == CUSTOM and not place and has_tasks(path / folder)
        if not kind.startswith(("sentence_transformers.", "pylate.")) and not published:
            raise ConfigError(f"{module.name}: module {kind} is the folder's own code, which is never run")
        if name != "Dropout":
            chain.append((name, path / folder))
    return chain


def read_dense(
    folder: Path, *, root: Path, level: Level = "sentence_embedding", output: Level | Literal["scores"] | None = None
) -> Dense:
    """Read a Dense module.

    Args:
        folder: The folder of the module.
        root: The model folder.
        level: Its input.
        output: Its output. None: the same.

    Raises:
        ConfigError: A field is malformed, or the module has another input or output.
    """
    file = required(folder / "config.json", root=root)
    expect_level(file, level, output=output)
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
    """Read all prompts by name, and the default prompt (empty: there is none)."""
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
    """Read the transformer's config, after a check that its weights exist and are not quantised.

    Raises:
        ConfigError: `config.json` or the weights are missing or not supported.
    """
    config = required(body / "config.json", root=root)
    check_quantization(config.content, body)
    if not any((body / name).is_file() for name in WEIGHT_FILES):
        cause = describe_unreadable_weights(file_names(body))
        found = f": found {cause}" if cause else ""
        raise ConfigError(
            f"{body}: no weights, neither model.safetensors nor pytorch_model.bin (nor their index){found}"
        )
    content: Mapping[str, Any] = config.content
    content = with_jina_config(with_bidirectional_config(with_native_config(content)), body)
    return with_gemma_text_config(with_nomic_config(with_task_config(with_flash_config(content))))


def read_transformer_settings(body: Path, *, root: Path) -> JsonFile:
    """Read `sentence_bert_config.json` or the same file under an older name; empty if there is none."""
    for name in _TRANSFORMER_FILES:
        if (file := JsonFile.read(body / name, root=root)) is not None:
            return file
    return JsonFile.empty()


def read_matryoshka(path: Path, config: Mapping[str, Any], settings: JsonFile) -> dict[str, Any]:
    """Read the fields `matryoshka` and `dimensions` of `ModelFolder`.

    The sources are `is_matryoshka` and `matryoshka_dimensions` in `config.json`, the tags of the model card, and
    `truncate_dim`: a model that truncates its vectors was trained for it.
    """
    file = JsonFile("config.json", config)
    dimensions = file.get("matryoshka_dimensions", list, [])
    if not all(isinstance(width, int) and width > 0 for width in dimensions):
        raise ConfigError(f"config.json: matryoshka_dimensions={dimensions!r} must be whole numbers above 0")
    truncates = settings.positive("truncate_dim") is not None
    declared = file.get("is_matryoshka", bool, False) or bool(dimensions)
    matryoshka = declared or truncates or trained_with_matryoshka(path)
    return {"matryoshka": matryoshka, "dimensions": tuple(sorted(dimensions))}


def expect_level(
    file: JsonFile, level: Level, *, default: Level | None = None, output: Level | Literal["scores"] | None = None
) -> None:
    """Reject a module whose input or output is not `level`; unset fields have `default`, else `level`.

    `output` is the wanted output, if it is another one.
    """
    for field, wanted in (("module_input_name", level), ("module_output_name", output or level)):
        value = file.get(field, str, None) or default or level
        if value != wanted:
            raise ConfigError(f"{file.name}: {field}={value!r} is not supported, only {wanted}")


def required(path: Path, *, root: Path) -> JsonFile:
    """Read a file that the folder must have.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    if (file := JsonFile.read(path, root=root)) is None:
        raise ConfigError(f"{root}: no {path.relative_to(root)}, so this is not a complete model folder")
    return file
