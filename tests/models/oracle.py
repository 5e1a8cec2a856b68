"""The right answers for a model folder, from sentence-transformers and transformers alone.

Everything is float32 on the CPU, and inputs go through a model one by one, so nothing depends on a batch.
"""

from __future__ import annotations

import functools
import io
import json
import string
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray
from PIL import Image as Pillow
from transformers.models.auto.image_processing_auto import AutoImageProcessor

Array = NDArray[np.float32]
Pair = tuple[str, str]
Role = Literal["query", "document"]
ROLES: tuple[Role, ...] = ("query", "document")

T = TypeVar("T")


def dense(
    folder: Path,
    texts: Sequence[str],
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    dimensions: int | None = None,
) -> Array:
    """Vectors [texts, width]. Truncated ones are normalised again where the folder normalises."""
    model = _sentence_transformer("SentenceTransformer", folder)
    cut = {"truncate_dim": dimensions} if dimensions else {}
    with _quiet():
        rows = [
            model.encode([text], prompt_name=prompt_name, prompt=prompt, show_progress_bar=False, **cut)
            for text in texts
        ]
    vectors: Array = np.concatenate(rows)
    if type(model[-1]).__name__ == "Normalize":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def sparse(
    folder: Path, texts: Sequence[str], *, prompt_name: str | None = None, max_active_dims: int | None = None
) -> list[dict[int, float]]:
    """The weights above zero, by number of token. Those of BGE-M3 are never cut."""
    if (folder / "sparse_linear.pt").exists():
        return [_bge_m3_weights(folder, text) for text in texts]
    model = _sentence_transformer("SparseEncoder", folder)
    found = []
    for text in texts:
        with _quiet():
            row = model.encode(
                [text],
                prompt_name=prompt_name,
                max_active_dims=max_active_dims,
                convert_to_sparse_tensor=False,
                show_progress_bar=False,
            )
        row = row[0].float()
        found.append({int(place): float(row[place]) for place in row.nonzero()[:, 0]})
    return found


def multi_vector(folder: Path, texts: Sequence[str], *, role: Role) -> list[Array]:
    """Vectors [tokens, width] of length 1, of the tokens that are compared."""
    if (folder / "colbert_linear.pt").exists():
        return [_bge_m3_vectors(folder, text) for text in texts]
    model = _sentence_transformer("MultiVectorEncoder", folder)
    encode = model.encode_query if role == "query" else model.encode_document
    with _quiet():
        rows = [encode([text], show_progress_bar=False)[0] for text in texts]
    return [np.asarray(row, np.float32) for row in rows]


def maxsim(query_vectors: Array, document_vectors: Array) -> float:
    """Sum, over the query's tokens, the highest similarity with a token of the document."""
    return float((query_vectors @ document_vectors.T).max(axis=1).sum())


def scores(folder: Path, pairs: Sequence[Pair], *, activate: bool = True, prompt: str | None = None) -> Array:
    """Scores of a cross-encoder: [pairs] with one label, or else [pairs, labels]. Plain logits without `activate`."""
    model = _sentence_transformer("CrossEncoder", folder)
    function = None if activate else torch.nn.Identity()
    with _quiet():
        rows = [model.predict([pair], activation_fn=function, prompt=prompt, show_progress_bar=False) for pair in pairs]
    return np.concatenate(rows)


def labels(folder: Path, texts: Sequence[str], *, activate: bool = True) -> Array:
    """Scores [texts, labels] of transformers' text classification, which takes the function from the config."""
    classify = pipeline_of("text-classification", folder)
    function = {} if activate else {"function_to_apply": "none"}
    limit = _max_tokens(classify.model.config, classify.tokenizer)
    rows = []
    with _quiet():
        for text in texts:
            found = classify(text, top_k=None, truncation=True, max_length=limit, **function)
            by_label = {each["label"]: each["score"] for each in found}
            rows.append([by_label[name] for _, name in sorted(classify.model.config.id2label.items())])
    return np.array(rows, np.float32)


def token_labels(folder: Path, text: str) -> Array:
    """Logits [tokens, labels], special tokens included."""
    tag = pipeline_of("token-classification", folder)
    limit = _max_tokens(tag.model.config, tag.tokenizer)
    encoded = tag.tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
    with torch.inference_mode():
        logits: Array = tag.model(**encoded).logits[0].float().numpy()
    return logits


