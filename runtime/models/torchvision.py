"""Keep a torchvision that cannot be imported from breaking transformers, which imports it wherever it is installed."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_NAME: Final = "torchvision"


def set_broken_torchvision_aside() -> None:
    """Hide a torchvision that was built for another torch, and say so in the log.

    Call it before transformers is imported, which imports torchvision anyway: one that works costs no more time.
    Nothing here needs torchvision, and vectors are the same with and without it.
    """
    if _NAME in sys.modules or "transformers" in sys.modules:
        return
    try:
        importlib.import_module(_NAME)
    except Exception as error:  # noqa: BLE001  # "operator torchvision::nms does not exist", a library that is missing
        if isinstance(error, ModuleNotFoundError) and error.name == _NAME:
            return  # it is not installed
        sys.modules[_NAME] = None  # type: ignore[assignment]  # the language's way to say that there is none
        log.warning(
            "torchvision.set_aside",
            reason=f"{type(error).__name__}: {error}",
            hint="it is left out; install the one that belongs to the installed torch, or none",
        )
