"""Pages of the reference that are made of the code: commands, routes and Python names.

`python -m tests.docs.reference` writes them. docs/configuration.md and docs/metrics.md have programs of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

import staged_pool
from staged_pool.api.commands.table import every_setting
from staged_pool.api.openapi.admin import ADMIN_OPERATIONS
from staged_pool.api.openapi.batches import BATCH_OPERATIONS
from staged_pool.api.openapi.operations import OPERATIONS, TAGS, Operation
from tests.packaging.documents import every_command
from tests.packaging.floors import ROOT

WRITTEN: Final = "`python -m tests.docs.reference` writes this page."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


# Commands


def commands_page() -> str:
    """Return the text of docs/commands.md."""
    parts = [
        "# Commands",
        f"{WRITTEN} [configuration.md](configuration.md) has the settings, which are flags of\nseveral commands.",
    ]
    for words, command in every_command():
        if not isinstance(command, click.Group):
            parts += _command(words, command)
    return "\n\n".join(parts) + "\n"


def _command(words: tuple[str, ...], command: click.Command) -> Iterator[str]:
    name = " ".join(("staged-pool", *words))
    context = click.Context(command, info_name=name)
    yield f"## {name}"
    yield textwrap.dedent(f"    {command.help or ''}").strip()
    yield f"```text\n{' '.join((name, *command.collect_usage_pieces(context)))}\n```"
    settings = {row.flag for row in every_setting() if row.about.has_flag}
    options = [each for each in command.params if isinstance(each, click.Option)]
    own = [each for each in options if each.opts[0] not in settings]
    if own:
        yield "\n".join(["| flag | |", "|---|---|", *map(_option, own)])
    shared = [name for each in options if each.opts[0] in settings for name in (*each.opts, *each.secondary_opts)]
    if settings <= {*shared}:
        yield "Every flag of [configuration.md](configuration.md#all-settings)."
    elif shared:
        flags = ", ".join(f"`{flag}`" for flag in shared)
        yield f"Flags of [configuration.md](configuration.md#all-settings): {flags}."


def _option(option: click.Option) -> str:
    metavar = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    names = " ".join(f"`{name}`" for name in (*option.opts[1:], option.opts[0] + metavar, *option.secondary_opts))
    return f"| {names} | {_cell(option.help or '')} |"


# Routes


def routes_page() -> str:
    """Return the text of docs/routes.md."""
    parts = [
        "# Routes",
        f"{WRITTEN} [http.md](http.md) explains the routes. `/openapi.json` of a server has the type\n"
        "of each field, with the routes that its models support. `/docs` of a server has a form to try each.",
        "*Task* routes go through the four stages, under the limits of admission. A field in **bold** must be given.\n"
        "Each route of a model is also below `/m/NAME`. Served [pipelines](pipelines.md) add `POST /pipelines/NAME`\n"
        "and `GET /pipelines`.",
    ]
    found = {**OPERATIONS, **BATCH_OPERATIONS, **ADMIN_OPERATIONS}
    for tag, summary in TAGS.items():
        rows: dict[tuple[str, str], list[str]] = {}
        for path, methods in found.items():
            for method, operation in methods.items():
                if operation.tag == tag:
                    rows.setdefault(_route(operation), []).append(f"`{method} {path}`")
        table = [f"| {', '.join(paths)} | {about} | {fields} |" for (about, fields), paths in rows.items()]
        parts += [f"## {tag}", summary, "\n".join(["| route | | fields of the body |", "|---|---|---|", *table])]
    return "\n\n".join(parts) + "\n"


def _route(operation: Operation) -> tuple[str, str]:
    """Return the description of a route, and the fields of its body."""
    about = f"{operation.summary}{' (task)' if operation.is_task else ''}. {operation.text}".strip()
    about = re.sub(r"(?<![\w`])/(?:[\w-]+/)*[\w-]+", lambda found: f"`{found[0]}`", about)
    return _cell(about), " or ".join(filter(None, (_fields(kind) for kind in operation.body)))


def _fields(kind: Any) -> str:
    try:
        found = msgspec.structs.fields(kind)
    except TypeError:
        return ""
    names = [f"**`{each.encode_name}`**" for each in found if each.required]
    return ", ".join(names + [f"`{each.encode_name}`" for each in found if not each.required])


# Python


GROUPS: Final[Mapping[str, str]] = {
    "Engines": r"staged_pool\.(pool|runtime\.(engine|config|model))",
    "Clients": r"staged_pool\.client",
    "Requests": r"staged_pool\.runtime\.(requests|inputs|tasks)",
    "Results": r"staged_pool\.runtime\.(results|statistics|admission)",
    "Pipelines": r"staged_pool\.runtime\.pipelines",
    "Plugins": r"staged_pool\.runtime\.plugins",
    "Errors": r"staged_pool\.(stages|runtime)\.errors",
}
"""Groups of names, by the modules that define them. Others are among the requests."""


def python_page() -> str:
    """Return the text of docs/python.md."""
    parts = [
        "# Python",
        f"{WRITTEN} These are the names of `staged_pool`. [library.md](library.md) explains how\n"
        "to use them. [`staged_pool.asgi`](library.md#mounted-in-an-application) and [`staged_pool.ray`](ray.md) have\n"
        "names of their own.",
    ]
    grouped: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name in sorted(set(staged_pool.__all__) - {"__version__"}, key=str.lower):
        grouped[_group(getattr(staged_pool, name))].append(name)
    for group, names in grouped.items():
        if names:
            parts.append(f"## {group}")
            for name in names:
                parts += _name(name, getattr(staged_pool, name))
    return "\n\n".join(parts) + "\n"


def _group(value: Any) -> str:
    module = getattr(value, "__module__", "")
    return next((group for group, pattern in GROUPS.items() if re.match(pattern, module)), "Requests")


def _name(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield _text(value)
        yield "Values: " + ", ".join(f"`{each.name}`" for each in value) + "."
    elif isinstance(value, type):
        if name == "EngineConfig":
            yield f"{_text(value)}\n\nThe fields are in [configuration.md](configuration.md#all-settings)."
            return
        yield from _class(name, value)
    elif callable(value):
        yield f"```text\n{name}{_signature(value)}\n```"
        yield _text(value)
    else:
        yield f"The constant `{value!r}`. {_constant(name)}".strip()


def _class(name: str, value: type) -> Iterator[str]:
    fields = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    if issubclass(value, Exception):
        bases = [base.__name__ for base in value.__bases__ if base is not Exception]
        yield f"{_text(value)}" + (f"\n\nA kind of {', '.join(f'`{base}`' for base in bases)}." if bases else "")
        return
    if (
        not fields
        and "Made by" not in (value.__doc__ or "")
        and any("__init__" in vars(base) for base in value.__mro__ if base.__module__.startswith("staged_pool"))
    ):
        yield f"```text\n{name}{_signature(value.__init__)}\n```"
    yield _text(value)
    about = _field_texts(value)
    public = [(each, member) for each, member in _members(value) if each not in fields]
    if lines := [f"- `{each}: {_annotation(value, each)}`{_behind(about.get(each, ''))}" for each in fields]:
        yield "\n".join(lines)
    if lines := [_member(each, member) for each, member in public]:
        yield "\n".join(lines)


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that the package defines, those of base classes first."""
    seen: dict[str, Any] = {}
    for base in reversed(value.__mro__):
        if base.__module__.startswith("staged_pool"):
            seen |= {name: member for name, member in vars(base).items() if not name.startswith("_")}
    for name, member in seen.items():
        if isinstance(member, (property, classmethod, staticmethod)) or inspect.isfunction(member):
            yield name, member


