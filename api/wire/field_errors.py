"""How readers say what is wrong with a field."""

from __future__ import annotations

import re

from staged_pool.stages.errors import InvalidInput


def field_error(
    where: str, what: str, index: int | None = None, *, error: type[InvalidInput] = InvalidInput
) -> InvalidInput:
    """The rejection of what stands at a path such as `messages[0].role`."""
    return error(f"{where}: {what}", param=re.split(r"[.\[]", where, maxsplit=1)[0], index=index)
