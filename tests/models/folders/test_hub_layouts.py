"""Folders as found on the hub: each is served like its oracle, or rejected with the cause.

`SERVED` and `REJECTED` are the tables: a name, a function that makes the folder, and the expected result.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray
from PIL import Image as Pillow
from safetensors.torch import load_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import MODEL_MAX, Image, Output, TextInput
from staged_pool.stages.errors import ConfigError
from tests.models import gte_oracle, oracle
from tests.models.images.drawing import drawing, encode
from tests.models.requests import classify, embed, score
from tests.models.tiny import EVERY, write_json, write_modules
from tests.models.tiny.bodies import Body
from tests.models.tiny.hub import (
    WEIGHTS,
    after,
    bert_as,
    canine,
    claims,
    dense_with,
    distilbert_mlm,
    electra,
    files,
    gte,
    modalities,
    modernbert_mlm,
    of_pages,
    only,
    pickled,
    pickled_in_parts,
    pooled,
    qwen3_lm,
    roberta_labels,
    scaled,
    t5_whole,
    with_readout,
    with_tensors,
    with_tensors_in,
    with_types,
    without_tensor,
)
from tests.models.tiny.images import dinov3
from tests.needed import needs

Array = NDArray[np.float32]

TEXTS = ["A man is eating food.", "The stock market fell sharply today, and then it rose again.", "short"]
CLOSE = 2e-5

GTE_SCORE = {"new.pooler.dense.weight": (32, 32), "new.pooler.dense.bias": (32,), "classifier.weight": (1, 32),
             "classifier.bias": (1,)}  # fmt: skip
GTE_WEIGHTS = {"classifier.weight": (1, 32), "classifier.bias": (1,)}
TWICE = {"type": "ntk", "factor": 2.0}
ONE_LABEL: dict[str, Any] = {"id2label": {"0": "LABEL_0"}}
CODE = {"AutoModel": "modeling_mine.MineModel"}
QUANTISED = "the weights are quantised"
MERGE = "merge the adapter into its base model (merge_and_unload of peft), save the result, and serve that folder"
HEAD = "whose head is not supported: without it the model's results would be wrong; --task embed"
LAST_STATE = {"method": "forward", "method_output_name": "last_hidden_state"}
PARTS = {"regression_layer__weight": (19, 32), "gating__weight__layers__0__weight": (4, 32)}


LILT = of_pages("LiltModel", "lilt")
LAYOUTLM_V3 = {"coordinate_size": 8, "shape_size": 8, "visual_embed": False}
MARKUPLM = {"max_depth": 4, "xpath_unit_hidden_size": 8}
BOXES = "which also reads the box of each word on its page: a bare text does not have that"
PATHS = "which also reads the place of each word in its HTML page (xpath): a bare text does not have that"
CELLS = "which also reads the row and the column of each word in its table: a bare text does not have that"


def like(kind: str) -> Body:
    return EVERY[kind]


def plain_mean(folder: Path) -> Array:
    """Return sentence-transformers' vectors for a folder without `modules.json`."""
    return oracle.dense(folder, TEXTS)


def plain_encoder(folder: Path) -> Array:
    """The mean of T5's encoder, from transformers alone."""
    tokenizer, model = hf.AutoTokenizer.from_pretrained(folder), hf.T5EncoderModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        rows = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy() for text in TEXTS]
    return np.stack(rows)


def gte_vectors(folder: Path) -> Array:
    """The first token's vector, of length 1."""
    rows = [gte_hidden(folder, text)[1][0] for text in TEXTS]
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()


