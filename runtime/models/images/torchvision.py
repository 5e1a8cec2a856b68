"""Keep a torchvision that cannot be imported from breaking transformers, which imports it wherever it is installed."""

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
    """Have transformers do without a torchvision that was built for another torch, and say so in the log.

    Call it before transformers is imported, which imports torchvision anyway: one that works costs no more time.
    Nothing here needs torchvision, and vectors are the same with and without it.

    Raises:
        ConfigError: This version of transformers cannot be kept from importing it.
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
            _is_available()  # transformers looks once, and keeps the answer
        if _is_available():
            raise ConfigError(
                f"torchvision is installed and cannot be imported ({reason}): install the one that belongs to the "
                "installed torch, or none"
            ) from error
        log.warning(
            "torchvision.left_out",
            reason=reason,
            hint="it is left out; install the one that belongs to the installed torch, or none",
        )


def _is_available() -> bool:
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """A block in which a package cannot be found."""
    finders = sys.meta_path[:]
    sys.meta_path[:] = [_Without(name, finder) for finder in finders]
    try:
        yield
    finally:
        # One that was added meanwhile stays.
        sys.meta_path[:] = [one.finder if isinstance(one, _Without) else one for one in sys.meta_path]


class _Without:
    """A finder of modules that does not find one package.

    Args:
        name: Of the package.
        finder: Finds all others, and says what else is asked of a finder.
    """

    def __init__(self, name: str, finder: Any) -> None:
        self.name = name
        self.finder = finder

    def find_spec(self, name: str, *places: Any) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        return None if name.partition(".")[0] == self.name else self.finder.find_spec(name, *places)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)
