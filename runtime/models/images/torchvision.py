"""Torchvision that is broken, which transformers would fail to import, or that is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")

_NAME: Final = "torchvision"


def leave_out_broken_torchvision() -> None:
    """Hide a torchvision that was built for another torch from transformers, with a log line.

    Call it before transformers is imported. A working torchvision costs no extra time, since transformers imports it
    anyway. Models here do not need torchvision, and give the same vectors without it.

    Raises:
        ConfigError: This version of transformers imports it nevertheless.
    """
    if _NAME in sys.modules or "transformers" in sys.modules:
        return
    try:
        importlib.import_module(_NAME)
    except Exception as error:  # "operator torchvision::nms does not exist", a library that is missing
        if isinstance(error, ModuleNotFoundError) and error.name == _NAME:
            return  # it is not installed
        reason = f"{type(error).__name__}: {error}"
        with _hidden(_NAME):
            _is_available()  # transformers caches the answer of its first look
        if _is_available():
            raise ConfigError(
                f"torchvision is installed and cannot be imported ({reason}): install the version for the installed "
                "torch, or uninstall it"
            ) from error
        log.warning(
            "torchvision.left_out",
            reason=reason,
            hint="torchvision is ignored; install the version for the installed torch, or uninstall it",
        )


def _is_available() -> bool:
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Make a package impossible to find in a block."""
    finders = sys.meta_path[:]
    sys.meta_path[:] = [_HidingFinder(name, finder) for finder in finders]
    try:
        yield
    finally:
        # Keep finders that were added meanwhile.
        sys.meta_path[:] = [finder.finder if isinstance(finder, _HidingFinder) else finder for finder in sys.meta_path]


class _HidingFinder:
    """A finder of modules that hides one package.

    Args:
        name: Name of the package.
        finder: The finder for all other modules, and for all other attributes.
    """

    def __init__(self, name: str, finder: Any) -> None:
        self.name = name
        self.finder = finder

    def find_spec(self, name: str, *places: Any) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        return None if name.partition(".")[0] == self.name else self.finder.find_spec(name, *places)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def needs_torchvision(named: str) -> str | None:
    """Explain that transformers has a class only with torchvision. None: that is not the cause."""
    import transformers

    name = named.removesuffix("Fast")
    if not any(getattr(getattr(transformers, name + kind, None), "is_dummy", False) for kind in ("Pil", "")):
        return None
    version = transformers.__version__
    newer = "; 5.5 and newer have most classes without it" if version.startswith("5.4.") else ""
    return f"transformers {version} has {name} only with torchvision, which is not installed{newer}"