def gte_hidden(folder: Path, *texts: str) -> tuple[list[int], torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = tokenizer(*texts)["input_ids"]
    return ids, gte_oracle.hidden(load_file(folder / WEIGHTS), config, ids)


SERVED: Mapping[str, tuple[Body, Callable[[Path], Array], dict[str, Any]]] = {
    "sentence-transformers": (like("bert-mean"), plain_mean, {}),
    "the oldest, with 0_Transformer": (like("bert-cls"), plain_mean, {}),
    "a plain transformer": (like("bert-plain"), plain_mean, {}),
    "a plain masked language model": (bert_as("BertForMaskedLM"), plain_mean, {}),
    "BERT as it was pretrained, with pooler": (bert_as("BertForPreTraining"), plain_mean, {}),
    "ELECTRA as it was pretrained": (electra, plain_mean, {}),
    "DistilBERT as it was pretrained": (distilbert_mlm, plain_mean, {}),
    "ModernBERT as it was pretrained": (modernbert_mlm, plain_mean, {}),
    "a class with the buffers of old versions": (
        after(like("bert-mean"), with_tensors(embeddings__position_ids=(1, 96))),
        plain_mean,
        {},
    ),
    "pickled weights (bge-m3, e5)": (after(like("roberta-mean"), pickled), plain_mean, {}),
    "pickled weights in parts": (after(like("bert-mean"), pickled_in_parts), plain_mean, {}),
    "a causal language model with modules.json": (after(qwen3_lm, pooled("lasttoken")), plain_mean, {}),
    "a classifier below modules.json": (
        after(bert_as("BertForSequenceClassification"), pooled("mean_tokens")),
        plain_mean,
        {},
    ),
    "a classifier as an embedder": (bert_as("BertForSequenceClassification"), plain_mean, {"task": "embed"}),
    "an unknown head, and its transformer is asked for": (
        after(like("bert-plain"), claims("BertForRewardModelWithGating"), with_tensors(**PARTS)),
        plain_mean,
        {"task": "embed"},
    ),
    "a decision model, and its transformer is asked for": (
        after(like("bert-plain"), with_readout),
        plain_mean,
        {"task": "embed"},
    ),
    "variants of the weights, and weights of other libraries": (
        after(
            like("bert-mean"),
            lambda folder: [
                shutil.copy(folder / WEIGHTS, folder / name)
                for name in ("model.fp16.safetensors", "consolidated.safetensors", "open_clip_model.safetensors")
            ],
            lambda folder: [
                (folder / name).write_bytes(b"") for name in ("training_args.bin", "optimizer.pt", "rust_model.ot")
            ],
            lambda folder: write_json(folder / "generation_config.json", {}),
        ),
        plain_mean,
        {},
    ),
    "sentence-t5": (like("t5-mean"), plain_mean, {}),
    "T5 with its decoder, and its encoder is asked for": (t5_whole, plain_encoder, {"task": "embed"}),
    "gte-multilingual-base": (
        after(gte("NewForTokenClassification", head=GTE_WEIGHTS, **ONE_LABEL), pooled("cls_token")),
        gte_vectors,
        {},
    ),
    "gte-base-en-v1.5": (
        after(
            gte(
                "NewModel", prefix="", type_vocab_size=0, rope_theta=500000, rope_scaling={"type": "ntk", "factor": 2.0}
            ),
            pooled("cls_token"),
        ),
        gte_vectors,
        {},
    ),
    "arctic-embed-m-v2.0": (
        after(gte("GteModel", prefix="", model_type="gte", rope_scaling=None, rope_theta=160000), pooled("cls_token")),
        gte_vectors,
        {},
    ),
    "gte without modules.json": (gte("NewModel"), gte_vectors, {}),
    "modalities as sentence-transformers 6 writes them": (
        after(like("bert-mean"), modalities(text=LAST_STATE)),
        plain_mean,
        {},
    ),
    "positions scaled under both names alike": (
        after(
            qwen3_lm,
            pooled("lasttoken"),
            scaled(
                rope_scaling={"type": "linear", "factor": 2.0},
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            ),
        ),
        plain_mean,
        {},
    ),
    "LiLT trained on bare texts": (after(LILT, pooled("mean_tokens")), plain_mean, {}),
    "LayoutLM, and its vectors are asked for": (of_pages("LayoutLMModel", "layoutlm"), plain_mean, {"task": "embed"}),
    "a Dense with a short name of its activation": (
        after(like("bert-max-dense"), dense_with("torch.nn.Tanh")),
        plain_mean,
        {},
    ),
}
"""Embedding models: how the folder is made, what its vectors are to be, and the settings."""

REJECTED: Mapping[str, tuple[Body, str]] = {
    "ArmoRM": (after(like("bert-plain"), claims("LlamaForRewardModelWithGating"), with_tensors(**PARTS)), HEAD),
    "a reward model": (
        after(like("bert-plain"), claims("Qwen2ForRewardModel")),
        "Qwen2ForRewardModel is supported with model_type='qwen2', not 'bert'",
    ),
    "jina-reranker-v3": (
        after(qwen3_lm, claims("JinaForRanking", is_causal=True, auto_map={"AutoModel": "modeling.JinaForRanking"})),
        "JinaForRanking: model is jina-reranker-v3, which is not supported",
    ),
    "another list-wise reranker": (
        after(qwen3_lm, claims("MineForRanking", is_causal=True, auto_map={"AutoModel": "modeling.MineForRanking"})),
        f"architectures names MineForRanking, {HEAD}",
    ),
    "answers to questions": (bert_as("BertForQuestionAnswering"), f"BertForQuestionAnswering, {HEAD}"),
    "multiple choice": (bert_as("BertForMultipleChoice"), HEAD),
    "the next sentence": (bert_as("BertForNextSentencePrediction"), HEAD),
    "a head of weights alone": (
        after(like("bert-plain"), with_tensors(**PARTS)),
        "gating.weight.layers.0.weight, regression_layer.weight of the weights would not be read by BertModel: they "
        "belong to a head that is not supported",
    ),
    "a head of weights alone below modules.json": (
        after(like("bert-mean"), with_tensors(v_head__weight=(1, 32))),
        "v_head.weight of the weights would not be read by BertModel",
    ),
    "a decision model": (
        after(like("bert-plain"), with_readout),
        "decision_config.json: belongs to a head that is not supported: without it the model's results would be wrong",
    ),
    "a decision model below modules.json": (
        after(like("bert-mean"), with_readout),
        "decision_config.json: belongs to a head that is not supported",
    ),
    "a head in a file of its own": (
        after(like("bert-plain"), with_readout, lambda folder: (folder / "decision_config.json").unlink()),
        "readout.safetensors: belongs to a head that is not supported",
    ),
    "a pickled head in a file of its own": (
        after(like("bert-plain"), lambda folder: torch.save({"weight": torch.ones(2)}, folder / "value_head.bin")),
        "value_head.bin: belongs to a head that is not supported",
    ),
    "the settings of a head": (
        after(like("bert-plain"), lambda folder: write_json(folder / "joint_head_config.json", {"width": 32})),
        "joint_head_config.json: belongs to a head that is not supported",
    ),
    "a second head beside a classifier": (
        after(bert_as("BertForSequenceClassification"), with_tensors(regression__weight=(3, 32))),
        "regression.weight of the weights would not be read by BertForSequenceClassification",
    ),
    "a transformer with layers of its own": (
        after(like("bert-mean"), with_tensors(encoder__layer__0__attention__self__q_norm__weight=(8,))),
        "encoder.layer.0.attention.self.q_norm.weight of the weights would not be read by BertModel: its architecture "
        "differs from this class of transformers",
    ),
    "weights that are missing": (
        after(like("bert-mean"), without_tensor("encoder.layer.1.output.dense.weight")),
        "encoder.layer.1.output.dense.weight is missing or of another shape",
    ),
    "T5 with its decoder": (
        t5_whole,
        "generates text with a decoder: it is not a pooling model; --task embed (task='embed') uses its encoder alone",
    ),
    "BART with its decoder": (
        after(like("bert-plain"), claims("BartForConditionalGeneration", model_type="bart")),
        "BartForConditionalGeneration, which generates text with a decoder: it is not a pooling model",
    ),
    "LayoutLM that labels pages": (
        of_pages("LayoutLMForSequenceClassification", "layoutlm"),
        f"config.json: architectures names LayoutLMForSequenceClassification, {BOXES}",
    ),
    "LayoutLM that labels words": (of_pages("LayoutLMForTokenClassification", "layoutlm"), BOXES),
    "LayoutLMv3": (of_pages("LayoutLMv3ForTokenClassification", "layoutlmv3", **LAYOUTLM_V3), BOXES),
    "LayoutLMv3 that labels pages": (
        of_pages("LayoutLMv3ForSequenceClassification", "layoutlmv3", **LAYOUTLM_V3),
        BOXES,
    ),
    "LiLT that labels words": (of_pages("LiltForTokenClassification", "lilt"), BOXES),
    "LiLT that labels pages": (of_pages("LiltForSequenceClassification", "lilt"), BOXES),
    "LiLT of which nothing is known": (
        LILT,
        f"LiltModel, {BOXES}, and results without it would be wrong; --task embed",
    ),
    "BROS": (of_pages("BrosForTokenClassification", "bros"), BOXES),
    "MarkupLM": (of_pages("MarkupLMForTokenClassification", "markuplm", **MARKUPLM), PATHS),
    "MarkupLM that labels pages": (of_pages("MarkupLMForSequenceClassification", "markuplm", **MARKUPLM), PATHS),
    "TAPAS": (of_pages("TapasForSequenceClassification", "tapas"), CELLS),
    "DPR": (
        after(like("bert-plain"), claims("DPRQuestionEncoder", model_type="dpr")),
        "an encoder of DPR in its original layout: serve the sentence-transformers folder of the same model",
    ),
    "CLIP's tower of texts": (
        after(like("bert-plain"), claims("CLIPTextModel", model_type="clip_text_model")),
        "model_type='clip_text_model' is one tower of a model with two: serve the folder of the whole model",
    ),
    "JinaBERT": (
        after(
            like("bert-mean"), claims("JinaBertForMaskedLM", auto_map={"AutoModel": "org/code--modeling.JinaBertModel"})
        ),
        "architectures names JinaBertForMaskedLM, a class of the folder's own code (auto_map), which is not run",
    ),
    "BERT with relative positions": (
        after(like("bert-mean"), claims("BertModel", position_embedding_type="relative_key_query")),
        "position_embedding_type='relative_key_query' is not supported",
    ),
    "a Dense with more than its layer": (
        after(like("bert-max-dense"), with_tensors_in("3_Dense", extra__weight=(2,))),
        "3_Dense: the weights cannot be used: Error(s) in loading state_dict for _Dense: Unexpected key(s)",
    ),
    "Whisper": (
        after(like("bert-plain"), claims("WhisperForConditionalGeneration", model_type="whisper")),
        "model_type='whisper' reads audio, not text: it is not supported",
    ),
    "nomic-embed-vision": (
        after(
            like("bert-plain"),
            claims("NomicVisionModel", model_type="nomic_bert"),
            lambda folder: (folder / "tokenizer.json").unlink(),
            lambda folder: write_json(folder / "preprocessor_config.json", {"size": 224}),
        ),
        "config.json: architectures names NomicVisionModel, which is not supported",
    ),
    "Swin": (
        after(like("dinov2"), claims("SwinModel", model_type="swin")),
        "model_type='swin' reads images, not text: it is not supported; supported image models: clip, ",
    ),
    "Idefics3 without a layer": (
        after(like("bert-plain"), claims("Idefics3Model", model_type="idefics3", vision_config={})),
        "model_type='idefics3' (Idefics3Model) reads images in a way that is not supported",
    ),
    "code of its own": (
        after(like("bert-plain"), claims("MineModel", model_type="mine", auto_map=CODE)),
        "asks for the folder's own code, which is not run unless trust_remote_code (--trust-remote-code) is set",
    ),
    "GTE with scaled attention": (gte("NewModel", logn_attention_scale=True), "logn_attention_scale=True"),
    "GTE with mixed NTK": (
        gte("NewModel", rope_scaling={"type": "ntk", "factor": 8.0, "mixed_b": 0.7}),
        "is not supported for model_type='new', only ntk",
    ),
    "an adapter of another kind": (
        files(adapter_config={"peft_type": "IA3", "base_model_name_or_path": "org/base"}, tokenizer_config={}),
        f"adapter_config.json: peft_type='IA3' is not supported, only 'LORA': {MERGE}",
    ),
    "an adapter without weights": (
        files(adapter_config={"peft_type": "LORA", "base_model_name_or_path": "org/base"}),
        "no adapter_model.safetensors beside adapter_config.json",
    ),
    "GLiNER": (files(gliner_config={"model_name": "deberta"}), "gliner_config.json: this is a GLiNER model"),
    "open_clip": (files(open_clip_config={"model_cfg": {}}), "open_clip_config.json: this is an open_clip model"),
    "diffusers": (
        files(model_index={"_class_name": "StableDiffusionPipeline"}),
        "model_index.json: this is a diffusers model",
    ),
    "timm": (
        files(config={"architecture": "vit_base", "num_features": 768, "pretrained_cfg": {}}),
        "this is a timm model",
    ),
    "model2vec": (
        files(config={"model_type": "model2vec", "architectures": ["StaticModel"]}),
        "no weights, neither model.safetensors nor pytorch_model.bin",
    ),
    "GGUF alone": (only("model-q4.gguf"), "no config.json; found only weights in GGUF"),
    "ONNX alone": (after(like("bert-mean"), only("onnx/model.onnx")), "found only a graph in ONNX"),
    "TensorFlow alone": (after(like("bert-plain"), only("tf_model.h5")), "found only weights of TensorFlow"),
    "Flax alone": (after(like("bert-plain"), only("flax_model.msgpack")), "found only weights of Flax"),
    "a variant alone": (after(like("bert-plain"), only("model.fp16.safetensors")), "rename it to model.safetensors"),
    "parts without an index": (
        after(like("bert-plain"), only("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")),
        "shards of the weights, but no model.safetensors.index.json that lists them",
    ),
    "a missing part": (
        after(
            like("bert-plain"), pickled_in_parts, lambda folder: (folder / "pytorch_model-00002-of-00002.bin").unlink()
        ),
        "pytorch_model.bin.index.json: names 'pytorch_model-00002-of-00002.bin', which does not exist",
    ),
    "a page of errors as weights": (
        after(like("bert-plain"), only(pytorch_model__bin="<html>404</html>")),
        "pytorch_model.bin: is not a weights file written by torch",
    ),
    "a pickle that is cut": (
        after(
            like("bert-plain"),
            pickled,
            lambda folder: (folder / "pytorch_model.bin").write_bytes(
                (folder / "pytorch_model.bin").read_bytes()[:-500]
            ),
        ),
        "pytorch_model.bin: the weights are damaged: the file ends too early",
    ),
    **{
        f"quantised by {method}": (
            after(like("bert-mean"), claims("BertModel", quantization_config={"quant_method": method})),
            f"config.json: quantization_config: {QUANTISED} ({method})",
        )
        for method in ("bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors")
    },
    "bytes as weights": (
        after(like("bert-mean"), with_types(torch.int8, "encoder.layer.1.output.dense.weight")),
        "model.safetensors: encoder.layer.1.output.dense.weight: the weights are quantised (numbers of type I8)",
    ),
    "pickled bytes as weights": (
        after(like("bert-mean"), with_types(torch.uint8, "encoder.layer.1.output.dense.weight"), pickled),
        "pytorch_model.bin: encoder.layer.1.output.dense.weight: the weights are quantised (numbers of type U8)",
    ),
    "weights of 8 bits and their factors": (
        after(
            like("bert-mean"),
            with_tensors(encoder__layer__1__output__dense__weight_scale=(1,)),
            with_types(torch.float8_e4m3fn, "encoder.layer.1.output.dense.weight"),
        ),
        "encoder.layer.1.output.dense.weight: the weights are quantised (numbers of type F8_E4M3)",
    ),
    "GPTQ without its config": (
        after(
            like("bert-mean"),
            with_tensors(encoder__layer__1__output__dense__qweight=(4, 32)),
            without_tensor("encoder.layer.1.output.dense.weight"),
            with_types(torch.int32, "encoder.layer.1.output.dense.qweight"),
        ),
        "encoder.layer.1.output.dense.qweight: the weights are quantised (numbers of type I32)",
    ),
    "quantised by quanto": (
        after(like("bert-mean"), lambda folder: write_json(folder / "quanto_qmap.json", {})),
        f"quanto_qmap.json: {QUANTISED} (quanto)",
    ),
    "texts in the chat template": (
        after(qwen3_lm, pooled("lasttoken"), modalities(text=LAST_STATE, message={**LAST_STATE, "format": "flat"})),
        "sentence_bert_config.json: modality_config: message: sentence-transformers would render every text "
        "by this folder's chat template, which is not supported",
    ),
    "the state of an inner layer": (
        after(
            like("bert-mean"),
            modalities(text={"method": "forward", "method_output_name": ["hidden_states", -2]}),
        ),
        "modality_config: text is not supported as {'method': 'forward', 'method_output_name': ['hidden_states', -2]}",
    ),
    "another output": (
        after(like("bert-mean"), modalities("sentence_embedding", text=LAST_STATE)),
        "sentence_bert_config.json: module_output_name='sentence_embedding' is not supported",
    ),
    "positions scaled in no way": (
        after(qwen3_lm, pooled("lasttoken"), scaled(rope_scaling={"factor": 4.0})),
        "config.json: rope_scaling: factor=4.0 has no effect without a rope_type",
    ),
    "positions scaled in two ways": (
        after(
            qwen3_lm,
            pooled("lasttoken"),
            scaled(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
        ),
        "have different types: remove one of them",
    ),
    "positions scaled by a text": (
        after(qwen3_lm, pooled("lasttoken"), scaled(rope_scaling={"type": "yarn", "factor": "4.0"})),
        "config.json: rope_scaling: factor='4.0' must be a number",
    ),
    "CANINE, which reads characters": (
        after(like("bert-mean"), canine),
        "CanineModel has no token embedding of its own, and is not supported",
    ),
    "a Dense with a function": (
        after(like("bert-max-dense"), dense_with("torch.nn.functional.relu")),
        "activation_function='torch.nn.functional.relu' is not a module of torch.nn",
    ),
    "quantised by old GPTQ": (
        after(like("bert-mean"), lambda folder: write_json(folder / "quantize_config.json", {"bits": 4})),
        f"quantize_config.json: {QUANTISED} (gptq)",
    ),
    **{
        name: (
            partial(write_modules, first=f"sentence_transformers.models.{name}"),
            f"modules.json: must begin with a Transformer, but begins with {name}: {cause}",
        )
        for name, cause in {
            "Router": "several chains by role are not supported",
            "Asym": "several chains by role are not supported",
        }.items()
    },
}
"""Folders that cannot be served: a function that makes each, and its error message."""


def test_there_are_forty_layouts_and_more() -> None:
    assert len(SERVED) + len(REJECTED) >= 60


def made(body: Body, folder: Path) -> Path:
    folder.mkdir()
    torch.manual_seed(7)
    body(folder)
    return folder


def loaded(folder: Path, **settings: Any) -> Encoder:
    return load_model(EngineConfig(model=str(folder), dtype="float32", torch_threads=1, **settings))


GTE = needs("transformers", "5.18", "GteModel")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=GTE if SERVED[name][1] is gte_vectors else ()) for name in SERVED]
)
def test_a_layout_gives_the_vectors_of_its_oracle(name: str, tmp_path: Path) -> None:
    body, wanted, settings = SERVED[name]
    folder = made(body, tmp_path / "model")
    found = embed(loaded(folder, **settings), TEXTS, Output.DENSE).dense
    assert found is not None
    assert np.abs(found - wanted(folder)).max() < CLOSE


