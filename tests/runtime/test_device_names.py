"""Values of `--device`."""

from __future__ import annotations

import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.device_names import device_names
from staged_pool.stages.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("auto", ("auto",)),
        ("cpu", ("cpu",)),
        ("cuda", ("cuda",)),
        ("cuda:11", ("cuda:11",)),
        ("cuda:1,cuda:0", ("cuda:1", "cuda:0")),
        ("cpu,cpu", ("cpu", "cpu")),
    ],
)
def test_devices_are_named_one_by_one(device: str, names: tuple[str, ...]) -> None:
    assert device_names(device) == names


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("", "device='': must be auto, cpu, cuda or cuda:N, or several of one kind such as cuda:0,cuda:1"),
        ("gpu", "device='gpu': must be auto, cpu, cuda or cuda:N, or several of one kind such as cuda:0,cuda:1"),
        ("cuda:01", "device='cuda:01': must be auto, cpu, cuda or cuda:N, or several of one kind such as cuda:0,cuda:1"),  # noqa: E501
        ("cuda:0,", "device='cuda:0,': part 2: must be cpu, cuda or cuda:N"),
        ("cuda:0, cuda:1", "device='cuda:0, cuda:1': part 2: must be cpu, cuda or cuda:N"),
        ("cpu,auto", "device='cpu,auto': part 2: must be cpu, cuda or cuda:N"),
        ("cpu,cuda:0", "device='cpu,cuda:0': part 2: is not of the kind of part 1; models run on CPUs or on GPUs, not on both"),  # noqa: E501
        ("cuda:0,cuda:1,cuda:0", "device='cuda:0,cuda:1,cuda:0': part 3: is cuda:0 again; several GPUs are named by numbers, each once"),  # noqa: E501
        ("cuda:0,cuda", "device='cuda:0,cuda': part 2: has no number; several GPUs are named by numbers, each once"),
    ],
)  # fmt: skip
def test_a_text_that_names_no_devices_is_rejected_by_its_place(device: str, message: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        EngineConfig(device=device)
    assert str(rejected.value) == message
