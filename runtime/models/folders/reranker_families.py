"""Known families of LLM rerankers: signs of their folders, prompts and score tokens.

Such a folder looks like any language model of its class: config.json does not name the prompt it was trained with. With
another prompt or other score tokens, scores look right and are wrong. So each family is listed here with its authors'
formula. A reranker of no known family needs its user's settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.card import Activation
from staged_pool.runtime.models.folders.readme import model_card
from staged_pool.runtime.models.folders.repository_names import repository_names
from staged_pool.runtime.models.specs.model import LogitScoreSpec
from staged_pool.runtime.models.specs.pair_forms import PairForm, PairPieces, PairTemplate
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.foreign_file import BadFile, read_file

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction that Qwen3-Reranker was trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerFamily:
    """LLM rerankers with the same prompt and score tokens, and the signs of their folders."""

    name: str
    source: str
    """URL or file of the authors' formula."""
    form: PairForm
    """The prompt of a pair."""
    head: LogitScoreSpec
    activation: Activation
    """Maps the logit to the score, as in the authors' own examples."""
    score: str
    """The score in words, for the log."""
    in_template: tuple[str, ...] = ()
    """Texts that identify the family's chat template: one of them is enough."""
    in_card: tuple[str, ...] = ()
    """Texts that identify the family's model card: one of them is enough."""
    files: tuple[str, ...] = ()
    """Python files that only this family's folders have, or name in auto_map."""
    names: re.Pattern[str]
    """Pattern of the folder's or repository's name, in lower case."""
    model_type: str | None = None
    """`model_type` of a family that reads images. None: the family reads texts."""
    pixels: tuple[int, int] | None = None
    """Fewest and most pixels of its images, by the authors. None: as the image processor says."""