NOMIC = needs("transformers", "5.5", "NomicBertConfig")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NOMIC if name == "nomic-embed-vision" else ()) for name in REJECTED]
)
def test_a_layout_that_cannot_be_served_is_rejected_with_its_cause(name: str, tmp_path: Path) -> None:
    body, message = REJECTED[name]
    folder = made(body, tmp_path / "model")
    with pytest.raises(ConfigError) as rejected:
        loaded(folder)
    assert message in str(rejected.value)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize("weights", [pickled, pickled_in_parts])
def test_pickled_classifiers_give_the_labels_of_transformers(weights: Any, tmp_path: Path) -> None:
    folder = made(after(roberta_labels, weights), tmp_path / "model")
    found = classify(loaded(folder), [TextInput(text, MODEL_MAX) for text in TEXTS])
    assert found.labels == ("negative", "neutral", "positive")
    assert np.abs(found.scores - oracle.labels(folder, TEXTS)).max() < CLOSE


@GTE
def test_the_reranker_of_gte_gives_the_scores_of_its_formula(tmp_path: Path) -> None:
    folder = made(gte("NewForSequenceClassification", head=GTE_SCORE, **ONE_LABEL), tmp_path / "model")
    found = score(loaded(folder), TEXTS[0], TEXTS[1:])
    tensors = load_file(folder / WEIGHTS)
    assert found.logits is not None
    for text, logit in zip(TEXTS[1:], found.logits, strict=True):
        _, hidden = gte_hidden(folder, TEXTS[0], text)
        pooled_row = torch.tanh(hidden[0] @ tensors["new.pooler.dense.weight"].T + tensors["new.pooler.dense.bias"])
        assert abs(float(pooled_row @ tensors["classifier.weight"][0] + tensors["classifier.bias"][0]) - logit) < CLOSE


