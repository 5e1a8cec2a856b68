"""Names of devices in settings. Only torch knows which of them exist."""

from __future__ import annotations

import re
from typing import Final

from staged_pool.stages.errors import ConfigError

_NAME: Final = re.compile(r"cpu|cuda(:(0|[1-9]\d{0,2}))?")


def device_names(device: str) -> tuple[str, ...]:
    """Parse a setting: `("auto",)`, or names of one kind such as `("cuda:0", "cuda:1")`.

    Raises:
        ConfigError: A part of it is no name of a device, or is of another kind than the others.
    """
    if device == "auto":
        return (device,)
    names = tuple(device.split(","))
    for place, name in enumerate(names, 1):
        where = f"device={device!r}" if len(names) == 1 else f"device={device!r}: part {place}"
        if not _NAME.fullmatch(name):
            several = ", or several of one kind such as cuda:0,cuda:1" if len(names) == 1 else ""
            raise ConfigError(f"{where}: must be {'auto, ' if len(names) == 1 else ''}cpu, cuda or cuda:N{several}")
        if name[:4] != names[0][:4]:
            raise ConfigError(f"{where}: is not of the kind of part 1; models run on CPUs or on GPUs, not on both")
        if name != "cpu" and ((len(names) > 1 and name == "cuda") or name in names[: place - 1]):
            wrong = "has no number" if name == "cuda" else f"is {name} again"
            raise ConfigError(f"{where}: {wrong}; several GPUs are named by numbers, each once")
    return names
