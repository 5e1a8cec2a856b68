"""Rerankers that are language models: their scores are those of their authors' formula, written out here.

The oracle is the folder's own tokenizer.json and transformers alone: the texts below are the authors', the logits are
those of the whole model behind the last token.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.specs.model import DenseSpec
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.requests import MODEL_MAX, Output, PairInput
from staged_pool.runtime.tasks.classify import LABELS_ONLY
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared
from tests.models.loading import ask, rejection
from tests.models.tiny import edit_json, rerankers, write_json, write_modules
from tests.models.tiny.vocabularies import CORPUS

QUERY = "what is a function call"
LONG = " ".join(CORPUS)[:6000]
DOCUMENTS = ["A function call runs a body of code.", "", "One line.\n", "\n\nTwo lines before", LONG]

BGE_PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)
MXBAI_SYSTEM = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 "
    "for not relevant, 1 for relevant).\nRelevance:"
)
QWEN3_CARD = "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note ..."
CTXL_CARD = "Check whether a given document contains information helpful to answer the query.\\n<Document> {doc}"


class Oracle:
    """A folder's tokenizer.json, and its chat template and language model as transformers loads them."""

    def __init__(self, folder: Path) -> None:
        self.file = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        found: list[int] = self.file.encode(text, add_special_tokens=special).ids
        return found

    def logits(self, ids: Sequence[int | None]) -> Any:
        """Return logits of the whole vocabulary, behind the last token."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)])).logits[0, -1].double()

    def bge(self, query: str, document: str, *, max_length: int = 512) -> float:
        """FlagEmbedding's BaseLLMReranker.compute_score_single_gpu."""
        of_query = self.ids("A: " + query)[: max_length * 3 // 4]
        of_document = self.ids("B: " + document)[:max_length]
        separator, prompt = self.ids("\n"), self.ids(BGE_PROMPT)
        first, second = [self.file.token_to_id("<bos>"), *of_query], separator + of_document
        excess = len(first) + len(second) - (max_length + len(separator) + len(prompt))
        second = second[: len(second) - max(excess, 0)]
        return float(self.logits([*first, *second, *separator, *prompt])[self.ids("Yes")[0]])

    def mxbai(self, query: str, document: str, instruction: str | None = None) -> float:
        """MxbaiRerankV2.prepare_inputs and forward."""
        before, separator, task = self.ids(MXBAI_SYSTEM), self.ids("\n"), self.ids(MXBAI_TASK)
        after = self.ids("<|im_end|>\n<|im_start|>assistant\n")
        longest = rerankers.POSITIONS
        frame = len(before) + len(separator) + len(task) + len(after)
        max_length = min(8192, longest - frame)
        asked = f"query: {query}" if not instruction else f"instruction: {instruction}\nquery: {query}"
        of_query = self.ids(asked)[: max_length * 3 // 4]
        of_document = self.ids(f"document: {document}")[: min(longest - len(of_query) - frame, max_length)]
        second = (separator + of_document)[: max_length - len(of_query)]
        logits = self.logits(before + of_query + second + separator + task + after)
        return float(logits[self.ids("1")[0]] - logits[self.ids("0")[0]])

    def zerank_1(self, query: str, document: str) -> float:
        """modeling_zeranker.predict, without the sigmoid at its end."""
        return self.zerank_2(query, document) / 5.0

    def zerank_2(self, query: str, document: str) -> float:
        """The logits that the model card names: those of CrossEncoder.predict."""
        messages = [{"role": "system", "content": query.strip()}, {"role": "user", "content": document.strip()}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return float(self.logits(self.ids(text, special=True))[self.ids("Yes")[0]])

    def ctxl(self, query: str, document: str, instruction: str | None = None) -> float:
        """The model card's infer_w_hf."""
        more = f" {instruction}" if instruction else ""
        text = (
            "Check whether a given document contains information helpful to answer the query.\n"
            f"<Document> {document}\n<Query> {query}{more} ??"
        )
        return float(self.logits(self.ids(text, special=True))[0].to(torch.bfloat16))

    def qwen3(self, query: str, document: str, instruction: str | None = None) -> float:
        """The model card's process_inputs, and the logarithm of the odds of its compute_logits."""
        before = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        )
        looked_for = instruction or "Given a web search query, retrieve relevant passages that answer the query"
        pair = f"<Instruct>: {looked_for}\n<Query>: {query}\n<Document>: {document}"
        after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        logits = self.logits(self.ids(before) + self.ids(pair) + self.ids(after))
        return float(logits[self.ids("yes")[0]] - logits[self.ids("no")[0]])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that their names tell."""
    root = tmp_path_factory.mktemp("rerankers")
    rerankers.gemma(root / "bge-reranker-v2-gemma")
    rerankers.qwen2(root / "mxbai-rerank-base-v2")
    rerankers.qwen3(root / "zerank-1-small")
    rerankers.qwen3(root / "zerank-1")
    rerankers.qwen3(root / "zerank-2")
    rerankers.qwen3(root / "ctxl-rerank-v2-instruct-multilingual-1b")
    rerankers.llama(root / "ctxl-rerank-v2-instruct-multilingual-6b")
    rerankers.qwen3(root / "Qwen3-Reranker-0.6B")
    rerankers.llama(root / "some-llm")
    return root


@functools.cache
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


FAMILIES: list[tuple[str, str, str]] = [
    ("bge-reranker-v2-gemma", "bge", "sigmoid"),
    ("mxbai-rerank-base-v2", "mxbai", "identity"),
    ("zerank-1-small", "zerank_1", "sigmoid"),
    ("zerank-1", "zerank_1", "sigmoid"),
    ("zerank-2", "zerank_2", "identity"),
    ("ctxl-rerank-v2-instruct-multilingual-1b", "ctxl", "identity"),
    ("ctxl-rerank-v2-instruct-multilingual-6b", "ctxl", "identity"),
    ("Qwen3-Reranker-0.6B", "qwen3", "sigmoid"),
]


# The authors' formulas


@pytest.mark.parametrize(("name", "formula", "activation"), FAMILIES)
def test_scores_and_logits_are_those_of_the_authors_formula(
    name: str, formula: str, activation: str, root: Path
) -> None:
    folder, queries = root / name, [QUERY, "ends in a line break\n", "  blanks around  "]
    pairs = [(query, document) for query in queries for document in DOCUMENTS[: -1 if query != QUERY else None]]

    async def question(engine: Engine) -> Any:
        assert (engine.card.scoring, engine.card.activation) == ("cross-encoder", activation)
        texts = [list(side) for side in zip(*pairs, strict=True)]
        plain = await engine.score(*texts, activate=False, max_tokens=MODEL_MAX)
        return plain.scores, (await engine.score(*texts, max_tokens=MODEL_MAX)).scores

    logits, scores = ask(folder, question)
    wanted = np.array(
        [getattr(oracle(folder), formula)(*pair) for pair in pairs if pair[1] is not LONG or _cuts(formula)]
    )
    compared = [place for place, pair in enumerate(pairs) if pair[1] is not LONG or _cuts(formula)]
    assert np.abs(logits[compared] - wanted).max() < _tolerance(formula, wanted)
    assert np.ptp(wanted) > 0.3  # or else a wrong text would pass
    shown = 1 / (1 + np.exp(-wanted)) if activation == "sigmoid" else wanted
    assert np.abs(scores[compared] - shown).max() < _tolerance(formula, wanted)


def _cuts(formula: str) -> bool:
    """True if a long document is cut to the same token as by its authors."""
    return formula in ("bge", "mxbai")


def _tolerance(formula: str, logits: Any) -> float:
    return 0.04 * float(np.abs(logits).max()) if formula == "ctxl" else 5e-5  # a rounding to bfloat16 may go either way


@pytest.mark.parametrize(
    "name", ["mxbai-rerank-base-v2", "ctxl-rerank-v2-instruct-multilingual-1b", "Qwen3-Reranker-0.6B"]
)
def test_an_instruction_stands_where_the_authors_put_it(name: str, root: Path) -> None:
    formula = next(how for folder, how, _ in FAMILIES if folder == name)
    found = ask(
        root / name,
        lambda engine: engine.score(QUERY, DOCUMENTS[:2], activate=False, instruction="prefer short ones"),
    )
    compute = getattr(oracle(root / name), formula)
    wanted = np.array([compute(QUERY, document, "prefer short ones") for document in DOCUMENTS[:2]])
    without = np.array([compute(QUERY, document) for document in DOCUMENTS[:2]])
    assert np.abs(found.scores - wanted).max() < _tolerance(formula, wanted)
    assert np.abs(wanted - without).max() > _tolerance(formula, wanted)


@pytest.mark.parametrize("name", ["bge-reranker-v2-gemma", "zerank-1-small", "zerank-2"])
def test_an_instruction_without_a_place_is_rejected(name: str, root: Path) -> None:
    with pytest.raises(InvalidInput, match="takes no instruction"):
        ask(root / name, lambda engine: engine.score(QUERY, DOCUMENTS[:1], instruction="prefer short ones"))


def test_long_queries_and_documents_are_cut_by_the_authors_rules(root: Path) -> None:
    """The query is cut to three quarters of 512 tokens, the document to the rest; the suffix stays."""
    folder, long_query = root / "bge-reranker-v2-gemma", LONG[::-1]
    pairs = [(LONG, LONG), (LONG, "short"), (QUERY, LONG), (long_query, LONG)]
    queries, documents = [list(side) for side in zip(*pairs, strict=True)]
    found = ask(folder, lambda engine: engine.score(queries, documents, activate=False, max_tokens=MODEL_MAX))
    wanted = [oracle(folder).bge(*pair) for pair in pairs]
    assert np.abs(found.scores - wanted).max() < 5e-5
    uncut = oracle(folder).bge(QUERY, LONG, max_length=rerankers.POSITIONS // 2)
    assert abs(uncut - wanted[2]) > 1e-3


def test_a_limit_of_the_request_is_one_on_the_whole_sequence(root: Path) -> None:
    folder = root / "bge-reranker-v2-gemma"
    frame = len(oracle(folder).ids(BGE_PROMPT)) + 1

    async def question(engine: Engine) -> Any:
        results = [await engine.score(QUERY, [LONG], activate=False, max_tokens=limit) for limit in (300, 700, 1500)]
        with pytest.raises(InvalidInput, match="maximum context length"):
            await engine.score(QUERY, [LONG * 9])
        with pytest.raises(InvalidInput, match=f"more than the limit of {frame - 2}"):
            await engine.score(QUERY, [LONG], max_tokens=frame - 2)
        return results

    for limit, result in zip((300, 700, 1500), ask(folder, question), strict=True):
        assert limit - frame < result.usage.prompt_tokens <= limit
        wanted = oracle(folder).bge(QUERY, LONG, max_length=limit - 1 - 2 * frame)
        assert abs(float(result.scores[0]) - wanted) < 5e-5


def test_limits_of_query_and_document_come_first(root: Path) -> None:
    folder = root / "mxbai-rerank-base-v2"
    texts = oracle(folder)
    offsets = texts.file.encode(LONG, add_special_tokens=False).offsets

    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    pair = PairInput(first=LONG, second=LONG, max_first_tokens=5, max_second_tokens=9)
    (prepared,) = model.preprocess([ModelInput(pair, LABELS_ONLY)])
    assert isinstance(prepared, Prepared)
    (row,) = model.forward([prepared.payload])
    assert isinstance(row, Row)
    wanted = texts.mxbai(LONG[: offsets[4][1]], LONG[: offsets[8][1]])
    assert abs(float(row.values[Output.LABELS][0]) - wanted) < 5e-5  # type: ignore[index]


def test_pieces_are_tokenized_apart(root: Path) -> None:
    """Two line breaks are one token in a text, and two behind a query."""
    texts = oracle(root / "mxbai-rerank-base-v2")
    assert len(texts.ids("\n\n")) == 1
    whole = texts.logits(
        texts.ids(f"{MXBAI_SYSTEM}query: a\n\ndocument: b\n{MXBAI_TASK}<|im_end|>\n<|im_start|>assistant\n")
    )
    joined = float(whole[texts.ids("1")[0]] - whole[texts.ids("0")[0]])
    found = ask(root / "mxbai-rerank-base-v2", lambda engine: engine.score("a\n", ["b"]))
    assert abs(float(found.scores[0]) - texts.mxbai("a\n", "b")) < 5e-5
    assert abs(float(found.scores[0]) - joined) > 1e-3


# Recognition of families


CARDS: list[tuple[Callable[[Path], Path], str, str]] = [
    (rerankers.gemma, f'---\nlicense: gemma\n---\n# Reranker\n    prompt = "{BGE_PROMPT}"\n', "bge-reranker-v2-gemma"),
    (rerankers.qwen2, '---\n---\nmodel = MxbaiRerankV2("mixedbread-ai/mxbai-rerank-base-v2")\n', "mxbai-rerank-v2"),
    (rerankers.qwen2, "---\nbase_model:\n- mixedbread-ai/mxbai-rerank-large-v2\n---\nQuantized.\n", "mxbai-rerank-v2"),
    (rerankers.qwen3, '---\n---\nmodel = CrossEncoder("zeroentropy/zerank-1-small")\n', "zerank-1"),
    (rerankers.qwen3, '---\n---\nmodel = CrossEncoder("zeroentropy/zerank-2")\n', "zerank-2"),
    (rerankers.qwen3, f"    prompt = f\"{CTXL_CARD}\"\n", "ctxl-rerank-v2"),
    (rerankers.qwen3, f"    prefix = '{QWEN3_CARD}'\n", "Qwen3-Reranker"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text", "family"), CARDS)
def test_the_model_card_tells_the_family_whatever_the_folder_is_called(
    make: Callable[[Path], Path], text: str, family: str, tmp_path: Path
) -> None:
    folder = rerankers.card(make(tmp_path / "model"), text)
    for task in ("auto", "score"):
        read = read_folder(folder, task=task)
        assert read.scoring == "cross-encoder"
        assert f"read as {family}" in read.notes[0]


def test_the_hubs_cache_and_older_configs_tell_the_family(tmp_path: Path) -> None:
    cached = tmp_path / "models--BAAI--bge-reranker-v2-gemma" / "snapshots" / "0f1e"
    rerankers.gemma(cached)
    assert "its name alone says" in read_folder(cached).notes[0]
    moved = shutil.copytree(cached, tmp_path / "moved")
    edit_json(moved / "config.json", _name_or_path="mixedbread-ai/mxbai-rerank-large-v2")
    assert "read as mxbai-rerank-v2" in read_folder(moved).notes[0]


def test_a_card_goes_before_a_name_and_files_before_both(tmp_path: Path) -> None:
    folder = rerankers.card(rerankers.qwen3(tmp_path / "qwen3-reranker-like"), CARDS[-2][1])
    assert "read as ctxl-rerank-v2, as its model card says" in read_folder(folder).notes[0]
    edit_json(folder / "config.json", auto_map={"AutoConfig": "modeling_zeranker.ZEConfig"})
    assert "read as zerank-1, as its files say" in read_folder(folder).notes[0]
    with_code = rerankers.qwen3(tmp_path / "zerank-2")
    assert "read as zerank-2, as its name alone says" in read_folder(with_code).notes[0]
    (with_code / "modeling_zeranker.py").touch()  # as it was before it had files of sentence-transformers
    assert "read as zerank-1, as its files say" in read_folder(with_code).notes[0]
    both = rerankers.card(rerankers.qwen3(tmp_path / "both"), CARDS[-2][1] + CARDS[-1][1])
    assert "Qwen3-Reranker and ctxl-rerank-v2" in rejection(both)


def test_a_known_reranker_gives_vectors_where_the_user_says_so(root: Path) -> None:
    (spec,) = read_folder(root / "bge-reranker-v2-gemma", task="embed").heads
    assert isinstance(spec, DenseSpec)
    assert spec.pooling == ("lasttoken",)


def test_the_card_of_a_loaded_model_says_what_was_assumed(root: Path) -> None:
    note, *_ = load_model(EngineConfig(model=str(root / "mxbai-rerank-base-v2"))).card.notes
    assert note.startswith("read as mxbai-rerank-v2, as its name alone says; score: the logit of 1 less that of 0")


# Rerankers that cannot be served


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("JinaForRanking", "jina-reranker-v3, which is not supported: it reads all documents"),
        ("CostWiseGemmaForCausalLM", "bge-reranker-v2.5-gemma2-lightweight, which is not supported"),
        ("LayerWiseMiniCPMForCausalLM", "bge-reranker-v2-minicpm-layerwise, which is not supported"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"task": "score"}, {"task": "embed"}, {"score_tokens": "yes,no"}])
def test_rerankers_that_are_known_and_not_supported_say_why(
    name: str, why: str, settings: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(root / "some-llm", tmp_path / "model")
    edit_json(folder / "config.json", architectures=[name], is_causal=False)
    assert why in rejection(folder, **settings)


@pytest.mark.parametrize("name", ["jina-reranker-v3-mlx", "bge-reranker-v2.5-gemma2-lightweight"])
def test_their_names_are_enough(name: str, root: Path, tmp_path: Path) -> None:
    assert "which is not supported" in rejection(shutil.copytree(root / "some-llm", tmp_path / name), task="score")


# Language models of which nothing is known


def test_a_language_model_of_which_nothing_is_known_is_rejected(root: Path) -> None:
    message = rejection(root / "some-llm")
    assert message.startswith("config.json: LlamaForCausalLM is a language model, and nothing in some-llm says")
    for way_out in ("--task embed", "--task score", "--score-template", "--score-tokens"):
        assert way_out in message


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, "Set score_template and score_tokens"),
        ({"score_template": "{query} {document}"}, "Set score_tokens (--score-tokens yes,no)"),
        ({"score_tokens": "yes,no"}, "Set score_template (--score-template"),
    ],
)
def test_it_scores_only_with_a_template_and_tokens(settings: dict[str, Any], missing: str, root: Path) -> None:
    assert missing in rejection(root / "some-llm", task="score", **settings)


@pytest.mark.parametrize(
    "line", ["pipeline_tag: sentence-similarity", "tags:\n- feature-extraction", "library_name: sentence-transformers"]
)
def test_a_language_model_whose_card_calls_it_an_embedder_gives_vectors(line: str, root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "some-llm", tmp_path / "model")
    rerankers.card(folder, f"---\n{line}\n---\n")
    read = read_folder(folder)
    assert read.scoring == "bi-encoder"
    assert "lasttoken pooling" in read.notes[0]
    rerankers.card(folder, f"---\n{line}\npipeline_tag: text-ranking\n---\n")
    assert "is a language model" in rejection(folder)


def test_qwen3_is_asked_qwen3_rerankers_question_where_the_user_says_that_it_scores(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "Qwen3-Reranker-0.6B", tmp_path / "model")
    assert "is a language model" in rejection(folder)
    assert "assumed to be a Qwen3-Reranker" in read_folder(folder, task="score").warnings[0]
    note, *_ = load_model(EngineConfig(model=str(folder), task="score")).card.notes
    assert "the softmax of the logits of yes and no" in note


def test_models_with_an_lm_head_of_another_name_are_language_models_too(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "some-llm", tmp_path / "model")
    edit_json(folder / "config.json", architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel is a language model" in rejection(folder)
    assert "say which prompt it was trained with" in rejection(folder, task="score")


# Sequence classifiers that were made of such rerankers


def test_a_sequence_classifier_made_of_a_reranker_scores_as_transformers_does_and_says_what_it_is_not_asked(
    root: Path, tmp_path: Path
) -> None:
    """One row for yes less no, as the conversions have it; the question is written into the texts."""
    whole = oracle(root / "Qwen3-Reranker-0.6B")
    config = transformers.AutoConfig.from_pretrained(root / "Qwen3-Reranker-0.6B", num_labels=1)
    converted = transformers.Qwen3ForSequenceClassification(config)
    converted.model.load_state_dict(whole.model.model.state_dict())
    yes, no = (whole.ids(answer)[0] for answer in ("yes", "no"))
    rows = whole.model.lm_head.weight.detach()
    converted.score.weight.data = (rows[yes] - rows[no]).unsqueeze(0).clone()
    folder = tmp_path / "Qwen3-Reranker-0.6B-seq-cls"
    converted.save_pretrained(folder)
    whole.tokenizer.save_pretrained(folder)
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    asked = "Given a web search query, retrieve relevant passages that answer the query"
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    query = f"{before}<Instruct>: {asked}\n<Query>: {QUERY}\n"
    documents = [f"<Document>: {document}{after}" for document in DOCUMENTS[:2]]

    async def question(engine: Engine) -> Any:
        assert "without the question that it was trained with" in engine.card.notes[0]
        return (await engine.score(query, documents, activate=False)).scores

    wanted = [whole.qwen3(QUERY, document) for document in DOCUMENTS[:2]]
    assert np.abs(ask(folder, question) - wanted).max() < 5e-5
    template = f"{before}<Instruct>: {{instruction}}\n<Query>: {{query}}\n<Document>: {{document}}{after}"
    by_template = ask(
        folder, lambda engine: engine.score(QUERY, DOCUMENTS[:2], activate=False), score_template=template
    )
    assert np.abs(by_template.scores - wanted).max() < 5e-5


# The user's own template and tokens


@pytest.mark.parametrize(("tokens", "task"), [("Yes,no", "auto"), ("yes , no", "score"), ("Yes", "score")])
def test_tokens_and_template_of_the_user_make_the_score(tokens: str, task: str, root: Path) -> None:
    folder, template = root / "some-llm", "<bos>Q: {query}\nD: {document}\nRelevant ({instruction})?"

    async def question(engine: Engine) -> Any:
        texts = (QUERY, DOCUMENTS[:3])
        plain = await engine.score(*texts, activate=False, instruction="any")
        return plain.scores, (await engine.score(*texts, instruction="any")).scores, engine.card.notes

    logits, scores, notes = ask(folder, question, task=task, score_template=template, score_tokens=tokens)
    true, *false = [oracle(folder).ids(token.strip())[0] for token in tokens.split(",")]
    rows = [
        oracle(folder).logits(oracle(folder).ids(f"<bos>Q: {QUERY}\nD: {document}\nRelevant (any)?"))
        for document in DOCUMENTS[:3]
    ]
    wanted = np.array([float(row[true] - row[false[0]] if false else row[true]) for row in rows])
    assert np.abs(logits - wanted).max() < 5e-5
    softmax = [float(torch.softmax(row[[true, *false]], dim=0)[0]) for row in rows]
    assert np.abs(scores - (softmax if false else wanted)).max() < 5e-5
    assert "the softmax of the logits of" in notes[0] if false else "the logit of Yes" in notes[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_tokens": "a,b,c"}, "score_tokens='a,b,c': must be the token that means yes"),
        ({"score_tokens": ("yes", "no")}, "score_tokens=('yes', 'no'): must be a text"),
        ({"score_tokens": "yes,"}, "score_tokens='yes,': must be"),
        ({"score_tokens": "yes,yes"}, "score_tokens='yes,yes': must be"),
        ({"score_tokens": ""}, "score_tokens='': must be"),
        ({"score_template": "{query}"}, "must have one field {document}, has 0"),
        ({"score_template": "{document} {doc}"}, "must have one field {query}, has 0"),
        ({"score_template": "{query} {query} {document}"}, "must have one field {query}, has 2"),
        ({"score_tokens": "irrelevantly,no", "score_template": "{query}{document}"}, "no token 'irrelevantly'"),
        ({"score_tokens": "yes,日本", "score_template": "{query}{document}"}, "no token '日本'"),
    ],
)
def test_tokens_and_templates_that_cannot_be_used_are_named(settings: dict[str, Any], message: str, root: Path) -> None:
    assert message in rejection(root / "some-llm", task="score", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_template": "{query} {document}"}, "score_template='{query} {document}': bge-reranker-v2-gemma is"),
        ({"score_tokens": "yes,no"}, "score_tokens='yes,no': bge-reranker-v2-gemma is"),
    ],
)
def test_half_a_recipe_beside_that_of_a_known_family_is_rejected(
    settings: dict[str, Any], message: str, root: Path
) -> None:
    assert message in rejection(root / "bge-reranker-v2-gemma", **settings)
    note = read_folder(root / "bge-reranker-v2-gemma", score_template="{query} {document}", score_tokens="yes,no").notes
    assert "replaces the prompt and tokens that bge-reranker-v2-gemma was trained with" in note[0]
    assert read_folder(root / "bge-reranker-v2-gemma", score_tokens="Yes").notes  # its authors read this token, too


def test_answers_that_are_one_token_are_rejected(tmp_path: Path) -> None:
    folder = rerankers.qwen3(tmp_path / "model")
    write_modules(folder, ("LogitScore", {"true_token_id": 7, "false_token_id": 7}))
    write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    message = "the answers 7 and 7 are both token 7 of this tokenizer: every score would be the same"
    assert rejection(folder) == message


def test_an_answer_that_is_read_as_another_is_named(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "some-llm", tmp_path / "model")
    edit_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    message = rejection(folder, task="score", score_template="{query} {document}", score_tokens="YES,no")
    assert message.endswith("no token 'YES', so the model cannot be asked for it: it is read as 'yes'")


def test_of_several_chat_templates_the_default_one_is_for_pairs(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "some-llm", tmp_path / "model")
    text = "{% for m in messages if m.role in ('query', 'document') %}{{ m.content }}{% endfor %}"
    named = [{"name": "tool_use", "template": "{{ messages }}"}, {"name": "default", "template": text}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert "read as the chat template says" in read_folder(folder, score_tokens="yes,no").notes[0]


def test_a_line_break_that_a_shell_has_left_as_two_characters_is_said(root: Path) -> None:
    settings: dict[str, Any] = {"score_template": "Q: {query}\\nD: {document}", "score_tokens": "yes,no"}
    assert "not a line break" in read_folder(root / "some-llm", **settings).notes[-1]
    settings["score_template"] = settings["score_template"].replace("\\n", "\n")
    assert len(read_folder(root / "some-llm", **settings).notes) == 1


def test_tokens_are_for_language_models_alone(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "some-llm", tmp_path / "model")
    assert "score_tokens='yes,no': this model is not an LLM reranker" in rejection(
        folder, task="embed", score_tokens="yes,no"
    )
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"], id2label={"0": "x"})
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "score_tokens='yes,no': this model is not an LLM reranker" in rejection(folder, score_tokens="yes,no")