@GTE
def test_gte_weighs_tokens_where_its_folder_has_the_head(tmp_path: Path) -> None:
    body = after(gte("NewForTokenClassification", head=GTE_WEIGHTS, **ONE_LABEL), pooled("cls_token"))
    folder = made(body, tmp_path / "model")
    found = embed(loaded(folder), TEXTS, Output.SPARSE).sparse
    assert found is not None
    tensors = load_file(folder / WEIGHTS)
    for text, vector in zip(TEXTS, found, strict=True):
        ids, hidden = gte_hidden(folder, text)
        weights = torch.relu(hidden @ tensors["classifier.weight"][0] + tensors["classifier.bias"][0]).tolist()
        wanted: dict[int, float] = {}
        for number, weight in zip(ids[1:-1], weights[1:-1], strict=True):
            if number > 3 and weight > wanted.get(number, 0):
                wanted[number] = weight
        assert dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True)) == pytest.approx(
            wanted, abs=CLOSE
        )


def test_safe_weights_are_read_where_there_are_both(tmp_path: Path) -> None:
    folder = made(like("bert-plain"), tmp_path / "model")
    torch.save({name: -tensor for name, tensor in load_file(folder / WEIGHTS).items()}, folder / "pytorch_model.bin")
    found = embed(loaded(folder), TEXTS, Output.DENSE).dense
    assert found is not None
    assert np.abs(found - plain_mean(folder)).max() < CLOSE


