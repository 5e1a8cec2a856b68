"""Models that score pairs, texts or tokens by labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file

from tests.models.tiny import bodies
from tests.models.tiny.bodies import POSITIONS, Body, save_body
from tests.models.tiny.layout import edit_json, write_json, write_modules
from tests.models.tiny.vocabularies import CORPUS, byte_bpe, chat_bpe, unigram, word_piece

SIGMOID = "torch.nn.modules.activation.Sigmoid"
GELU = "torch.nn.modules.activation.GELU"
IDENTITY = "torch.nn.modules.linear.Identity"
NLI = ("contradiction", "entailment", "neutral")
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

RERANKER_POSITIONS = 512
RERANKER_TEMPLATE = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first \
| default("Given a web search query, retrieve relevant passages that answer the query") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""
"""The prompt of Qwen3-Reranker, in which a prompt takes the place of the instruction. The last newline is dropped."""


def labelled(labels: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a config that name its labels."""
    return {"id2label": dict(enumerate(labels)), "label2id": {name: place for place, name in enumerate(labels)}}


def one_label(**others: Any) -> dict[str, Any]:
    return {"num_labels": 1, **others}


def activation(folder: Path, name: str) -> None:
    """Say, as sentence-transformers does since 4.0, what stands between a logit and a score."""
    edit_json(folder / "config.json", sentence_transformers={"activation_fn": name, "version": "4.0.1"})


def _bert(folder: Path, **config: Any) -> None:
    tokenizer = word_piece()
    model = hf.BertForSequenceClassification(bodies.bert_config(len(tokenizer), **config))
    save_body(folder, model, tokenizer, tokenizer_class="BertTokenizer")


def _ce_bert(name: str) -> Body:
    def make(folder: Path) -> None:
        _bert(folder, **one_label())
        activation(folder, name)

    return make


def _ce_bert_old(folder: Path) -> None:
    """The field in which versions before 4.0 kept the activation."""
    _bert(folder, **one_label(sbert_ce_default_activation_function=IDENTITY))


def _ce_xlmr(folder: Path) -> None:
    """Nothing says an activation, so it is a sigmoid."""
    tokenizer = unigram()
    config = bodies.roberta_config(len(tokenizer), hf.XLMRobertaConfig, **one_label())
    save_body(folder, hf.XLMRobertaForSequenceClassification(config), tokenizer, model_max_length=POSITIONS)


def _ce_nli(folder: Path) -> None:
    _bert(folder, **labelled(NLI))


def _ce_modernbert(pooling: str) -> Body:
    def make(folder: Path) -> None:
        tokenizer = byte_bpe(between="</s>")
        config = bodies.modernbert_config(len(tokenizer), classifier_pooling=pooling, **one_label())
        save_body(folder, hf.ModernBertForSequenceClassification(config), tokenizer)
        activation(folder, SIGMOID)

    return make


def _qwen3(folder: Path) -> None:
    """Read at the last token that is not padding."""
    tokenizer = chat_bpe(padding_side="left")
    config = bodies.qwen3_config(len(tokenizer), pad_token_id=tokenizer.pad_token_id, **one_label())
    save_body(folder, hf.Qwen3ForSequenceClassification(config), tokenizer)


def _ce_qwen3(folder: Path) -> None:
    _qwen3(folder)
    activation(folder, SIGMOID)


def _ce_qwen3_lm(folder: Path) -> None:
    """A language model that is asked, and the logits of two of its answers: as sentence-transformers saves it."""
    tokenizer = chat_bpe(padding_side="left")
    config = bodies.qwen3_config(
        len(tokenizer), pad_token_id=tokenizer.pad_token_id, max_position_embeddings=RERANKER_POSITIONS
    )
    save_body(folder, hf.Qwen3ForCausalLM(config), tokenizer)
    (folder / "chat_template.jinja").write_text(RERANKER_TEMPLATE)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    score = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    write_modules(
        folder,
        ("sentence_transformers.cross_encoder.modules.logit_score.LogitScore", score),
        first="sentence_transformers.base.modules.transformer.Transformer",
    )
    logits = {"method": "forward", "method_output_name": "logits"}
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "text-generation",
            "modality_config": {"text": logits, "message": {**logits, "format": "flat"}},
            "module_output_name": "causal_logits",
        },
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "CrossEncoder",
            "prompts": {"query": "Find passages that answer the question"},
            "default_prompt_name": None,
            "activation_fn": IDENTITY,
        },
    )


def _ce_modular(folder: Path) -> None:
    """As cross-encoder/ettin-reranker-32m-v1: a chain of modules that ends in the score."""
    tokenizer = byte_bpe(between="</s>")
    save_body(folder, hf.ModernBertModel(bodies.modernbert_config(len(tokenizer))), tokenizer)
    inner = {"in_features": bodies.WIDTH, "out_features": 20, "bias": False, "activation_function": GELU}
    _write_scores(
        folder,
        ("pooling.Pooling", {"embedding_dimension": bodies.WIDTH, "pooling_mode": "cls", "include_prompt": True}),
        ("dense.Dense", inner | _LEVEL),
        ("layer_norm.LayerNorm", {"dimension": 20}),
        ("dense.Dense", {"in_features": 20, "out_features": 1, "bias": True, "activation_function": IDENTITY}),
    )
    _write_cross_encoder(folder, activation_fn=IDENTITY)


