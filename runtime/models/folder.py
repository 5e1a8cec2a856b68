"""Read what a model folder says about itself: its settings, no weights and no code of its own.

A folder of sentence-transformers is a chain of modules: a transformer, a pooling, and what follows the pooling. What is
not understood is refused by name, because a module that is left out gives vectors that look right and are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast, get_args

from staged_pool.runtime.config import Task
from staged_pool.runtime.model import Similarity
from staged_pool.runtime.models import classifier_folder
from staged_pool.runtime.models.json_file import JsonFile
from staged_pool.runtime.models.readme import trained_for_shorter_vectors
from staged_pool.runtime.models.specs import (
    Dense,
    DenseSpec,
    HeadModule,
    LayerNorm,
    ModelFolder,
    Normalize,
    PoolingMode,
)
from staged_pool.runtime.models.transformer_settings import read_max_seq_length
from staged_pool.stages.errors import ConfigError

_POOLING_MODES: Final[tuple[PoolingMode, ...]] = get_args(PoolingMode)

_POOLING_FLAGS: Final[Mapping[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How older folders name the modes, in the order in which several are concatenated."""

_TRANSFORMER_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

_SAFE_WEIGHT_FILES: Final = ("model.safetensors", "model.safetensors.index.json")

_WEIGHT_FILES: Final = (*_SAFE_WEIGHT_FILES, "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_folder(
    path: Path, *, task: Task = "auto", score_template: str | None = None, allow_pickle: bool = False
) -> ModelFolder:
    """Read the folder of a model.

    Args:
        path: The folder.
        task: See `EngineConfig`.
        score_template: See `EngineConfig`.
        allow_pickle: See `EngineConfig`.

    Raises:
        ConfigError: A file is missing or malformed (named with its field), a module is not known, or the
            folder is a model of another kind.
    """
    folder = _read(path, task, score_template)
    if task == "score" and folder.scoring is None:
        raise ConfigError(f"task='score': {path.name} has {len(folder.labels)} labels, and a score is one number")
    if score_template is not None and folder.pair_template is None:
        raise ConfigError("score_template='...': this model does not read a query and a document together")
    if not (allow_pickle or any((folder.body / name).is_file() for name in _SAFE_WEIGHT_FILES)):
        raise ConfigError(
            f"{folder.body}: the weights are pickled (pytorch_model.bin), and loading those may run code that is in "
            "them: convert them to model.safetensors, or set allow_pickle (--allow-pickle) if you trust them"
        )
    return folder


def _read(path: Path, task: Task, score_template: str | None) -> ModelFolder:
    modules_file = JsonFile.read(path / "modules.json", root=path, kind=list)
    settings = JsonFile.read(path / "config_sentence_transformers.json", root=path) or JsonFile.empty()
    kind = settings.get("model_type", str, "SentenceTransformer")
    if kind == "CrossEncoder" or (modules_file is None and _gives_labels(path, task)):
        chain = [("Transformer", path)] if modules_file is None else _chain(modules_file, path)
        return _label_folder(path, chain, settings, score_template)
    if kind != "SentenceTransformer":
        raise ConfigError(f"{path}: this is a {kind}, not a model that gives one vector for each text")

    if modules_file is None:
        return _plain_folder(path, settings)

    chain = _chain(modules_file, path)
    if not chain or chain[0][0] != "Transformer":
        first = chain[0][0] if chain else "nothing"
        raise ConfigError(f"modules.json: must begin with a Transformer, begins with {first}")
    body = chain[0][1]
    config = _body_config(body, root=path)
    transformer = _transformer_settings(body, root=path)
    if transformer.get("transformer_task", str, "feature-extraction") != "feature-extraction":
        raise ConfigError(f"{transformer.name}: transformer_task must be feature-extraction for embeddings")
    if transformer.get("processing_kwargs", dict, {}):
        raise ConfigError(f"{transformer.name}: processing_kwargs is not supported")
    if len(chain) < 2 or chain[1][0] != "Pooling":
        raise ConfigError(
            f"modules.json: the Transformer must be followed by a Pooling, the chain is "
            f"{' -> '.join(name for name, _ in chain)}"
        )
    pooling_file = _required(chain[1][1] / "config.json", root=path)
    modules, normalize = _head(chain[2:], root=path)
    prompts, prompt = _prompts(settings)
    return ModelFolder(
        path=path,
        body=body,
        config=config,
        heads=(
            DenseSpec(
                pooling=_pooling_modes(pooling_file),
                modules=modules,
                normalize=normalize,
                pools_prompt=pooling_file.get("include_prompt", bool, True),
                truncate_dim=settings.positive("truncate_dim"),
            ),
        ),
        similarity=_similarity(settings),
        **_matryoshka(path, config, settings),
        max_seq_length=read_max_seq_length(transformer),
        lower_case=transformer.get("do_lower_case", bool, False),
        prompts=prompts,
        default_prompt=prompt,
    )


