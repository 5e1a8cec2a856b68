"""Fused layers: equal results, and no other layer is mistaken for one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import structlog
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.activations import ACT2FN

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.kernels.attention import PACKED
from staged_pool.runtime.models.kernels.encoder_layers import Group, Layer, layers_as_one_call, run_layers
from staged_pool.runtime.models.kernels.linear import PrepackedLinear, Product, prepack_linears
from staged_pool.runtime.models.kernels.optional_torch import optional_torch
from staged_pool.runtime.models.kernels.self_check import difference
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.towers.image import ImageTower
from staged_pool.runtime.models.transformer import layout_checks
from staged_pool.runtime.models.transformer.fused import FusedLayers, fuse_layers, fusible_layers
from staged_pool.runtime.models.transformer.layer_patterns import match_layer
from staged_pool.runtime.models.transformer.packed_transformer import PackedTransformer
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.speedups import Speedups
from staged_pool.runtime.models.vision.patches import PatchLinear, flatten_patches
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.dtypes import MULTIPLIED
from tests.models.requests import text_tower
from tests.models.tiny.bodies import widen
from tests.needed import needs
from tests.support.logs import captured_logs

Settings = dict[str, Any]

LAYERS = 2
VOCABULARY = 60
_SIZE: Settings = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT: Settings = {**_SIZE, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_CLIP: Settings = {**_TEXT, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_PIXELS: Settings = {**_SIZE, "image_size": 32, "patch_size": 8}

TEXTS: Mapping[str, tuple[Settings, int]] = {
    "Bert": (_TEXT, LAYERS),
    "Roberta": (_TEXT, LAYERS),
    "XLMRoberta": (_TEXT, LAYERS),
    "Camembert": (_TEXT, LAYERS),
    "Electra": ({**_TEXT, "embedding_size": 16}, LAYERS),
    "Data2VecText": (_TEXT, LAYERS),
    "Ernie": (_TEXT, LAYERS),
    "DistilBert": (
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 64},
        LAYERS,
    ),
    "CLIPText": (_CLIP, LAYERS),
    "SiglipText": (_CLIP, LAYERS),
    "Siglip2Text": (_CLIP, LAYERS),
    "MPNet": (_TEXT, 0),
    "RoFormer": ({**_TEXT, "embedding_size": 32}, 0),
    "JinaEmbeddingsV3": (_TEXT, 0),
}
"""Settings, and how many layers can be fused. Those of MPNet add a table to the scores of attention, the last two turn
queries and keys by their positions."""

IMAGES: Mapping[str, Settings] = {
    "CLIPVision": _PIXELS,
    "SiglipVision": _PIXELS,
    "ViT": _PIXELS,
    "DeiT": _PIXELS,
    "Dinov2": _PIXELS,
}

FUSED_SINCE = {"ViT": "5.9", "DeiT": "5.9", "Dinov2": "5.18"}
"""The first transformers whose layers have the structure that is fused; those before it run as they are."""

SAME = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest distance by dtype, as `difference` measures it."""


def since(name: str, architecture: str | None = None) -> Any:
    """A row of a test that wants this architecture fused."""
    first = FUSED_SINCE.get(architecture or name, "5.0")
    return pytest.param(name, marks=needs("transformers", first, f"{architecture or name} with layers that are fused"))


def made(name: str, settings: Settings, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    torch.manual_seed(3)
    model = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**settings, **others))
    widen(model)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("lambda1"):
                parameter.normal_(1, 0.3)
    return model.eval().to(dtype)


