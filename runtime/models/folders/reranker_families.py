"""Families of rerankers that are language models: how a folder is recognised, what is asked, and which logit is read.

Such folders look like any language model of their class: nothing in config.json says what they were trained to be
asked. Asked another question, or read at other tokens, they give scores that look right and are wrong. So each family
stands here with the formula of its authors, and what is of no family needs the words of its user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.model import Activation
from staged_pool.runtime.models.folders.readme import front_matter, model_card
from staged_pool.runtime.models.specs.model import LogitScoreSpec, PairForm, PairPieces, PairTemplate
from staged_pool.stages.errors import ConfigError

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction that Qwen3-Reranker was trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rerankers that are asked the same way, and what tells their folders."""

    name: str
    source: str
    """Where the authors' formula is published."""
    form: PairForm
    """What they read of a pair."""
    head: LogitScoreSpec
    activation: Activation
    """What makes a score of the logit, in the authors' own answers."""
    score: str
    """The score in words, for the log."""
    in_template: tuple[str, ...] = ()
    """Texts of which one stands in the chat template of the family alone."""
    in_card: tuple[str, ...] = ()
    """Texts of which one stands in the model card of the family alone."""
    files: tuple[str, ...] = ()
    """Files that folders of the family alone have, or name in auto_map."""
    names: re.Pattern[str]
    """Found in names of the folder or repository, in lower case."""


QWEN3: Final = Family(
    name="Qwen3-Reranker",
    source="https://huggingface.co/Qwen/Qwen3-Reranker-0.6B (README.md, Transformers usage)",
    form=PairTemplate(
        text=(
            "<|im_start|>system\n"
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n"
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ),
        instruction=INSTRUCTION,
    ),
    head=LogitScoreSpec(true_token="yes", false_token="no"),
    activation="sigmoid",
    score="the softmax of the logits of yes and no",
    in_template=("Judge whether the Document meets the requirements",),
    in_card=("Judge whether the Document meets the requirements",),
    names=re.compile(r"qwen3[-_.]?reranker"),
)