def _plain_folder(path: Path, settings: JsonFile) -> ModelFolder:
    """A transformer without `modules.json`: read as sentence-transformers reads it (mean, not normalised)."""
    config = _body_config(path, root=path)
    architectures = config.get("architectures") or [""]
    causal = str(architectures[0]).endswith("ForCausalLM") and config.get("is_causal", True)
    mode: PoolingMode = "lasttoken" if causal else "mean"
    prompts, prompt = _prompts(settings)
    return ModelFolder(
        path=path,
        body=path,
        config=config,
        heads=(
            DenseSpec(pooling=(mode,), modules=(), normalize=False, truncate_dim=settings.positive("truncate_dim")),
        ),
        similarity=_similarity(settings),
        **_matryoshka(path, config, settings),
        prompts=prompts,
        default_prompt=prompt,
        notes=(f"no modules.json: {mode} pooling without normalisation is assumed",),
    )


def _gives_labels(path: Path, task: Task) -> bool:
    """Whether a transformer without `modules.json` is to be read as a model that gives labels."""
    config = _body_config(path, root=path)
    asked = task == "score" and classifier_folder.class_name(config).endswith("ForCausalLM")
    return asked or (task != "embed" and classifier_folder.classifier(config) is not None)


def _label_folder(
    path: Path, chain: list[tuple[str, Path]], settings: JsonFile, score_template: str | None
) -> ModelFolder:
    """A model that gives labels: a transformer with its own head, or a language model whose answer is read."""
    names = [name for name, _ in chain]
    if names not in (["Transformer"], ["Transformer", "LogitScore"]):
        raise ConfigError(f"modules.json: {' -> '.join(names) or 'nothing'} is not a cross-encoder that is known")
    body = chain[0][1]
    config = _body_config(body, root=path)
    transformer = _transformer_settings(body, root=path)
    prompts, prompt = _prompts(settings)
    kind = classifier_folder.classifier(config)
    if len(chain) > 1:
        score = _required(chain[1][1] / "config.json", root=path)
        labelling = classifier_folder.read_logit_score(
            config, settings, transformer, score, instruction=prompt, score_template=score_template
        )
        prompt = ""  # it is the instruction
    elif kind is not None:
        labelling = classifier_folder.read_classifier(
            kind, config, settings, transformer, score_template=score_template
        )
    elif classifier_folder.class_name(config).endswith("ForCausalLM"):
        labelling = classifier_folder.asked_language_model(score_template=score_template)
    else:
        name = classifier_folder.class_name(config) or "no class"
        raise ConfigError(f"config.json: architectures names {name}, which has no head that gives labels")
    return ModelFolder(
        path=path,
        body=body,
        config=config,
        **labelling.fields(),
        max_seq_length=transformer.positive("max_seq_length"),
        lower_case=transformer.get("do_lower_case", bool, False),
        prompts=prompts,
        default_prompt=prompt,
    )


def _similarity(settings: JsonFile) -> Similarity | None:
    name = settings.get("similarity_fn_name", str, None)
    if name is not None and name not in get_args(Similarity):
        known = ", ".join(get_args(Similarity))
        raise ConfigError(f"{settings.name}: similarity_fn_name={name!r} is not known, only {known}")
    return cast("Similarity | None", name)


