"""Reader of a model folder's settings: no weights are loaded and none of its code runs.

A sentence-transformers folder is a chain of modules: a transformer, a pooling, and modules after the pooling. A module
that is not supported is rejected by name: without it, vectors would look right and be wrong.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from staged_pool.runtime.config import Task
from staged_pool.runtime.models.folders import classifier
from staged_pool.runtime.models.folders.bge_m3 import has_bge_m3_heads, with_bge_m3_heads
from staged_pool.runtime.models.folders.bidirectional import (
    is_bidirectional_reranker,
    own_pooling,
    with_own_projection,
)
from staged_pool.runtime.models.folders.bidirectional_reranker import read_bidirectional_reranker
from staged_pool.runtime.models.folders.chat_pairs import chat_template, pair_template
from staged_pool.runtime.models.folders.common_files import (
    read_body_config,
    read_chain,
    read_matryoshka,
    read_prompts,
    read_similarity,
    read_transformer_settings,
    required,
)
from staged_pool.runtime.models.folders.embedding_gemma import with_gemma_note
from staged_pool.runtime.models.folders.foreign_formats import MODULES, check_layout
from staged_pool.runtime.models.folders.gte import gives_token_weights, is_gte, with_token_weights
from staged_pool.runtime.models.folders.image_rerankers import (
    is_image_reranker,
    is_jina_m0,
    read_jina_m0,
    with_images_in_pairs,
    with_media_texts,
)
from staged_pool.runtime.models.folders.images import is_image_folder, read_image_folder
from staged_pool.runtime.models.folders.jina_tasks import has_only_own_module, task_pooling, with_task_adapters
from staged_pool.runtime.models.folders.llm_rerankers import missing_question_note, read_llm_reranker, with_user_tokens
from staged_pool.runtime.models.folders.multi_vector import is_multi_vector, read_multi_vector_folder
from staged_pool.runtime.models.folders.pooling_modules import read_head, read_pooling_modes
from staged_pool.runtime.models.folders.readme import is_embedding_model
from staged_pool.runtime.models.folders.reranker_families import INSTRUCTION, find_family, reject_unsupported
from staged_pool.runtime.models.folders.reward_models import is_reward_model, read_reward_model
from staged_pool.runtime.models.folders.sparse import read_sparse_folder
from staged_pool.runtime.models.folders.static import is_static, read_static_folder
from staged_pool.runtime.models.folders.transformer_settings import check_modalities, read_max_seq_length
from staged_pool.runtime.models.folders.unread_files import check_unread_files
from staged_pool.runtime.models.folders.vision_embedders import VISION_CHAT_MODELS, read_embedder
from staged_pool.runtime.models.folders.vision_language import (
    is_page_retriever,
    read_conversation_form,
    read_page_folder,
    with_images,
)
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import (
    DenseSpec,
    LogitScoreSpec,
    ModelFolder,
    PoolingMode,
    SpladeSpec,
    TokenWeightsSpec,
)
from staged_pool.runtime.models.specs.pair_forms import PairTemplate
from staged_pool.runtime.reranking import RerankerPrompt
from staged_pool.stages.errors import ConfigError

_OF_MEDIA: Final = frozenset({"audio", "image", "video"})


def read_folder(
    path: Path, *, task: Task = "auto", score_template: str | None = None, score_tokens: str | None = None
) -> ModelFolder:
    """Read the folder of a model.

    Args:
        path: The folder.
        task: See `EngineConfig`.
        score_template: See `EngineConfig`.
        score_tokens: See `EngineConfig`.

    Raises:
        ConfigError: A file is missing or malformed (the message names it and the field), a module is not
            supported, or the folder's model does not fit `task`.
    """
    check_layout(path)
    asked = RerankerPrompt.of(score_template, score_tokens)
    folder = _read(path, task, asked)
    if task == "embed":
        folder = replace(folder, decided_by="user")
    else:
        check_unread_files(folder)
    if task == "score" and folder.scoring is None:
        raise ConfigError(f"task='score': {path.name} has {len(folder.labels)} labels, but a score needs exactly one")
    if task == "sparse" and not any(isinstance(spec, SpladeSpec | TokenWeightsSpec) for spec in folder.heads):
        raise ConfigError(f"task='sparse': {path.name} is not a model with sparse vectors")
    if score_template is not None and folder.pair_template is None:
        raise ConfigError("score_template='...': this model does not read a query and a document together")
    if "\\n" in (score_template or ""):
        note = "score_template has a backslash followed by n, not a line break: in a shell, write $'...'"
        folder = replace(folder, notes=(*folder.notes, note))
    if score_tokens is not None and not any(isinstance(spec, LogitScoreSpec) for spec in folder.heads):
        raise ConfigError(f"score_tokens={score_tokens!r}: this model is not an LLM reranker")
    return folder


def _read(path: Path, task: Task, asked: RerankerPrompt) -> ModelFolder:
    modules_file = JsonFile.read(path / "modules.json", root=path, kind=list)
    settings = JsonFile.read(path / "config_sentence_transformers.json", root=path) or JsonFile.empty()
    kind = settings.get("model_type", str, "SentenceTransformer")
    _reject_unsupported_model(path)
    if is_image_folder(path, modules_file):
        return read_image_folder(path, modules_file, settings, task)
    if kind == "SentenceTransformer" and is_static(path, modules_file):
        return read_static_folder(path, modules_file, settings)
    if (config := JsonFile.read(path / "config.json", root=path)) is not None and is_jina_m0(config.content):
        return read_jina_m0(path, task)
    if config is not None and modules_file is None and task != "embed" and is_reward_model(config.content):
        return read_reward_model(path)
    if config is not None and modules_file is None and task != "embed" and is_bidirectional_reranker(config.content):
        return read_bidirectional_reranker(path)
    if is_multi_vector(path, modules_file, settings):
        return read_multi_vector_folder(path, modules_file, settings)
    splade = task == "sparse" and modules_file is None and not has_bge_m3_heads(path)
    if kind == "SparseEncoder" or splade:
        return read_sparse_folder(path, modules_file, settings)
    if kind == "CrossEncoder" or (modules_file is None and _is_label_model(path, task, asked)):
        chain = [("Transformer", path)] if modules_file is None else read_chain(modules_file, path)
        return with_images_in_pairs(_label_folder(path, chain, settings, asked, task))
    if kind != "SentenceTransformer":
        raise ConfigError(f"{settings.name}: model_type={kind!r} is not supported")
    if modules_file is None and is_page_retriever(path):
        return read_page_folder(path)
    if modules_file is None and (known := read_embedder(path, read_body_config(path, root=path), settings, task)):
        return known
    if modules_file is None or has_only_own_module(path, modules_file):
        folder = _plain_folder(path, settings)
    else:
        folder = _embedding_folder(path, modules_file, settings)
    folder = with_task_adapters(with_gemma_note(with_own_projection(folder)))
    return with_images(with_token_weights(with_bge_m3_heads(folder)))


def _embedding_folder(path: Path, modules_file: JsonFile, settings: JsonFile) -> ModelFolder:
    """Read a chain of modules that ends in one vector per text."""
    chain = read_chain(modules_file, path)
    if not chain or chain[0][0] != "Transformer":
        first = chain[0][0] if chain else "nothing"
        cause = f": {MODULES[first]}" if first in MODULES else ""
        raise ConfigError(f"modules.json: must begin with a Transformer, but begins with {first}{cause}")
    body = chain[0][1]
    config = read_body_config(body, root=path)
    transformer = read_transformer_settings(body, root=path)
    if transformer.get("transformer_task", str, "feature-extraction") != "feature-extraction":
        raise ConfigError(f"{transformer.name}: transformer_task must be feature-extraction for embeddings")
    conversation = read_conversation_form(config, transformer)
    if conversation is None:
        if set(transformer.get("processing_kwargs", dict, {})) - _OF_MEDIA:  # texts are read here, and nothing else
            raise ConfigError(f"{transformer.name}: processing_kwargs is not supported")
        check_modalities(transformer, output="last_hidden_state")
    if len(chain) < 2 or chain[1][0] != "Pooling":
        raise ConfigError(
            "modules.json: the Transformer must be followed by a Pooling, but the chain is "
            f"{' -> '.join(name for name, _ in chain)}"
        )
    pooling_file = required(chain[1][1] / "config.json", root=path)
    modules, normalize = read_head(chain[2:], root=path)
    prompts, prompt = read_prompts(settings)
    return ModelFolder(
        path=path,
        body=body,
        config=config,
        heads=(
            DenseSpec(
                pooling=read_pooling_modes(pooling_file),
                modules=modules,
                normalize=normalize,
                pools_prompt=pooling_file.get("include_prompt", bool, True),
                truncate_dim=settings.positive("truncate_dim"),
            ),
        ),
        similarity=read_similarity(settings),
        **read_matryoshka(path, config, settings),
        max_seq_length=read_max_seq_length(transformer),
        lower_case=transformer.get("do_lower_case", bool, False),
        prompts=prompts,
        default_prompt=prompt,
        conversation=conversation,
    )


def _plain_folder(path: Path, settings: JsonFile) -> ModelFolder:
    """Read a transformer without `modules.json`: mean pooling, not normalised, as in sentence-transformers.

    Vision-language models, GTE and NVIDIA's decoders follow their authors' own code, which sentence-transformers runs
    for them too.
    """
    config = read_body_config(path, root=path)
    reads_images = config.get("model_type") in VISION_CHAT_MODELS
    causal = classifier.is_causal(config)
    own = own_pooling(required(path / "config.json", root=path)) or task_pooling(path)
    mode: PoolingMode = own or ("lasttoken" if causal or reads_images else "cls" if is_gte(config) else "mean")
    normalize = reads_images or is_gte(config) or own is not None
    how = "with" if normalize else "without"
    own_code = (path / "modules.json").is_file()
    cause = "modules.json names code of its own" if own_code else "no modules.json"
    prompts, prompt = read_prompts(settings)
    return ModelFolder(
        path=path,
        body=path,
        config=config,
        decided_by="folder" if gives_token_weights(config) else "assumed",
        heads=(
            DenseSpec(pooling=(mode,), modules=(), normalize=normalize, truncate_dim=settings.positive("truncate_dim")),
        ),
        similarity=read_similarity(settings),
        **read_matryoshka(path, config, settings),
        prompts=prompts,
        default_prompt=prompt,
        notes=(f"{cause}: {mode} pooling {how} normalisation is assumed",),
    )


def _reject_unsupported_model(path: Path) -> None:
    """Reject a known but unsupported reranker before its folder is taken for another kind."""
    if (config := JsonFile.read(path / "config.json", root=path)) is not None:
        reject_unsupported(path, config.content, classifier.class_name(config.content))


def _is_label_model(path: Path, task: Task, asked: RerankerPrompt) -> bool:
    """True if a folder without `modules.json` is a classifier or reranker.

    Raises:
        ConfigError: It is a language model, and neither the folder nor the user says for which task.
    """
    config = read_body_config(path, root=path)
    if task == "embed":
        return False
    if is_image_reranker(config):
        template = chat_template(path, root=path)
        return task == "score" or bool(asked.tokens) or find_family(path, path, config, template) is not None
    if not classifier.is_language_model(config):
        return classifier.classifier_kind(config) is not None and not gives_token_weights(config)
    if task == "score" or asked.tokens or find_family(path, path, config, chat_template(path, root=path)) is not None:
        return True
    if not classifier.is_causal(config) or is_embedding_model(path) or "embed" in path.resolve().name.lower():
        return False
    from transformers import CONFIG_MAPPING  # imports torch, which processes without a model do not need

    own_code = ""
    if config.get("model_type") not in CONFIG_MAPPING and config.get("auto_map"):
        own_code = (
            f". In each case, auto_map={config['auto_map']!r} asks for the folder's own code, which is not run unless "
            "trust_remote_code (--trust-remote-code) is set"
        )
    raise ConfigError(
        f"config.json: {classifier.class_name(config)} is a language model, and nothing in {path.name} says for which "
        "task. Set task='embed' (--task embed) for vectors by last-token pooling, if it was trained for that. Set "
        "task='score' (--task score) for a reranker, with score_template and score_tokens (--score-template, "
        f"--score-tokens) if its family is not recognised{own_code}"
    )


def _label_folder(
    path: Path, chain: list[tuple[str, Path]], settings: JsonFile, asked: RerankerPrompt, task: Task
) -> ModelFolder:
    """Read a classifier or reranker: a transformer with its own head, or an LLM reranker."""
    names = [name for name, _ in chain]
    is_modular = names[:2] == ["Transformer", "Pooling"] and len(names) > 2 and names[-1] == "Dense"
    if not is_modular and names not in (["Transformer"], ["Transformer", "LogitScore"]):
        chain_text = " -> ".join(names) or "an empty chain"
        raise ConfigError(f"modules.json: {chain_text} is not supported for a cross-encoder")
    body = chain[0][1]
    config = read_body_config(body, root=path)
    transformer = read_transformer_settings(body, root=path)
    prompts, prompt = read_prompts(settings)
    kind = classifier.classifier_kind(config)
    has_logit_score = names[-1] == "LogitScore"
    chat = chat_template(body, root=path)
    template = (
        pair_template(transformer, chat, instruction=(prompt or None) if has_logit_score else None)
        if asked.template is None
        else with_media_texts(PairTemplate(text=asked.template, instruction=prompt or INSTRUCTION), config)
    )
    if has_logit_score:
        score = required(chain[1][1] / "config.json", root=path)
        label_fields = classifier.read_logit_score(config, settings, transformer, score, pair_template=template)
        label_fields = with_user_tokens(label_fields, asked, score.name)
        prompt = ""  # here the default prompt is the instruction, which the template writes
    elif is_modular:
        label_fields = classifier.read_modular_reranker(
            chain, config, settings, transformer, pair_template=template, root=path
        )
    elif kind is not None:
        label_fields = classifier.read_classifier(kind, config, settings, pair_template=template)
        label_fields = replace(label_fields, warnings=missing_question_note(path, body, config, chat, template))
    elif classifier.is_language_model(config) or is_image_reranker(config):
        label_fields = read_llm_reranker(
            path, body, config, asked, chat=chat, pair_template=template, is_reranker=task == "score"
        )
    else:
        name = classifier.class_name(config) or "no class"
        raise ConfigError(f"config.json: architectures names {name}, which has no classification head")
    return ModelFolder(
        path=path,
        body=body,
        config=config,
        **label_fields.as_dict(),
        max_seq_length=transformer.positive("max_seq_length"),
        lower_case=transformer.get("do_lower_case", bool, False),
        prompts=prompts,
        default_prompt=prompt,
    )