@pytest.fixture(autouse=True)
def narrow_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of models as small as these are cut, too."""


def fuse(model: nn.Module, product: Product | None = None) -> tuple[int, Callable[[], None]]:
    restore = fuse_layers(fusible_layers(model), product)
    return sum(len(module.layers) for module in model.modules() if isinstance(module, FusedLayers)), restore


def tokens() -> list[TokenSequence]:
    random = np.random.default_rng(5)
    lengths = (9, 9, 1, 1, 30, 9)
    return [TokenSequence(random.integers(3, VOCABULARY, size=length).tolist(), DENSE_ONLY) for length in lengths]


def run(transformer: PackedTransformer, sequences: Sequence[TokenSequence]) -> Tensor:
    with torch.inference_mode():
        return transformer.hidden(PackedBatch.of(sequences, transformer.model.device))


def look_up(model: Any) -> Tensor:
    with torch.inference_mode():
        hidden: Tensor = model(input_ids=torch.tensor([[5, 6, 7], [8, 9, 4]])).last_hidden_state
        return hidden.flatten(0, 1)


def look(model: Any, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        seen: Tensor = model(pixel_values=pixels).last_hidden_state
        return seen.flatten(0, 1)


@pytest.mark.parametrize(("product", "dtype"), MULTIPLIED)
@pytest.mark.parametrize("layout", ["auto", "padded"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_model_computes_what_it_did(name: str, layout: Any, product: Product, dtype: torch.dtype) -> None:
    settings, layers = TEXTS[name]
    transformer = PackedTransformer(made(name, settings, dtype))
    layout_checks.check_positions(transformer)
    layout_checks.choose_layout(transformer, layout, 40)
    before = run(transformer, tokens())
    found, restore = fuse(transformer.model, product)
    assert found == layers
    assert difference(run(transformer, tokens()), before) < SAME[dtype]
    alone = torch.cat([run(transformer, [one]) for one in tokens()])
    assert difference(alone, before) < SAME[dtype]
    turned = torch.cat(
        list(run(transformer, tokens()[::-1]).split_with_sizes([len(one.ids) for one in tokens()[::-1]]))[::-1]
    )
    assert difference(turned, before) < SAME[dtype]
    restore()
    assert torch.equal(run(transformer, tokens()), before)


@pytest.mark.parametrize("name", ["Bert", "DistilBert"])
def test_tokens_that_are_not_attended_to_stay_so(name: str) -> None:
    transformer = PackedTransformer(made(name, TEXTS[name][0]))
    assert layout_checks.choose_layout(transformer, "packed", 40) is None
    expanded = [TokenSequence([*one.ids, 4, 4, 4], DENSE_ONLY, unseen_tokens=3) for one in tokens()]
    before = run(transformer, expanded)
    assert difference(run(transformer, [TokenSequence(one.ids, DENSE_ONLY) for one in expanded]), before) > 0.05
    assert fuse(transformer.model)[0] == LAYERS
    assert difference(run(transformer, expanded), before) < SAME[torch.float32]


@pytest.mark.parametrize("name", ["Bert", "DistilBert"])
def test_the_layout_may_be_chosen_after_fusing(name: str) -> None:
    transformer = PackedTransformer(made(name, TEXTS[name][0]))
    padded = run(transformer, tokens())
    fuse(transformer.model)
    assert layout_checks.choose_layout(transformer, "packed", 40) is None
    assert difference(run(transformer, tokens()), padded) < SAME[torch.float32]
    transformer.model.set_attn_implementation("eager")
    transformer.layout = "padded"
    assert difference(run(transformer, tokens()), padded) < SAME[torch.float32]


@pytest.mark.parametrize(("product", "dtype"), MULTIPLIED)
@pytest.mark.parametrize("name", [since(name) for name in IMAGES])
def test_a_vision_model_computes_what_it_did(name: str, product: Product, dtype: torch.dtype) -> None:
    model = made(name, IMAGES[name], dtype)
    pixels = torch.randn(3, 3, 32, 32).to(dtype)
    before = look(model, pixels)
    found, restore = fuse(model, product)
    assert found == LAYERS
    assert difference(look(model, pixels), before) < SAME[dtype]
    assert difference(torch.cat([look(model, one.unsqueeze(0)) for one in pixels]), before) < SAME[dtype]
    back = flatten_patches(model)
    assert any(isinstance(module, PatchLinear) for module in model.modules())
    if product == "fused":
        prepack_linears(model)
    assert difference(look(model, pixels), before) < SAME[dtype]
    restore()
    back()
    assert not any(isinstance(module, FusedLayers | PatchLinear) for module in model.modules())


def test_images_of_any_shape_are_masked_as_they_were() -> None:
    model = made("Siglip2Vision", {**_SIZE, "num_patches": 16, "patch_size": 8})
    mask = torch.arange(20) < torch.tensor([[20], [12]])
    given = {"pixel_attention_mask": mask.long(), "spatial_shapes": torch.tensor([[4, 5], [3, 4]])}
    rows = torch.randn(2, 20, 3 * 64)
    with torch.inference_mode():
        before = model(pixel_values=rows, **given).last_hidden_state[mask]
        assert fuse(model)[0] == LAYERS
        found = model(pixel_values=rows, **given).last_hidden_state[mask]
    assert difference(found, before) < SAME[torch.float32]


@pytest.mark.parametrize(
    "activation",
    [
        "gelu",
        "gelu_python",
        "gelu_new",
        "gelu_fast",
        "gelu_pytorch_tanh",
        "gelu_accurate",
        "quick_gelu",
        "silu",
        "swish",
        "relu",
    ],
)
@pytest.mark.parametrize("product", get_args(Product))
def test_every_activation_is_its_own(activation: str, product: Product) -> None:
    model = made("CLIPVision", _PIXELS, hidden_act=activation)
    pixels = torch.randn(2, 3, 32, 32)
    before = look(model, pixels)
    assert fuse(model, product)[0] == LAYERS
    assert difference(look(model, pixels), before) < 2e-5


@pytest.mark.parametrize("product", get_args(Product))
@pytest.mark.parametrize("bias", [(False, False, False), (True, False, True)], ids=["none", "some"])
@needs("transformers", FUSED_SINCE["ViT"], "a ViT of fused layers")
def test_biases_may_be_missing(bias: tuple[bool, bool, bool], product: Product) -> None:
    model = made("ViT", _PIXELS)
    for layer in model.layers if hasattr(model, "layers") else model.encoder.layer:
        attention = layer.attention
        for name, kept in zip(("q_proj", "k_proj", "v_proj"), bias, strict=True):
            if not kept:
                getattr(attention, name).bias = None
        layer.mlp.fc1.bias = layer.mlp.fc2.bias = attention.o_proj.bias = None
    pixels = torch.randn(2, 3, 32, 32)
    before = look(model, pixels)
    assert fuse(model, product)[0] == LAYERS
    assert difference(look(model, pixels), before) < SAME[torch.float32]


class Special(nn.Linear):
    """Computes something of its own, perhaps."""


def with_a_weight(layer: Any) -> None:
    layer.attention.scale = nn.Parameter(torch.ones(32))


def with_a_buffer(layer: Any) -> None:
    layer.attention.self.register_buffer("table", torch.ones(2))


def with_a_module(layer: Any) -> None:
    layer.output.squash = nn.Tanh()


def with_a_linear_of_another_class(layer: Any) -> None:
    layer.output.dense = Special(64, 32)


def with_a_norm_of_another_class(layer: Any) -> None:
    layer.output.LayerNorm = nn.RMSNorm(32)


def with_an_unknown_activation(layer: Any) -> None:
    layer.intermediate.intermediate_act_fn = ACT2FN["mish"]


def with_fewer_heads_of_keys(layer: Any) -> None:
    layer.attention.self.key = nn.Linear(32, 16)


def without_a_part(layer: Any) -> None:
    del layer.intermediate


CHANGES = (
    with_a_weight,
    with_a_buffer,
    with_a_module,
    with_a_linear_of_another_class,
    with_a_norm_of_another_class,
    with_an_unknown_activation,
    with_fewer_heads_of_keys,
    without_a_part,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_with_something_else_in_it_is_left_as_it_is(change: Callable[[Any], None]) -> None:
    model = made("Bert", _TEXT)
    change(model.encoder.layer[0])
    assert [name for _, name in fusible_layers(model)] == ["1"]


def test_a_layer_beside_one_that_is_not_is_fused_by_itself() -> None:
    model = made("Bert", _TEXT)
    with_a_module(model.encoder.layer[0])
    before = look_up(model)
    found, restore = fuse(model)
    assert found == 1
    assert isinstance(model.encoder.layer[1], FusedLayers)
    assert difference(look_up(model), before) < SAME[torch.float32]
    restore()
    assert torch.equal(look_up(model), before)


@pytest.mark.parametrize("others", [{"is_decoder": True}, {"is_decoder": True, "add_cross_attention": True}])
def test_a_layer_of_a_decoder_is_left_as_it_is(others: Settings) -> None:
    assert not fusible_layers(made("Bert", _TEXT, **others))


def test_an_unsupported_argument_of_a_fused_layer_is_rejected() -> None:
    parts = match_layer(made("Bert", _TEXT).encoder.layer[0])
    assert parts is not None
    layers, x = FusedLayers([parts]), torch.randn(1, 4, 32)
    with torch.inference_mode():
        assert layers(x, None, None, past_key_values=None, encoder_hidden_states=None).shape == x.shape
        with pytest.raises(NotImplementedError, match="fused layers take"):
            layers(x, None, x)
        with pytest.raises(NotImplementedError, match="fused layers take"):
            layers(x, None, past_key_values=object())


def test_no_matrix_is_kept_twice() -> None:
    model = made("Bert", _TEXT)
    fuse(model)
    prepack_linears(model)
    assert not list(model.encoder.parameters())
    assert not any(isinstance(module, nn.Linear | PrepackedLinear) for module in model.encoder.modules())


@pytest.mark.parametrize("product", get_args(Product))
@pytest.mark.parametrize("run", [run_layers, layers_as_one_call()], ids=["python", "one call"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_gives_the_same_from_one_product(run: Any, causal: bool, product: Product) -> None:
    torch.manual_seed(2)
    original = made("Bert", _TEXT).encoder.layer[0]
    parts = match_layer(original)
    assert parts is not None
    parts.config._attn_implementation = PACKED
    x, groups = torch.randn(1, 25, 32), [Group(2, 5, 5), Group(3, 1, 1), Group(1, 7, 4), Group(1, 5, 5)]
    with torch.inference_mode():
        wanted = original(x, packed_groups=groups, is_causal=causal)
        found = run(x[0], groups, FusedLayers([parts], product).layers, causal)
    torch.testing.assert_close(found, wanted[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_sequence(broken: float) -> None:
    torch.manual_seed(4)
    layers, x = made_layers(), torch.randn(25, 32)
    with torch.inference_mode():
        wanted = layers_as_one_call()(x, [Group(5, 5, 5)], layers, False)
        x[12] = broken
        found = layers_as_one_call()(x, [Group(5, 5, 5)], layers, False)
    assert not found[10:15].isfinite().any()
    others = [token for token in range(25) if not 10 <= token < 15]
    torch.testing.assert_close(found[others], wanted[others], atol=1e-5, rtol=1e-5)


def made_layers() -> list[Layer]:
    parts = [match_layer(layer) for layer in made("Bert", _TEXT).encoder.layer]
    return FusedLayers([one for one in parts if one is not None], "plain").layers


def test_layers_are_one_call_of_this_build_of_torch() -> None:
    assert layers_as_one_call() is not run_layers


@pytest.mark.parametrize("gone", ["script", "optimized_execution"])
def test_without_torchscript_the_same_functions_run(gone: str) -> None:
    def part(path: str, *, instead: str) -> Any:
        return None if path == f"torch.jit.{gone}" else optional_torch(path, instead=instead)

    assert layers_as_one_call(part) is run_layers


@pytest.mark.parametrize("gone", ["script", "optimized_execution"])
def test_torchscript_that_has_changed_is_left_alone(gone: str, logged: list[structlog.typing.EventDict]) -> None:
    def changed(*_: object) -> None:
        raise TypeError("other arguments are wanted")

    def part(path: str, *, instead: str) -> Any:
        return changed if path == f"torch.jit.{gone}" else optional_torch(path, instead=instead)

    assert layers_as_one_call(part) is run_layers
    assert [line["event"] for line in logged] == ["model.not_scripted"]


def test_a_forward_that_has_no_room_says_so_as_ever() -> None:
    model = made("Bert", _TEXT)
    fuse(model)
    (fused,) = model.encoder.layer
    with torch.inference_mode(), pytest.raises(RuntimeError, match="can't allocate memory"):
        fused._run(torch.zeros(1, 32).expand(1 << 44, 32), [Group(1, 1 << 44, 1 << 44)], fused.layers, False)


def test_embeddings_and_layers_are_called_by_themselves_where_that_is_all_of_the_model() -> None:
    transformer = packed_and_fused(made("Bert", _TEXT))
    pair = TokenSequence([3, 7, 5, 9, 4], DENSE_ONLY, first_tokens=2)
    sequences = [*tokens(), pair]
    wanted = run(transformer, sequences)
    assert Speedups(transformer, 40).call_parts() is None
    transformer.model.forward = None  # it is not called
    torch.testing.assert_close(run(transformer, sequences), wanted)


def test_a_model_that_does_more_than_its_parts_is_called_whole() -> None:
    transformer = packed_and_fused(made("Bert", _TEXT))
    forward = transformer.model.forward
    transformer.model.forward = lambda **settings: (forward(**settings)[0] * 2,)
    wanted = run(transformer, tokens())
    why = Speedups(transformer, 40).call_parts()
    assert why is not None
    assert why.startswith("BertModel gives other vectors")
    torch.testing.assert_close(run(transformer, tokens()), wanted)


def packed_and_fused(model: Any) -> PackedTransformer:
    transformer = PackedTransformer(model)
    layout_checks.choose_layout(transformer, "packed", 40)
    fuse(model)
    return transformer


def test_forwards_at_once_give_what_they_give_alone() -> None:
    transformer = PackedTransformer(made("Bert", _TEXT))
    layout_checks.choose_layout(transformer, "packed", 40)
    fuse(transformer.model)
    batches = [tokens()[: n % 6 + 1] for n in range(24)]
    alone = [run(transformer, batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(partial(run, transformer), batches))
    for found, wanted in zip(at_once, alone, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


class Louder(hf.models.bert.modeling_bert.BertLayer):  # type: ignore[misc]  # transformers has no types
    """Has the parts of the layer of BERT, and computes something else."""

    def forward(self, *given: Any, **settings: Any) -> Tensor:
        hidden: Tensor = super().forward(*given, **settings)
        return hidden * 2


def test_a_layer_that_computes_something_else_from_the_same_parts_is_put_back() -> None:
    transformer = PackedTransformer(made("Bert", _TEXT))
    for layer in transformer.model.encoder.layer:
        layer.__class__ = Louder
    before = run(transformer, tokens())
    why = Speedups(transformer, 40).fuse()
    assert why is not None
    assert "BertModel gives other vectors" in why
    assert [type(layer) for layer in transformer.model.encoder.layer] == [Louder] * LAYERS
    assert torch.equal(run(transformer, tokens()), before)


@pytest.mark.parametrize("kind", ["bert-mean", "xlmr-prompt", "electra-mean", "clip", "siglip", "siglip2-naflex"])
def test_a_folder_of_a_known_kind_is_run_fused(kind: str, load_tiny: LoadTiny) -> None:
    modules = [*text_tower(load_tiny(kind)).transformer.model.modules()]
    assert [len(module.layers) for module in modules if isinstance(module, FusedLayers)] == [3]
    assert not any(type(module) is nn.Linear for module in modules)


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2-naflex", since("vit", "ViT"), since("dinov2", "Dinov2")])
def test_images_are_run_fused_and_cut_without_convolving(kind: str, load_tiny: LoadTiny) -> None:
    tower = load_tiny(kind).towers["image"]
    assert isinstance(tower, ImageTower)
    layers = [type(module) for module in tower.encoder.image.modules()]
    assert FusedLayers in layers
    assert nn.Conv2d not in layers


def test_a_model_that_changes_when_it_is_fused_is_prepacked_only(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedLayers, "forward", lambda self, x, *others, **settings: torch.ones_like(x))
    with captured_logs() as logged:
        model = load_model(EngineConfig(model=str(tiny_folder("bert-mean")), dtype="float32"))
    layers = [type(module) for module in text_tower(model).transformer.model.modules()]
    assert FusedLayers not in layers
    assert PrepackedLinear in layers
    (reason,) = [line["reason"] for line in logged if line["event"] == "model.not_fused"]
    assert "BertModel gives other vectors" in reason
    assert not [line for line in logged if line["event"] == "model.not_prepacked"]


@pytest.mark.parametrize(("kind", "edges"), [(nn.Conv2d, (8, 8)), (nn.Conv2d, (9, 11)), (nn.Conv3d, (4, 8, 13))])
def test_a_convolution_that_steps_from_patch_to_patch_is_a_product(kind: Any, edges: tuple[int, ...]) -> None:
    convolution = kind(3, 8, 4, 4, padding="valid")
    model = nn.ModuleList([convolution, kind(3, 8, 4, 2), kind(3, 8, 3, 3, padding=1), kind(4, 8, 2, 2, groups=2)])
    pixels = torch.randn(5, 3, *edges)
    with torch.inference_mode():
        flatten_patches(model)
        flat, *others = model
        assert isinstance(flat, PatchLinear)
        assert not any(isinstance(other, PatchLinear) for other in others)  # they look beyond a patch, or at less
        torch.testing.assert_close(flat(pixels), convolution(pixels), atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match="the kernel has"):
            flat(pixels[0])