def _member(name: str, member: Any) -> str:
    if isinstance(member, property):
        return f"- `{name}`{_behind(_first(member.fget))}"
    function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    return f"- `{prefix}{name}{_signature(function)}`{_behind(_first(function))}"


def _signature(function: Callable[..., Any]) -> str:
    parts: list[str] = []
    star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls", "defaults"):  # the last is that of a client, which fills it in
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        name = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            name, star = f"*{name}", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            name = f"**{name}"
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        parts.append(f"{name}{default}")
    return f"({', '.join(parts)})"


def _default(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    return "..." if " at 0x" in repr(value) else re.sub(r"<(\w+\.\w+): [^>]+>", r"\1", repr(value))


def _annotation(value: type, name: str) -> str:
    for base in value.__mro__:
        if name in (found := vars(base).get("__annotations__", {})):
            return str(found[name])
    raise LookupError(name)


def _field_texts(value: type) -> Mapping[str, str]:
    """Return the texts under the fields of a class, by name."""
    found: dict[str, str] = {}
    for base in reversed(value.__mro__):
        if not base.__module__.startswith("staged_pool"):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found


def _constant(name: str) -> str:
    """Return the text under a constant of the package."""
    for path in ROOT.glob("runtime/*.py"):
        found = re.search(rf'^{name}\b[^\n]*\n"""(.*?)"""', path.read_text(), re.MULTILINE | re.DOTALL)
        if found:
            return found[1]
    return ""


def _behind(text: str) -> str:
    return f": {' '.join(text.split())}" if text else ""


def _first(function: Any) -> str:
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


_SECTION: Final = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")


def _text(value: Any) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    lines: list[str] = []
    inside = False
    for line in (inspect.getdoc(value) or "").splitlines():
        if section := _SECTION.match(line):
            inside = True
            lines += [f"{section[1]}:", ""]
        elif inside and (entry := re.match(r"    (\w+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif inside and line.startswith("    "):
            lines.append(f"  {line.strip()}" if line.startswith("        ") else line.strip())
        else:
            inside = inside and not line
            lines.append(line)
    return "\n".join(lines).strip()


PAGES: Final[Mapping[Path, Callable[[], str]]] = {
    ROOT / "docs" / "commands.md": commands_page,
    ROOT / "docs" / "routes.md": routes_page,
    ROOT / "docs" / "python.md": python_page,
}


def main() -> None:
    for path, page in PAGES.items():
        path.write_text(page())


if __name__ == "__main__":
    main()
