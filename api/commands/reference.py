"""Tables of docs/configuration.md, made of the settings table.

`python -m staged_pool.api.commands.reference docs/configuration.md` writes them between the two markers of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from staged_pool.api.commands.options import metavar_of
from staged_pool.api.commands.table import every_setting
from staged_pool.runtime.settings import GROUPS, SettingField

BEGIN: Final = "<!-- settings: begin -->\n"
END: Final = "<!-- settings: end -->\n"


def reference() -> str:
    """Return a table for each group of flags, and one for fields without a flag."""
    lines: list[str] = []
    for group in GROUPS:
        rows = [row for row in every_setting() if row.about.group == group and row.about.has_flag]
        lines += ["", f"### {group}", "", "| flag | default | |", "|---|---|---|", *map(_line, rows)]
    lines += ["", "### Python only", "", "Fields without a flag.", "", "| field | default | |", "|---|---|---|"]
    lines += [_line(row) for row in every_setting() if not row.about.has_flag]
    return "\n".join(lines).lstrip("\n") + "\n"


def updated(page: str) -> str:
    """Return a page with the tables between its markers replaced."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{reference()}\n{END}{tail}"


def _line(row: SettingField) -> str:
    flags = [row.flag] if row.kind == "bool" else [f"{row.flag} {metavar_of(row)}"]
    names = " ".join(f"`{name}`" for name in (*flags, row.off_flag) if name) if row.about.has_flag else f"`{row.name}`"
    default = row.about.default or row.show(row.default) or ("off" if row.kind == "bool" else "none")
    return f"| {_cell(names)} | {_cell(default)} | {_cell(' '.join(_text(row)))} |"


def _text(row: SettingField) -> Iterator[str]:
    yield row.about.help
    if row.about.more:
        yield row.about.more
    if row.kind == "choice" and "|" not in (metavar_of(row) or ""):
        yield f"Values: {', '.join(row.choices)}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*:", "`*`:").replace("; * for", "; `*` for")


def main() -> None:
    """Print the tables, or write them into the file that is named."""
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(updated(path.read_text("utf-8")), "utf-8")
    else:
        sys.stdout.write(reference())


if __name__ == "__main__":
    main()