def entities(folder: Path, text: str, aggregation: str) -> list[dict[str, Any]]:
    """Return transformers' entities with `none`, `simple`, `first`, `average` or `max`."""
    tag = pipeline_of("token-classification", folder)
    tag.tokenizer.model_max_length = _max_tokens(tag.model.config, tag.tokenizer)
    with _quiet():
        found: list[dict[str, Any]] = tag(text, aggregation_strategy=aggregation)
    return found


def stanford_colbert(folder: Path, text: str, *, role: Role) -> Array:
    """The vectors of a folder with `artifact.metadata`, by https://arxiv.org/abs/2004.12832 (section 3.2).

    As in colbert-ir's `QueryTokenizer`, `DocTokenizer` and `ColBERT`: a marker after the first token, queries
    filled up with mask tokens that are not attended to, documents without punctuation.
    """
    from safetensors.torch import load_file

    settings = json.loads((folder / "artifact.metadata").read_text())
    tokenizer, model = _bare(folder)
    marker, width = ("query_token_id", "query_maxlen") if role == "query" else ("doc_token_id", "doc_maxlen")
    first, *rest = tokenizer(text, truncation=True, max_length=settings[width] - 1)["input_ids"]
    ids = [first, tokenizer.convert_tokens_to_ids(settings[marker]), *rest]
    attended = [1] * len(ids)
    if role == "query":
        missing = settings[width] - len(ids)
        ids += [tokenizer.mask_token_id] * missing
        attended += [int(settings["attend_to_mask_tokens"])] * missing
    with torch.inference_mode():
        hidden = model(torch.tensor([ids]), attention_mask=torch.tensor([attended])).last_hidden_state[0]
        projected = hidden @ load_file(folder / "model.safetensors")["linear.weight"].T
    skipped = set(tokenizer.convert_tokens_to_ids(list(string.punctuation))) - {tokenizer.unk_token_id}
    if role == "document" and settings["mask_punctuation"]:
        projected = projected[[place for place, number in enumerate(ids) if number not in skipped]]
    vectors: Array = torch.nn.functional.normalize(projected, dim=-1).numpy()
    return vectors


def image_vectors(folder: Path, files: Sequence[bytes]) -> Array:
    """Return transformers' vectors of encoded images, one by one: [images, width], not normalized.

    The image features of a model that has them; else the vector of the class token.
    """
    model, processor = image_model(folder)
    rows = []
    for pixels in _pixels(processor, files):
        with torch.inference_mode():
            if hasattr(model, "get_image_features"):
                rows.append(model.get_image_features(**pixels).pooler_output[0].numpy())
            else:
                rows.append(model(**pixels).last_hidden_state[0, 0].numpy())
    return np.stack(rows)


def patch_vectors(folder: Path, file: bytes) -> Array:
    """The last layer of a model of images, [tokens, width]."""
    model, processor = image_model(folder)
    with torch.inference_mode():
        vectors: Array = model(**_pixels(processor, [file])[0]).last_hidden_state[0].numpy()
    return vectors


def text_features(folder: Path, texts: Sequence[str], *, fill_to: int | None) -> Array:
    """The text features of transformers, one by one, [texts, width], not normalised; of texts that are filled up."""
    model, _ = image_model(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(str(folder))
    filled = {"padding": "max_length", "max_length": fill_to} if fill_to else {"max_length": 77}
    rows = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, return_tensors="pt", **filled)
        given = {name: tokens[name] for name in ("input_ids", "attention_mask") if name in tokens}
        with torch.inference_mode():
            rows.append(model.get_text_features(**given).pooler_output[0].numpy())
    return np.stack(rows)


def embedded_images(folder: Path, files: Sequence[bytes]) -> Array:
    """Return sentence-transformers' vectors of images, one by one."""
    model = _sentence_transformer("SentenceTransformer", folder)
    with _quiet():
        return np.concatenate([model.encode([_opened(file)], show_progress_bar=False) for file in files])


def image_labels(folder: Path, files: Sequence[bytes], *, activate: bool = True) -> Array:
    """Scores [images, labels] of transformers' image classification."""
    classify = pipeline_of("image-classification", folder)
    function = {} if activate else {"function_to_apply": "none"}
    rows = []
    with _quiet():
        for file in files:
            by_label = {each["label"]: each["score"] for each in classify(_opened(file), top_k=100, **function)}
            rows.append([by_label[name] for _, name in sorted(classify.model.config.id2label.items())])
    return np.array(rows, np.float32)


def _pixels(processor: Any, files: Sequence[bytes]) -> list[Any]:
    return [processor(images=_opened(file), return_tensors="pt") for file in files]