def test_the_model_card_says_that_vectors_may_be_cut(tmp_path: Path) -> None:
    folder = made(like("bert-mean"), tmp_path / "model")
    (folder / "README.md").write_text("---\ntags:\n- loss:MatryoshkaLoss\n---\n")
    assert loaded(folder).card.matryoshka


def test_dinov3_gives_the_vectors_of_transformers_on_images_that_are_resized_in_floating_point(tmp_path: Path) -> None:
    folder = made(dinov3, tmp_path / "model")
    data = [encode(drawing(333, 217, 2), "PNG"), encode(drawing(61, 47, 4), "PNG")]
    found = embed(loaded(folder), [Image(one) for one in data], Output.DENSE).dense
    assert found is not None
    model = hf.DINOv3ViTModel.from_pretrained(folder).eval()
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    for row, one in zip(found, data, strict=True):
        pixels = torch.tensor(np.array(Pillow.open(io.BytesIO(one)).convert("RGB"))).permute(2, 0, 1).float() / 255
        pixels = torch.nn.functional.interpolate(pixels[None], (64, 64), mode="bilinear", antialias=True)
        with torch.inference_mode():
            wanted = model(pixel_values=(pixels - mean) / std).pooler_output[0].numpy()
        assert np.abs(row - wanted).max() < CLOSE