QWEN3: Final = RerankerFamily(
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

QWEN3_VL: Final = RerankerFamily(
    name="Qwen3-VL-Reranker",
    source="https://huggingface.co/Qwen/Qwen3-VL-Reranker-2B (scripts/qwen3_vl_reranker.py)",
    form=PairTemplate(
        text=(
            "<|im_start|>system\n"
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n"
            "<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}<|im_end|>\n<|im_start|>assistant\n"
        ),
        instruction="Given a search query, retrieve relevant candidates that answer the query.",
        empty="NULL",
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    head=LogitScoreSpec(true_token="yes", false_token="no"),
    activation="sigmoid",
    score="the sigmoid of the logit of yes less that of no",
    in_template=("Judge whether the Document meets the requirements",),
    names=re.compile(r"qwen3[-_.]?vl[-_.]?reranker"),
    model_type="qwen3_vl",
    pixels=(4 * 32**2, 1280 * 32**2),
)

BGE_GEMMA: Final = RerankerFamily(
    name="bge-reranker-v2-gemma",
    source="https://github.com/FlagOpen/FlagEmbedding, FlagEmbedding/inference/reranker/decoder_only/base.py",
    form=PairPieces(
        starts_with_bos=True,
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

MXBAI: Final = RerankerFamily(
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

_ZERANK: Final = PairTemplate(roles=("system", "user"), strips=True, arguments={"add_generation_prompt": True})

ZERANK_1: Final = RerankerFamily(
    name="zerank-1",
    source="https://huggingface.co/zeroentropy/zerank-1-small (modeling_zeranker.py)",
    form=_ZERANK,
    head=LogitScoreSpec(true_token="Yes", false_token=None, divisor=5.0),
    activation="sigmoid",
    score="the sigmoid of a fifth of the logit of Yes",
    in_card=('CrossEncoder("zeroentropy/zerank-1',),
    files=("modeling_zeranker",),
    names=re.compile(r"zerank[-_.]?1"),
)

ZERANK_2: Final = RerankerFamily(
    name="zerank-2",
    source="https://huggingface.co/zeroentropy/zerank-2 (README.md)",
    form=_ZERANK,
    head=LogitScoreSpec(true_token="Yes", false_token=None),
    activation="identity",
    score="the logit of Yes",
    in_card=('CrossEncoder("zeroentropy/zerank-2',),
    names=re.compile(r"zerank[-_.]?2"),
)

CTXL: Final = RerankerFamily(
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
    names=re.compile(r"ctxl-rerank|contextualai.{0,100}rerank"),
)

FAMILIES: Final = (QWEN3, QWEN3_VL, BGE_GEMMA, MXBAI, ZERANK_1, ZERANK_2, CTXL)


@dataclass(frozen=True, slots=True)
class _UnsupportedFamily:
    """Rerankers that are known but not supported."""

    name: str
    classes: frozenset[str]
    why: str
    names: re.Pattern[str]


_UNSUPPORTED: Final = (
    _UnsupportedFamily(
        "jina-reranker-v3",
        frozenset({"JinaForRanking"}),
        "it reads all documents of a request in one sequence and compares vectors from its own layers, so a score "
        "depends on the other documents",
        re.compile(r"jina-reranker-v3"),
    ),
    _UnsupportedFamily(
        "bge-reranker-v2.5-gemma2-lightweight",
        frozenset({"CostWiseGemmaForCausalLM"}),
        "its code merges tokens between layers and computes scores at inner layers",
        re.compile(r"bge-reranker-v2\.5-gemma2|gemma2-lightweight"),
    ),
    _UnsupportedFamily(
        "bge-reranker-v2-minicpm-layerwise",
        frozenset({"LayerWiseMiniCPMForCausalLM"}),
        "its code computes scores at inner layers, with one head per layer",
        re.compile(r"minicpm-layerwise"),
    ),
)


def reject_unsupported(path: Path, config: Mapping[str, Any], class_name: str) -> None:
    """Reject a reranker that is known but not supported.

    Raises:
        ConfigError: Names the reranker, the reason, and the supported families.
    """
    names = repository_names(path, config) if class_name.endswith(("ForCausalLM", "LMHeadModel")) else ""
    for family in _UNSUPPORTED:
        if class_name in family.classes or family.names.search(names):
            known = ", ".join(each.name for each in FAMILIES)
            raise ConfigError(
                f"config.json: architectures names {class_name}: {path.name} is {family.name}, which is not "
                f"supported: {family.why}. Supported LLM rerankers: {known}"
            )


def find_family(
    path: Path, body: Path, config: Mapping[str, Any], chat: str | None
) -> tuple[RerankerFamily, str] | None:
    """Find an LLM reranker's family by its chat template, files, model card or name.

    Args:
        path: The model folder.
        body: The folder with the transformer's files.
        config: `config.json`.
        chat: The chat template.

    Returns:
        The family, and the evidence in words. None: no family is recognised.

    Raises:
        ConfigError: The evidence fits two families.
    """
    card, names, auto_map = model_card(path), repository_names(path, config), str(config.get("auto_map", ""))
    tests: tuple[tuple[str, Callable[[RerankerFamily], bool]], ...] = (
        ("its chat template says", lambda family: any(text in (chat or "") for text in family.in_template)),
        (
            "its files say",
            lambda family: any((body / f"{name}.py").is_file() or name in auto_map for name in family.files),
        ),
        ("its model card says", lambda family: any(text in card for text in family.in_card)),
        ("its name alone says", lambda family: family.names.search(names) is not None),
    )
    kind = config.get("model_type")
    images = {family.model_type for family in FAMILIES} - {None}
    families = [family for family in FAMILIES if family.model_type == (kind if kind in images else None)]
    for evidence, matches in tests:
        found = [family for family in families if matches(family)]
        if len(found) > 1:
            both = " and ".join(family.name for family in found)
            raise ConfigError(
                f"{path.name}: is {both}, as {evidence}, but their prompts differ: set score_template and score_tokens "
                "(--score-template, --score-tokens)"
            )
        if found:
            return found[0], evidence
    return None


def looks_like_qwen3(config: Mapping[str, Any], body: Path) -> bool:
    """True for a model of Qwen3's class with its chat tokens, as every Qwen3-Reranker is."""
    if config.get("model_type") != "qwen3":
        return False
    try:
        return b'"<|im_start|>"' in read_file(body / "tokenizer.json")
    except (OSError, BadFile):
        return False
