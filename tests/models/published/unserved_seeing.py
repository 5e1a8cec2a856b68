"""Models of images and pages that are not served, and the words that say so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.models.published import Layout, rejected
from tests.models.published.unserved import CODE, EMBED, OWN_MODULE, own_code
from tests.models.tiny import EVERY, write_json
from tests.models.tiny.bodies import Body, bert
from tests.models.tiny.hub import after, claims, files

_QWEN_VL: Final = "is a model of texts and images, and nothing in model says how it makes vectors"


def of_images(name: str, model_type: str, **config: Any) -> Body:
    """A class that reads images too, by its config."""
    return after(
        bert,
        claims(name, model_type=model_type, **config),
        lambda folder: write_json(folder / "preprocessor_config.json", {"do_resize": True}),
    )


def first_module(kind: str, body: str) -> Body:
    """A folder whose only module is its own code."""

    def make(folder: Path) -> None:
        EVERY[body](folder)
        write_json(folder / "modules.json", [{"idx": 0, "name": "transformer", "path": "", "type": kind}])

    return make


def without_modules(body: str) -> Body:
    return after(EVERY[body], lambda folder: (folder / "modules.json").unlink(missing_ok=True))


LAYOUTS: Final[Mapping[str, Layout]] = {
    "jinaai/jina-clip-v2": rejected(
        own_code("JinaCLIPModel", "jina_clip", "modeling_clip"), "modeling_clip.JinaCLIPModel", CODE
    ),
    "jinaai/jina-embeddings-v4": rejected(
        first_module("custom_st.Transformer", "qwen2.5-vl"), "custom_st.Transformer", OWN_MODULE, needs="5.5"
    ),
    "jinaai/jina-embeddings-v4 without modules.json": rejected(
        after(
            without_modules("qwen2.5-vl"),
            claims(
                "JinaEmbeddingsV4Model", auto_map={"AutoModel": "modeling_jina_embeddings_v4.JinaEmbeddingsV4Model"}
            ),
        ),
        _QWEN_VL,
        "jina-embeddings-v4-vllm-retrieval",
        needs="5.5",
    ),
    "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct": rejected(
        first_module("custom_st.MultiModalTransformer", "qwen2-vl"),
        "custom_st.MultiModalTransformer",
        OWN_MODULE,
        needs="5.5",
    ),
    "MrLight/dse-qwen2-2b-mrl-v1": rejected(without_modules("qwen2-vl"), _QWEN_VL, EMBED, needs="5.5"),
    "intfloat/mmE5-mllama-11b-instruct": rejected(
        of_images("MllamaForConditionalGeneration", "mllama"), "MllamaForConditionalGeneration", "reads images"
    ),
    "royokong/e5-v": rejected(
        of_images("LlavaNextForConditionalGeneration", "llava_next"),
        "LlavaNextForConditionalGeneration",
        "reads images",
    ),
    "TIGER-Lab/VLM2Vec-Full": rejected(
        of_images("Phi3VForCausalLM", "phi3_v", auto_map={"AutoModelForCausalLM": "modeling_phi3_v.Phi3VForCausalLM"}),
        "modeling_phi3_v.Phi3VForCausalLM",
        CODE,
    ),
    "nvidia/llama-nemoretriever-colembed-1b-v1": rejected(
        own_code("llama_NemoRetrieverColEmbed", "llama_nemoretrievercolembed", "modeling_llama_nemoretrievercolembed"),
        "llama_NemoRetrieverColEmbed",
        CODE,
    ),
    "OFA-Sys/chinese-clip-vit-base-patch16": rejected(
        of_images("ChineseCLIPModel", "chinese_clip", vision_config={}, text_config={}),
        "model_type='chinese_clip' (ChineseCLIPModel) reads images in a way that is not supported",
        "clip, siglip",
    ),
    "Marqo/marqo-ecommerce-embeddings-B": rejected(
        own_code("MarqoFashionSigLIP", "siglip_marqo", "marqo_fashionSigLIP"), "MarqoFashionSigLIP", CODE
    ),
    "timm/ViT-B-16-SigLIP2": rejected(
        files(open_clip_config={"model_cfg": {}}),
        "this is an open_clip model: convert it to the layout of transformers",
    ),
    "timm/vit_base_patch16_dinov3.lvd1689m": rejected(
        files(config={"architecture": "vit_base_patch16_dinov3", "num_features": 768, "pretrained_cfg": {}}),
        "this is a timm model, which is not supported; name one in the layout of transformers",
    ),
}
"""Rejected layouts, by the name of the repository, or of the form."""
