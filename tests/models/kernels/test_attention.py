"""Packed attention against plain attention with a mask that keeps the sequences apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staged_pool.runtime.models.kernels import attention
from staged_pool.runtime.models.kernels.attention import Bounds, packed_attention, takes_varlen
from staged_pool.runtime.models.kernels.encoder_layers import Group
from tests.models.varlen import varlen_attn

HEADS, WIDTH = 4, 8
GROUPS = [(2, 5), (1, 1), (3, 2), (1, 11)]
LENGTHS = [length for sequences, length in GROUPS for _ in range(sequences)]


def random(heads: int) -> Tensor:
    return torch.randn(1, heads, sum(LENGTHS), WIDTH)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, *, window: int | None, causal: bool) -> Tensor:
    """Compute packed attention over one full matrix of scores."""
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    sees = sequence[:, None] == sequence[None]
    distance = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))[None]
    if causal:
        sees &= distance >= 0
    if window is not None:
        sees &= distance.abs() < window
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = query @ key.transpose(2, 3) * WIDTH**-0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1)
    attended: Tensor = weights @ value
    return attended.transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 11])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_a_sequence_attends_to_itself_only(key_heads: int, window: int | None, causal: bool) -> None:
    torch.manual_seed(1)
    query, key, value = random(HEADS), random(key_heads), random(key_heads)
    out, weights = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        packed_groups=[Group(count, length, length) for count, length in GROUPS],
        sliding_window=window,
        is_causal=causal,
    )
    assert weights is None
    assert torch.allclose(out, masked_attention(query, key, value, window=window, causal=causal), atol=1e-6)


def test_a_layer_says_itself_whether_it_is_causal() -> None:
    layer = nn.Module()
    layer.is_causal = True  # type: ignore[assignment]
    query, key, value = random(HEADS), random(HEADS), random(HEADS)
    out, _ = packed_attention(
        layer, query, key, value, None, packed_groups=[Group(count, length, length) for count, length in GROUPS]
    )
    assert torch.allclose(out, masked_attention(query, key, value, window=None, causal=True), atol=1e-6)


@pytest.mark.parametrize("argument", ["position_bias", "softcap", "s_aux"])
def test_an_unsupported_argument_is_rejected(argument: str) -> None:
    query, others = random(HEADS), dict[str, Any]({argument: 1.0})
    with pytest.raises(NotImplementedError, match=argument):
        packed_attention(
            nn.Module(),
            query,
            query,
            query,
            None,
            packed_groups=[Group(count, length, length) for count, length in GROUPS],
            **others,
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 11])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.usefixtures("varlen_on_cpu")
def test_one_call_for_all_sequences_gives_what_groups_give(key_heads: int, window: int | None, causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = random(HEADS), random(key_heads), random(key_heads)
    layer = nn.Module()
    settings: dict[str, Any] = {
        "packed_groups": [Group(sequences, tokens, tokens) for sequences, tokens in GROUPS],
        "sliding_window": window,
        "is_causal": causal,
        "scaling": 0.3,
    }
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    in_groups, _ = packed_attention(layer, query, key, value, None, **settings)
    at_once, _ = packed_attention(layer, query, key, value, None, packed_bounds=Bounds(starts, 11), **settings)
    torch.testing.assert_close(at_once, in_groups)


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_one_call_repeats_keys_where_torch_does_not(key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_11(q: Tensor, k: Tensor, v: Tensor, *places: Any, scale: float, window_size: tuple[int, int]) -> Any:
        return varlen_attn(q, k, v, *places, scale=scale, window_size=window_size)

    monkeypatch.setattr(attention, "varlen_attn", of_torch_2_11)
    torch.manual_seed(0)
    qkv = random(HEADS), random(key_heads), random(key_heads)
    groups = [Group(sequences, tokens, tokens) for sequences, tokens in GROUPS]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    in_groups, _ = packed_attention(nn.Module(), *qkv, None, packed_groups=groups, scaling=0.3)
    at_once, _ = packed_attention(
        nn.Module(), *qkv, None, packed_groups=groups, packed_bounds=Bounds(starts, 11), scaling=0.3
    )
    torch.testing.assert_close(at_once, in_groups)


@pytest.mark.parametrize("has_it", [False, True])
def test_a_torch_whose_one_call_takes_no_window_does_without(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_10(q: Tensor, k: Tensor, v: Tensor, *places: Any, is_causal: bool = False) -> Any:
        pytest.fail("called")

    monkeypatch.setattr(attention, "varlen_attn", of_torch_2_10 if has_it else None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not takes_varlen(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(attention, "varlen_attn", print)  # as of C, which says nothing of its parameters
    assert not takes_varlen(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    assert takes_varlen(torch.device("cuda"), torch.bfloat16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the kernel has no other form")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 11])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_the_kernel_computes_what_is_said_of_it(key_heads: int, window: int | None, causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (x.cuda().bfloat16() for x in (random(HEADS), random(key_heads), random(key_heads)))
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    found, _ = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        packed_groups=(),
        packed_bounds=Bounds(starts, 11),
        sliding_window=window,
        is_causal=causal,
    )
    wanted = masked_attention(query.float().cpu(), key.float().cpu(), value.float().cpu(), window=window, causal=causal)
    torch.testing.assert_close(found.float().cpu(), wanted, atol=0.02, rtol=0.02)
