"""Optional parts of torch, which a version may lack: the caller then uses a slower way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


def optional_torch(path: str, *, instead: str, importer: Callable[[str], Any] = importlib.import_module) -> Any:
    """Look up a part of torch by its dotted path. None, with a line in the log: this torch lacks it.

    Args:
        path: Path of a module and a name in it.
        instead: The slower way that is used without the part, for the log.
        importer: A function that imports a module by its path.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importer(module), name)
    except Exception as error:  # noqa: BLE001  # a module that fails on a missing operator may raise anything
        log.debug("model.torch_lacks", part=path, reason=f"{type(error).__name__}: {error}", instead=instead)
        return None