def _opened(file: bytes) -> Pillow.Image:
    return Pillow.open(io.BytesIO(file)).convert("RGB")


# Two heads of BGE-M3, by https://arxiv.org/abs/2402.03216 (section 3.2) and its reference implementation,
# FlagEmbedding's `M3Embedder` (`_sparse_embedding`, `_colbert_embedding`, `_process_token_weights`)


def _bge_m3_weights(folder: Path, text: str) -> dict[int, float]:
    """relu(linear(hidden)) for each token; the highest for each number; none for special tokens."""
    tokenizer, ids, hidden = _bge_m3_hidden(folder, text)
    weights = torch.relu(_linear(folder / "sparse_linear.pt", hidden))[:, 0]
    special = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    found: dict[int, float] = {}
    for number, weight in zip(ids, weights.tolist(), strict=True):
        if number not in special and weight > found.get(number, 0):
            found[number] = weight
    return found


def bge_m3_token_weights(folder: Path, text: str) -> tuple[list[int], Array]:
    """Ids and relu(linear(hidden)) of each token between <s> and </s>, as vLLM's `token_classify` gives them."""
    _, ids, hidden = _bge_m3_hidden(folder, text)
    weights: Array = torch.relu(_linear(folder / "sparse_linear.pt", hidden))[1:-1, 0].numpy()
    return ids[1:-1], weights


def _bge_m3_vectors(folder: Path, text: str) -> Array:
    """linear(hidden) of every token but the first, of length 1."""
    _, _, hidden = _bge_m3_hidden(folder, text)
    projected = _linear(folder / "colbert_linear.pt", hidden[1:])
    vectors: Array = torch.nn.functional.normalize(projected, dim=-1).numpy()
    return vectors


def _bge_m3_hidden(folder: Path, text: str) -> tuple[Any, list[int], torch.Tensor]:
    tokenizer, model = _bare(folder)
    encoded = tokenizer(text, truncation=True, max_length=_max_tokens(model.config, tokenizer), return_tensors="pt")
    with torch.inference_mode():
        hidden = model(encoded["input_ids"], attention_mask=encoded["attention_mask"]).last_hidden_state[0]
    return tokenizer, encoded["input_ids"][0].tolist(), hidden


def _linear(path: Path, hidden: torch.Tensor) -> torch.Tensor:
    state = torch.load(path, weights_only=True)
    return torch.nn.functional.linear(hidden, state["weight"], state["bias"])


# Loading


def loaded(name: str, folder: Path) -> Any:
    """Load a model of sentence-transformers by its class name, for a test that looks inside."""
    return _sentence_transformer(name, folder)


def _cached(load: Callable[..., T]) -> Callable[..., T]:
    """Each model is loaded once in a process."""

    @functools.cache
    def once(*arguments: Any) -> T:
        torch.set_num_threads(1)
        with _quiet():
            return load(*arguments)

    return once


def _quiet() -> warnings.catch_warnings[Any]:
    """Ignore the libraries' own warnings: they are not the subject of the tests."""
    return warnings.catch_warnings(action="ignore")


@_cached
def _sentence_transformer(name: str, folder: Path) -> Any:
    import sentence_transformers

    kind = getattr(sentence_transformers, name)
    return kind(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"})


@_cached
def _bare(folder: Path) -> tuple[Any, Any]:
    """A tokenizer and a transformer without a head."""
    path = str(folder)
    return hf.AutoTokenizer.from_pretrained(path), hf.AutoModel.from_pretrained(path, dtype=torch.float32).eval()


@_cached
def image_model(folder: Path) -> tuple[Any, Any]:
    """A model as its own class, and its image processor."""
    path = str(folder)
    named = hf.AutoConfig.from_pretrained(path).architectures[0]
    model = getattr(hf, named).from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoImageProcessor.from_pretrained(path, backend="pil")


@_cached
def pipeline_of(task: str, folder: Path) -> Any:
    return hf.pipeline(task, model=str(folder), device="cpu", dtype=torch.float32)


def _max_tokens(config: Any, tokenizer: Any) -> int:
    """Return the tokenizer's limit, or the model's positions if fewer, as sentence-transformers does."""
    return min(int(tokenizer.model_max_length), int(config.max_position_embeddings))


def apart(found: Sequence[Array] | Array | None, wanted: Sequence[Array]) -> float:
    """Return the largest difference between values of arrays, whose shapes must be equal."""
    assert found is not None
    assert [rows.shape for rows in found] == [rows.shape for rows in wanted]
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(found, wanted, strict=True))
