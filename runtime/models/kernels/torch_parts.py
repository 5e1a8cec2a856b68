"""Parts of torch that it promises nothing about: each may be missing, and something slower takes its place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


def torch_part(path: str, *, instead: str, importer: Callable[[str], Any] = importlib.import_module) -> Any:
    """Look up a part of torch by its dotted path: None, with a line in the log, where this torch does not have it.

    Args:
        path: Of a module, and of a name in it.
        instead: What is done without the part, for the log.
        importer: Imports a module by its path.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importer(module), name)
    except Exception as error:  # noqa: BLE001  # a module that fails on a missing operator raises what it likes
        log.info("model.torch_lacks", part=path, reason=f"{type(error).__name__}: {error}", instead=instead)
        return None