def _ce_modular_3label(folder: Path) -> None:
    """Two poolings, a normalization before the scores, and no activation."""
    tokenizer = word_piece()
    save_body(folder, hf.BertModel(bodies.bert_config(len(tokenizer))), tokenizer, tokenizer_class="BertTokenizer")
    width = 2 * bodies.WIDTH
    _write_scores(
        folder,
        ("pooling.Pooling", {"embedding_dimension": bodies.WIDTH, "pooling_mode": ["mean", "max"]}),
        ("normalize.Normalize", {}),
        ("dense.Dense", {"in_features": width, "out_features": 3, "bias": True, "activation_function": SIGMOID}),
    )
    _write_cross_encoder(folder)


_LEVEL = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}


def _write_scores(folder: Path, *modules: tuple[str, dict[str, Any]]) -> None:
    """Write modules behind a transformer, the last of which gives the scores, and their weights."""
    places = {"dense": "base", "normalize": "base"}
    named = [
        (f"sentence_transformers.{places.get(kind.partition('.')[0], 'sentence_transformer')}.modules.{kind}", settings)
        for kind, settings in modules
    ]
    named[-1][1].update(_LEVEL, module_output_name="scores")
    write_modules(folder, *named, first="sentence_transformers.base.modules.transformer.Transformer")
    for place, (kind, settings) in enumerate(named, start=1):
        weights = {}
        if kind.endswith(".Dense"):
            weights["linear.weight"] = torch.randn(settings["out_features"], settings["in_features"]) / 2
            if settings["bias"]:
                weights["linear.bias"] = torch.randn(settings["out_features"])
        elif kind.endswith(".LayerNorm"):
            weights = {f"norm.{name}": torch.randn(settings["dimension"]) for name in ("weight", "bias")}
        if weights:
            save_file(weights, folder / f"{place}_{kind.rpartition('.')[2]}" / "model.safetensors")


def _write_cross_encoder(folder: Path, **others: Any) -> None:
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": text},
            "module_output_name": "token_embeddings",
        },
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None, **others},
    )


def _bert_labels(*labels: str, **config: Any) -> Body:
    def make(folder: Path) -> None:
        _bert(folder, **labelled(labels), **config)

    return make


def _seqcls_distilbert(folder: Path) -> None:
    tokenizer = word_piece()
    config = bodies.distilbert_config(len(tokenizer), **labelled(("NEGATIVE", "POSITIVE")))
    save_body(folder, hf.DistilBertForSequenceClassification(config), tokenizer)
    without_types(folder)


def _seqcls_roberta(folder: Path) -> None:
    tokenizer = byte_bpe()
    config = bodies.roberta_config(len(tokenizer), **labelled(("negative", "neutral", "positive")))
    save_body(folder, hf.RobertaForSequenceClassification(config), tokenizer, model_max_length=POSITIONS)
    without_types(folder)


def _tokcls_bert(folder: Path) -> None:
    tokenizer = word_piece()
    model = hf.BertForTokenClassification(bodies.bert_config(len(tokenizer), **labelled(ENTITIES)))
    _balance(model, tokenizer)
    bodies.save(folder, model, tokenizer, tokenizer_class="BertTokenizer")


def _tokcls_distilbert(folder: Path) -> None:
    tokenizer = word_piece()
    model = hf.DistilBertForTokenClassification(bodies.distilbert_config(len(tokenizer), **labelled(ENTITIES)))
    _balance(model, tokenizer)
    bodies.save(folder, model, tokenizer)
    without_types(folder)


def _balance(model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerFast) -> None:
    """Widen, and let every label be the likeliest for some tokens of a text."""
    bodies.widen(model)
    tokens = torch.tensor([tokenizer.encode(CORPUS[0])[: bodies.POSITIONS]])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention.output.dense" in name or "attention.out_lin" in name:
                parameter.mul_(0.3)  # or else the tokens of a text are much alike
        logits = model.eval()(tokens).logits[0]
        scale = 4 / logits.std(dim=0)
        model.classifier.weight *= scale[:, None]
        model.classifier.bias -= logits.mean(dim=0)
        model.classifier.bias *= scale
        model.classifier.bias[0] -= 1  # most tokens are in no entity otherwise


def without_types(folder: Path) -> None:
    """Architectures that know no types have tokenizers that give none."""
    edit_json(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])


CROSS_ENCODERS: Mapping[str, Body] = {
    "ce-bert-1label": _ce_bert(SIGMOID),
    "ce-bert-identity": _ce_bert(IDENTITY),
    "ce-bert-old": _ce_bert_old,
    "ce-xlmr-reranker": _ce_xlmr,
    "ce-nli-3label": _ce_nli,
    "ce-modernbert": _ce_modernbert("cls"),
    "ce-modernbert-mean": _ce_modernbert("mean"),
    "ce-qwen3-seqcls": _ce_qwen3,
    "ce-modular": _ce_modular,
    "ce-modular-3label": _ce_modular_3label,
    "ce-qwen3-lm": _ce_qwen3_lm,
}
"""Each kind that scores two texts together, by name."""

CLASSIFIERS: Mapping[str, Body] = {
    "seqcls-multiclass": _bert_labels("anger", "joy", "fear", "love"),
    "seqcls-multilabel": _bert_labels("toxic", "obscene", "insult", problem_type="multi_label_classification"),
    "seqcls-regression": _bert_labels("quality", problem_type="regression"),
    "seqcls-distilbert": _seqcls_distilbert,
    "seqcls-roberta": _seqcls_roberta,
    "reward-qwen3": _qwen3,
}
"""Each kind that labels a text, by name."""

TOKEN_CLASSIFIERS: Mapping[str, Body] = {
    "tokcls-ner": _tokcls_bert,
    "tokcls-distilbert": _tokcls_distilbert,
}
"""Each kind that labels the tokens of a text, by name."""
