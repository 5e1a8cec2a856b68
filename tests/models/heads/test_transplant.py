"""Heads of many architectures, each run by the architecture's own code on packed token vectors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from staged_pool.runtime.models.heads.labels import LabelsHead, TokenLabelsHead
from staged_pool.runtime.models.heads.transplant import TransplantedHead, run_whole_model
from staged_pool.runtime.models.transformer import layout_checks
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.speedups import Speedups
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError
from tests.models.tiny.bodies import bert_config, modernbert_config, qwen3_config, roberta_config, widen

VOCABULARY = 200
Make = Callable[[], Any]


def config(kind: Any, **others: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return kind(vocab_size=VOCABULARY, max_position_embeddings=64, num_labels=3, **sizes, **others)


def three(make: Any, **others: Any) -> Any:
    return make(VOCABULARY, num_labels=3, **others)


ROWS: dict[str, tuple[Make, str]] = {
    "albert": (lambda: hf.AlbertForSequenceClassification(config(hf.AlbertConfig, embedding_size=16)), "first"),
    "bert": (lambda: hf.BertForSequenceClassification(three(bert_config)), "first"),
    "deberta": (lambda: hf.DebertaV2ForSequenceClassification(config(hf.DebertaV2Config)), "first"),
    "electra": (lambda: hf.ElectraForSequenceClassification(config(hf.ElectraConfig)), "first"),
    "mpnet": (lambda: hf.MPNetForSequenceClassification(config(hf.MPNetConfig)), "first"),
    "roberta": (lambda: hf.RobertaForSequenceClassification(three(roberta_config)), "first"),
    "modernbert": (lambda: hf.ModernBertForSequenceClassification(three(modernbert_config)), "first"),
    "modernbert-mean": (
        lambda: hf.ModernBertForSequenceClassification(three(modernbert_config, classifier_pooling="mean")),
        "mean",
    ),
    "llama": (lambda: hf.LlamaForSequenceClassification(config(hf.LlamaConfig, pad_token_id=None)), "last"),
    "qwen3": (lambda: hf.Qwen3ForSequenceClassification(three(qwen3_config)), "last but padding"),
}

TOKENS: dict[str, Make] = {
    "bert": lambda: hf.BertForTokenClassification(three(bert_config)),
    "deberta": lambda: hf.DebertaV2ForTokenClassification(config(hf.DebertaV2Config)),
    "roberta": lambda: hf.RobertaForTokenClassification(three(roberta_config)),
    "modernbert": lambda: hf.ModernBertForTokenClassification(three(modernbert_config)),
    "qwen3": lambda: hf.Qwen3ForTokenClassification(three(qwen3_config)),
}


def made(make: Make, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    model = make()
    widen(model)
    return model.eval().to(dtype)


def sequences(output: Output) -> list[TokenSequence]:
    random = np.random.default_rng(5)
    ids = [random.integers(3, VOCABULARY, size=length).tolist() for length in (9, 9, 1, 30)]
    return [TokenSequence(each, frozenset({output})) for each in ids]


def run(head: Any, transformer: PackedTransformer, output: Output) -> list[Any]:
    with torch.inference_mode():
        batch = PackedBatch.of(sequences(output), transformer.model.device)
        return list(head(transformer.hidden(batch), batch)())


@pytest.mark.parametrize("kind", ROWS)
def test_the_row_that_a_head_reads_is_found(kind: str) -> None:
    make, row = ROWS[kind]
    whole = made(make)
    transformer = PackedTransformer(whole.base_model)
    head = LabelsHead(whole, transformer, 3)
    assert head.row == row
    expected = [one.logits for one in run_whole_model(whole, sequences(Output.LABELS))]
    layout_checks.choose_layout(transformer, "auto", 40)
    Speedups(transformer, 40).prepack()
    for found, logits in zip(run(head, transformer, Output.LABELS), expected, strict=True):
        assert np.abs(found - logits.numpy()).max() < 2e-5


@pytest.mark.parametrize("kind", TOKENS)
def test_a_head_on_every_token_gives_what_the_whole_model_gives(kind: str) -> None:
    whole = made(TOKENS[kind])
    transformer = PackedTransformer(whole.base_model)
    head = TokenLabelsHead(whole, transformer, 3)
    expected = [one.logits for one in run_whole_model(whole, sequences(Output.TOKEN_LABELS))]
    for found, logits in zip(run(head, transformer, Output.TOKEN_LABELS), expected, strict=True):
        assert found.shape == tuple(logits.shape)
        assert np.abs(found - logits.numpy()).max() < 2e-5


@pytest.mark.parametrize("kind", ROWS)
def test_the_row_is_found_in_bfloat16_too(kind: str) -> None:
    make, row = ROWS[kind]
    whole = made(make, torch.bfloat16)
    assert LabelsHead(whole, PackedTransformer(whole.base_model), 3).row == row


def test_the_last_token_that_is_not_padding_is_read_where_the_architecture_does_so() -> None:
    whole = made(ROWS["qwen3"][0])
    transformer = PackedTransformer(whole.base_model)
    head = LabelsHead(whole, transformer, 3)
    padding = whole.config.pad_token_id
    ids = [[5, 6, 7, padding], [padding, padding], [8, padding, 9]]
    given = [TokenSequence(each, frozenset({Output.LABELS})) for each in ids]
    with torch.inference_mode():
        batch = PackedBatch.of(given, whole.device)
        found = list(head(transformer.hidden(batch), batch)())
    expected = torch.stack([one.logits for one in run_whole_model(whole, given)])
    assert np.abs(np.array(found) - expected.numpy()).max() < 2e-5


def test_a_head_that_reads_more_than_one_row_is_rejected() -> None:
    class Largest(hf.BertForSequenceClassification):  # type: ignore[misc]  # transformers has no types
        def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
            hidden = self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)[0]
            return hf.modeling_outputs.SequenceClassifierOutput(logits=self.classifier(hidden.amax(dim=1)))

    whole = made(lambda: Largest(three(bert_config)))
    with pytest.raises(ConfigError, match="Largest: its head reads neither the first nor the last token"):
        LabelsHead(whole, PackedTransformer(whole.base_model), 3)


def test_a_head_that_mixes_tokens_is_rejected() -> None:
    class Neighbours(hf.BertForTokenClassification):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
            hidden = self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)[0]
            return hf.modeling_outputs.TokenClassifierOutput(logits=self.classifier(hidden + hidden.roll(1, dims=1)))

    whole = made(lambda: Neighbours(three(bert_config)))
    with pytest.raises(ConfigError, match="Neighbours: its head reads more than token vectors"):
        TokenLabelsHead(whole, PackedTransformer(whole.base_model), 3)


def test_another_number_of_labels_than_the_heads_is_rejected() -> None:
    whole = made(ROWS["bert"][0])
    with pytest.raises(ConfigError, match=r"gives \[3\] logits for an input, and there are 2 labels"):
        LabelsHead(whole, PackedTransformer(whole.base_model), 2)


def test_a_transplanted_head_leaves_the_whole_model_as_it_is() -> None:
    whole = made(ROWS["bert"][0])
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = whole(input_ids=ids).logits
        head = TransplantedHead(whole, dtype=torch.float32)
        assert torch.equal(head(whole.base_model(ids)[0]), before)
        assert torch.equal(whole(input_ids=ids).logits, before)
    assert head.parameters() == 3 * 32 + 3


def test_a_masked_language_models_head_shares_its_weights_and_runs_packed() -> None:
    whole = made(lambda: hf.BertForMaskedLM(bert_config(VOCABULARY)))
    head = TransplantedHead(whole)
    alone = run_whole_model(whole, sequences(Output.SPARSE))
    with torch.inference_mode():
        found = head(torch.cat([one.hidden for one in alone]).unsqueeze(0))[0]
    expected = torch.cat([one.logits for one in alone])
    assert float((found - expected).abs().max()) < 2e-5
    assert head.parameters() == 32 * 32 + 32 + 64 + VOCABULARY  # without the embeddings, which the output is tied to


def test_threads_that_call_a_head_at_once_get_their_own_logits() -> None:
    inside = threading.Barrier(2, timeout=60)

    class Meeting(hf.BertForSequenceClassification):  # type: ignore[misc]
        def forward(self, input_ids: Any, **others: Any) -> Any:
            inside.wait()
            given = super().forward(input_ids, **others)
            inside.wait()
            return given

    head = TransplantedHead(made(lambda: Meeting(three(bert_config))))
    alone = TransplantedHead(made(lambda: hf.BertForSequenceClassification(three(bert_config))))
    rows = [torch.randn(size, 1, 32) for size in (2, 3)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda given: head(given).detach(), rows))
    for logits, given in zip(found, rows, strict=True):
        assert torch.allclose(logits, alone(given).detach(), atol=1e-6)


@pytest.mark.parametrize("entries", [[VOCABULARY], [-1]])
def test_entries_that_the_vocabulary_does_not_have_are_rejected(entries: list[int]) -> None:
    whole = made(lambda: hf.Qwen3ForCausalLM(qwen3_config(VOCABULARY)))
    with pytest.raises(ConfigError, match=f"token id {entries[0]} is not one of the {VOCABULARY}"):
        TransplantedHead(whole, entries=entries)
