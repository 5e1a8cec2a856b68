"""Models that cannot be loaded as requested: each is rejected with the cause before serving."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.devices import kernel_choices as tuning
from staged_pool.runtime.models.devices import processor
from staged_pool.runtime.models.kernels import linear
from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.loading import rejection
from tests.models.requests import text_tower
from tests.models.tiny import build, edit_json, write_json


@pytest.fixture
def folder(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    """A copy of `bert-mean` that a test may change."""
    return shutil.copytree(tiny_folder("bert-mean"), tmp_path / "model")


def change_weights(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors (named with _ for .) of a folder's weights, or leave them out."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in list(weights):
        if (key := name.replace(".", "_")) in tensors:
            tensor = tensors[key]
            del weights[name]
            if tensor is not None:
                weights[name] = tensor
    save_file(weights, file, metadata={"format": "pt"})


def test_missing_weights_are_rejected_rather_than_made_up(folder: Path) -> None:
    change_weights(folder, encoder_layer_1_output_dense_weight=None)
    message = rejection(folder)
    assert message.endswith(
        "the weights are not those of a BertModel: "
        "encoder.layer.1.output.dense.weight is missing or of another shape (1 such in all)"
    )


def test_weights_of_another_shape_are_rejected(folder: Path) -> None:
    change_weights(folder, embeddings_LayerNorm_weight=torch.ones(7))
    assert "embeddings.LayerNorm.weight is missing or of another shape (1 such in all)" in rejection(folder)


def test_damaged_weights_are_rejected(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "the weights are damaged" in rejection(folder)


def test_weights_without_numbers_are_rejected(folder: Path) -> None:
    change_weights(folder, embeddings_LayerNorm_weight=torch.full((32,), torch.nan))
    assert rejection(folder) == "the weights cannot be used: The model gave NaN or Inf for this input."


def test_the_pooler_does_not_matter(folder: Path) -> None:
    assert any("pooler" in name for name in load_file(folder / "model.safetensors"))
    with_pooler = load_model(EngineConfig(model=str(folder), dtype="float32"))
    change_weights(folder, pooler_dense_weight=None, pooler_dense_bias=None)
    without = load_model(EngineConfig(model=str(folder), dtype="float32"))
    assert with_pooler.card.parameters == without.card.parameters


def test_a_folder_with_code_of_its_own_is_rejected(folder: Path) -> None:
    auto_map = {"AutoModel": "modeling.Mine"}
    edit_json(folder / "config.json", model_type="mine", auto_map=auto_map)
    assert rejection(folder) == (
        f"config.json: auto_map={auto_map!r} asks for the folder's own code, which is not run unless trust_remote_code "
        "(--trust-remote-code) is set"
    )


def test_code_of_its_own_under_a_known_name_is_told_by_the_weights(folder: Path) -> None:
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling.Mine"})
    change_weights(folder, embeddings_position_embeddings_weight=None)
    assert "its auto_map asks for the folder's own code, which was not run" in rejection(folder)


def test_an_unknown_architecture_is_rejected(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="unheardof")
    assert "unheardof" in rejection(folder)


def test_a_model_without_an_encoder_is_rejected(folder: Path) -> None:
    transformers.BartConfig().save_pretrained(folder)
    assert rejection(folder) == "config.json: model_type='bart' has no encoder in transformers"


def test_a_model_that_is_not_of_text_is_rejected(folder: Path) -> None:
    transformers.ResNetConfig().save_pretrained(folder)
    assert rejection(folder).startswith("config.json: model_type='resnet' reads images, not text: it is not supported")


def test_a_folder_without_a_tokenizer_is_rejected(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert f"{folder}: no tokenizer, neither tokenizer.json nor a vocabulary" in rejection(folder)


def test_the_longest_input_must_be_said_somewhere(tmp_path: Path) -> None:
    folder = build("t5-mean", tmp_path / "t5")
    (folder / "sentence_bert_config.json").unlink()
    assert rejection(folder) == (
        f"{folder}: nothing says how long an input may be: set max_seq_length in sentence_bert_config.json"
    )


@pytest.mark.parametrize(
    ("kind", "max_seq_length", "max_tokens"),
    [
        ("bert-mean", 64, 64),
        ("bert-mean", 500, 96),  # more than there are position vectors
        ("roberta-mean", 500, 96),  # of 98 rows, two stand before the first position
        ("bert-mean", None, 96),
        ("distilbert-mean", 20, 20),
        ("modernbert-cls", 500, 500),  # no table: its author may know better than its config
    ],
)
def test_the_longest_input_is_within_the_positions(
    kind: str, max_seq_length: int | None, max_tokens: int, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder(kind), tmp_path / "model")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
    assert load_model(EngineConfig(model=str(folder))).card.max_tokens == max_tokens


def test_dense_weights_that_do_not_fit_are_rejected(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("bert-max-dense"), tmp_path / "model")
    edit_json(folder / "2_Dense" / "config.json", out_features=23)
    assert rejection(folder).startswith("2_Dense: the weights cannot be used: ")
    edit_json(folder / "2_Dense" / "config.json", in_features=99)
    assert rejection(folder) == "2_Dense: takes vectors of 99 values, but gets 32"
    edit_json(
        folder / "2_Dense" / "config.json", in_features=32, activation_function="torch.nn.modules.activation.Mine"
    )
    assert rejection(folder) == "2_Dense: activation Mine is not in torch.nn"
    (folder / "2_Dense" / "pytorch_model.bin").unlink()
    edit_json(folder / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.Tanh")
    assert rejection(folder) == "2_Dense: no model.safetensors and no pytorch_model.bin"


def test_packed_is_rejected_where_attention_cannot_be_replaced(tiny_folder: TinyFolder) -> None:
    message = rejection(tiny_folder("mpnet-mean"), attention="packed")
    assert message == "attention='packed': MPNetModel does not let its attention be replaced"


def test_an_architecture_that_only_claims_to_pack_is_found_out(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(transformers.MPNetModel, "_supports_attention_backend", True)
    folder = tiny_folder("mpnet-mean")
    assert "gives other vectors on a packed batch (relative difference" in rejection(folder, attention="packed")
    assert load_model(EngineConfig(model=str(folder))).pads("text")
    assert "model.padded" in [event["event"] for event in logged]


def test_an_architecture_that_takes_no_positions_is_not_packed(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.T5EncoderModel, "_supports_attention_backend", True)
    assert "T5EncoderModel takes no positions" in rejection(tiny_folder("t5-mean"), attention="packed")


def test_packed_layout_holds_every_token_once(load_tiny: LoadTiny) -> None:
    batch = PackedBatch.of([TokenSequence(ids, DENSE_ONLY) for ids in ([5, 6], [7, 8], [9])], torch.device("cpu"))
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    assert batch.tokens == 5
    assert batch.lengths.tolist() == [2, 2, 1]
    assert batch.groups == [Group(2, 2, 2), Group(1, 1, 1)]
    body = text_tower(load_tiny("bert-mean")).transformer
    with torch.inference_mode():
        assert body.hidden(batch).shape == (5, 32)


def test_the_sizes_of_a_batch_are_few_and_near() -> None:
    sizes = {
        tokens: len(PackedBatch.of([TokenSequence([1] * tokens, DENSE_ONLY)], torch.device("cpu")).ids)
        for tokens in range(1, 2049)
    }
    assert all(tokens <= size for tokens, size in sizes.items())
    assert all(size <= tokens * 9 / 8 for tokens, size in sizes.items() if tokens > 32)
    assert len(set(sizes.values())) < 60


def test_a_cuda_device_that_is_not_there_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rejection(folder, device="cuda") == "device='cuda': torch sees no CUDA device"


def test_a_cuda_device_beyond_those_that_are_there_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = "device='cuda:1,cuda:2': there is no cuda:2: torch sees 2 CUDA devices, from cuda:0 on"
    assert rejection(folder, device="cuda:1,cuda:2") == message


def test_float16_is_rejected_on_a_cpu(folder: Path) -> None:
    message = "dtype='float16': is for GPUs; a CPU takes float32, bfloat16 or int8"
    assert rejection(folder, device="cpu", dtype="float16") == message


@pytest.fixture
def unknown_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget facts about this processor for the test, and those the test finds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "share_of_cores", lambda threads: 1.0)


@pytest.mark.usefixtures("unknown_processor")
@pytest.mark.parametrize(
    ("able", "gain", "dtype"), [(True, 2.0, "bfloat16"), (True, 1.1, "float32"), (False, 2.0, "float32")]
)
def test_bfloat16_is_chosen_where_the_cpu_is_quicker_in_it(
    able: bool, gain: float, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": able}, raising=False)
    monkeypatch.setattr(processor, "has_prepacked", lambda *_: True)
    monkeypatch.setattr(processor, "_seconds", {torch.float32: gain, torch.bfloat16: 1.0}.__getitem__)
    assert load_model(EngineConfig(model=str(folder), device="cpu")).card.dtype == dtype


@pytest.mark.parametrize("able", [False, True])
def test_a_torch_that_lists_no_capabilities_is_asked_for_each(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: able, raising=False)
    assert tuning.capabilities()["amx_bf16"] is able
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert "amx_bf16" not in tuning.capabilities()


def test_products_are_timed_on_one_thread_which_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, threads, before = linear.PrepackedLinear.forward, list[int](), torch.get_num_threads()

    def noted(self: linear.PrepackedLinear, x: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return multiply(self, x)

    monkeypatch.setattr(linear.PrepackedLinear, "forward", noted)
    torch.set_num_threads(2)
    try:
        assert processor._seconds(torch.float32) > 0
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_is_that_of_the_configuration(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert load_model(EngineConfig(model=str(folder), torch_threads=1)).card.torch_threads == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change_weights(folder, pooler_dense_weight=None)  # transformers would report the other half of it
    load_model(EngineConfig(model=str(folder)))
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.is_progress_bar_enabled()