def _matryoshka(path: Path, config: Mapping[str, Any], settings: JsonFile) -> dict[str, Any]:
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


def _chain(modules: JsonFile, path: Path) -> list[tuple[str, Path]]:
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


def _head(chain: list[tuple[str, Path]], *, root: Path) -> tuple[tuple[HeadModule, ...], bool]:
    """What follows the pooling, and whether the chain ends by normalising (left to postprocess)."""
    head: list[HeadModule] = []
    for name, folder in chain:
        if name == "Normalize":
            settings = JsonFile.read(folder / "config.json", root=root) or JsonFile.empty()
            _refuse_token_level(settings)
            head.append(Normalize())
        elif name == "Dense":
            head.append(_dense(folder, root=root))
        elif name == "LayerNorm":
            file = _required(folder / "config.json", root=root)
            head.append(LayerNorm(folder=folder, dimension=file.size("dimension")))
        else:
            raise ConfigError(f"modules.json: module {name} is not supported after the pooling")
    normalize = False
    while head and isinstance(head[-1], Normalize):
        head.pop()
        normalize = True
    return tuple(head), normalize


def _dense(folder: Path, *, root: Path) -> Dense:
    file = _required(folder / "config.json", root=root)
    _refuse_token_level(file)
    activation = file.get("activation_function", str, "torch.nn.modules.activation.Tanh")
    if not activation.startswith("torch.nn.modules."):
        raise ConfigError(f"{file.name}: activation_function={activation!r} is not one of torch.nn")
    return Dense(
        folder=folder,
        in_features=file.size("in_features"),
        out_features=file.size("out_features"),
        bias=file.get("bias", bool, True),
        activation=activation.rpartition(".")[2],
        residual=file.get("use_residual", bool, False),
    )


def _refuse_token_level(file: JsonFile) -> None:
    for field in ("module_input_name", "module_output_name"):
        value = file.get(field, str, None) or "sentence_embedding"
        if value != "sentence_embedding":
            raise ConfigError(f"{file.name}: {field}={value!r} is not supported, only sentence_embedding")


def _pooling_modes(file: JsonFile) -> tuple[PoolingMode, ...]:
    """The modes of a pooling's config, which are one name, a list of names, or one flag for each mode."""
    named = file.content.get("pooling_mode")
    if named is None:
        unknown = [n for n in file.content if n.startswith("pooling_mode_") and n not in _POOLING_FLAGS]
        if wrong := [n for n in unknown if file.content[n]]:
            raise ConfigError(f"{file.name}: {wrong[0]} is not known, only {', '.join(_POOLING_FLAGS)}")
        return tuple(m for flag, m in _POOLING_FLAGS.items() if file.get(flag, bool, False)) or ("mean",)
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{file.name}: pooling_mode={named!r} must be a name or a list of names")
    modes = []
    for name in names:
        if name not in _POOLING_MODES:
            raise ConfigError(f"{file.name}: pooling_mode={name!r} is not known, only {', '.join(_POOLING_MODES)}")
        modes.append(name)
    return tuple(modes)


def _prompts(settings: JsonFile) -> tuple[Mapping[str, str], str]:
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


def _body_config(body: Path, *, root: Path) -> Mapping[str, Any]:
    """The transformer's config. That its weights are there is checked here too, before anything is built."""
    config = _required(body / "config.json", root=root)
    if not any((body / name).is_file() for name in _WEIGHT_FILES):
        raise ConfigError(f"{body}: no weights, neither model.safetensors nor pytorch_model.bin (nor their index)")
    content: Mapping[str, Any] = config.content
    return content


def _transformer_settings(body: Path, *, root: Path) -> JsonFile:
    for name in _TRANSFORMER_FILES:
        if (file := JsonFile.read(body / name, root=root)) is not None:
            return file
    return JsonFile.empty()


def _required(path: Path, *, root: Path) -> JsonFile:
    if (file := JsonFile.read(path, root=root)) is None:
        raise ConfigError(f"{root}: no {path.relative_to(root)}, so this is not a complete model folder")
    return file