BGE_GEMMA: Final = Family(
    name="bge-reranker-v2-gemma",
    source="https://github.com/FlagOpen/FlagEmbedding, FlagEmbedding/inference/reranker/decoder_only/base.py",
    form=PairPieces(
        begins=True,
        query="A: {query}",
        between="\n",
        document="B: {document}",
        after=(
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        max_tokens=512,
        counts_after=True,
    ),
    head=LogitScoreSpec(true_token="Yes", false_token=None),
    activation="sigmoid",
    score="the sigmoid of the logit of Yes",
    in_card=("Given a query A and a passage B, determine whether the passage contains an answer to the query by",),
    names=re.compile(r"bge-reranker-v2-gemma"),
)

MXBAI: Final = Family(
    name="mxbai-rerank-v2",
    source="https://github.com/mixedbread-ai/mxbai-rerank, mxbai_rerank/mxbai_rerank_v2.py",
    form=PairPieces(
        before=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n"
        ),
        query="query: {query}",
        instruction="instruction: {instruction}\n",
        between="\n",
        document="document: {document}",
        after=(
            "\n",
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        max_tokens=8192,
    ),
    head=LogitScoreSpec(true_token="1", false_token="0"),
    activation="identity",
    score="the logit of 1 less that of 0",
    in_template=("relevance judgment (0 for not relevant, 1 for relevant)",),
    in_card=("MxbaiRerankV2(", 'CrossEncoder("mixedbread-ai/mxbai-rerank-'),
    names=re.compile(r"mxbai-rerank-[a-z]+-v2"),
)

ZERANK: Final = Family(
    name="zerank",
    source="https://huggingface.co/zeroentropy/zerank-1-small (modeling_zeranker.py), zerank-2 (README.md)",
    form=PairTemplate(roles=("system", "user"), strips=True, arguments={"add_generation_prompt": True}),
    head=LogitScoreSpec(true_token="Yes", false_token=None),
    activation="identity",
    score="the logit of Yes",
    in_card=('CrossEncoder("zeroentropy/zerank-',),
    files=("modeling_zeranker",),
    names=re.compile(r"zerank"),
)

CTXL: Final = Family(
    name="ctxl-rerank-v2",
    source="https://huggingface.co/ContextualAI/ctxl-rerank-v2-instruct-multilingual-1b (README.md)",
    form=PairTemplate(
        text=(
            "Check whether a given document contains information helpful to answer the query.\n"
            "<Document> {document}\n<Query> {query}{instruction} ??"
        ),
        instruction="",
        instruction_format=" {instruction}",
        add_special_tokens=True,
    ),
    head=LogitScoreSpec(true_token=0, false_token=None, rounded=True),
    activation="identity",
    score="the logit of token 0, in bfloat16",
    in_card=("Check whether a given document contains information helpful to answer the query",),
    names=re.compile(r"ctxl-rerank|contextualai.*rerank"),
)

FAMILIES: Final = (QWEN3, BGE_GEMMA, MXBAI, ZERANK, CTXL)


@dataclass(frozen=True, slots=True)
class _Rejected:
    """Rerankers that cannot be served."""

    name: str
    classes: frozenset[str]
    why: str
    names: re.Pattern[str]


_REJECTED: Final = (
    _Rejected(
        "jina-reranker-v3",
        frozenset({"JinaForRanking"}),
        "it reads all documents of a request in one sequence and compares vectors that layers of its own make of it, "
        "so a score depends on the other documents",
        re.compile(r"jina-reranker-v3"),
    ),
    _Rejected(
        "jina-reranker-m0",
        frozenset({"JinaVLForRanking"}),
        "it reads images and texts by code of its own, and its score is made by two layers of its own",
        re.compile(r"jina-reranker-m0"),
    ),
    _Rejected(
        "bge-reranker-v2.5-gemma2-lightweight",
        frozenset({"CostWiseGemmaForCausalLM"}),
        "its code merges tokens between layers and reads scores at inner layers",
        re.compile(r"bge-reranker-v2\.5-gemma2|gemma2-lightweight"),
    ),
    _Rejected(
        "bge-reranker-v2-minicpm-layerwise",
        frozenset({"LayerWiseMiniCPMForCausalLM"}),
        "its code reads scores at inner layers, by a head for each",
        re.compile(r"minicpm-layerwise"),
    ),
)


def check_rejected(path: Path, config: Mapping[str, Any], class_name: str) -> None:
    """Reject a reranker that is known and cannot be served.

    Raises:
        ConfigError: It is one; the message says why, and what else there is.
    """
    names = _names(path, config) if class_name.endswith(("ForCausalLM", "LMHeadModel")) else ""
    for family in _REJECTED:
        if class_name in family.classes or family.names.search(names):
            known = ", ".join(each.name for each in FAMILIES)
            raise ConfigError(
                f"config.json: architectures names {class_name}: {path.name} is {family.name}, which is not "
                f"supported: {family.why}. Rerankers that are language models and are supported: {known}"
            )


def recognise(path: Path, body: Path, config: Mapping[str, Any], chat: str | None) -> tuple[Family, str] | None:
    """The family of a language model, and what told it; None where nothing does.

    Args:
        path: The folder.
        body: Where the transformer's files lie.
        config: `config.json`.
        chat: The chat template.

    Raises:
        ConfigError: What tells the family speaks of two.
    """
    card, names, auto_map = model_card(path), _names(path, config), str(config.get("auto_map", ""))
    tests: tuple[tuple[str, Callable[[Family], bool]], ...] = (
        ("its chat template says", lambda family: any(text in (chat or "") for text in family.in_template)),
        (
            "its files say",
            lambda family: any((body / f"{name}.py").is_file() or name in auto_map for name in family.files),
        ),
        ("its model card says", lambda family: any(text in card for text in family.in_card)),
        ("its name alone says", lambda family: family.names.search(names) is not None),
    )
    for evidence, tells in tests:
        found = [family for family in FAMILIES if tells(family)]
        if len(found) > 1:
            both = " and ".join(family.name for family in found)
            raise ConfigError(
                f"{path.name}: is {both}, as {evidence}, and these are asked differently: say what it is by "
                "score_template and score_tokens (--score-template, --score-tokens)"
            )
        if found:
            return found[0], evidence
    return None


def looks_like_qwen3(config: Mapping[str, Any], body: Path) -> bool:
    """True for a language model of the class and with the chat tokens of Qwen3, as all Qwen3-Rerankers are."""
    if config.get("model_type") != "qwen3":
        return False
    try:
        return b'"<|im_start|>"' in (body / "tokenizer.json").read_bytes()
    except OSError:
        return False


def _names(path: Path, config: Mapping[str, Any]) -> str:
    """Names of the folder and of the repository that it came from, in lower case, one a line."""
    return "\n".join(name.lower() for name in _spelled_names(path, config))


def _spelled_names(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    yield path.name
    whole = path.resolve()
    yield whole.name
    for part in whole.parts:  # the hub's cache: models--owner--name/snapshots/commit
        if part.startswith("models--"):
            yield part.removeprefix("models--").replace("--", "/")
    yield str(config.get("_name_or_path", ""))
    headings = (line for line in model_card(path).splitlines() if line.startswith("# "))
    yield next(headings, "")
    lines = [line.strip() for line in front_matter(path)]
    for place, line in enumerate(lines):
        if line.startswith("base_model:"):
            yield line.partition(":")[2].strip()
            yield lines[place + 1].removeprefix("-").strip() if place + 1 < len(lines) else ""
