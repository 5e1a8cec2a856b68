"""Documents name what exists: paths, links, targets of make, commands, flags and variables."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from staged_pool.api.commands import cli
from tests.packaging.code_map import ARCHITECTURE, CODE_MAP, code_map, with_folders
from tests.packaging.documents import (
    DOCUMENTS,
    anchors,
    code,
    every_command,
    first_column,
    links,
    paths,
    prose,
    read,
    words_after,
)
from tests.packaging.floors import ROOT
from tests.packaging.writing import SENTENCE_WORDS, words

README_LINES = 150
GLOSSARY_WORDS = 25

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
TOOL = re.compile(r"python -m|perf|tests\.|\bmake\b|\bpip\b|docker|helm|kubectl|systemctl|systemd-analyze|ulimit|git ")
"""Code that may have flags of other programs than staged-pool."""
OTHERS = re.compile(r"\b(pip install|docker|helm|kubectl|systemctl|systemd-analyze)\b")
"""Programs whose flags the tests do not know."""

MADE_OF_DOCSTRINGS = (CODE_MAP, ROOT / "docs" / "commands.md", ROOT / "docs" / "python.md")
"""Documents that are not written by hand. Docstrings have a checker of their own."""

FOR_USERS = [path for path in DOCUMENTS if path.parent in (ROOT, ROOT / "docs") and path.name != "CONTRIBUTING.md"]

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def commands() -> dict[str, Any]:
    """The commands of `staged-pool` by name."""
    return dict(cli.main.commands)


@cache
def flags() -> set[str]:
    found = {"--help"}
    for command in (cli.main, *(command for _, command in every_command())):
        for parameter in command.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found


@cache
def variables() -> set[str]:
    found: set[str] = set()
    for _, command in every_command():
        for parameter in command.params:
            variable = getattr(parameter, "envvar", None)
            found |= {variable} if isinstance(variable, str) else set(variable or ())
    return found


@cache
def flags_of_tools() -> set[str]:
    """Flags of perf and of the tests' programs: those written out, and those that typer makes of parameters."""
    found = {"--index-url", "--cpus", *FLAG.findall((ROOT / "Makefile").read_text())}
    for path in (*ROOT.glob("perf/**/*.py"), *ROOT.glob("tests/**/__main__.py"), *ROOT.glob("tests/*/[a-z]*.py")):
        text = path.read_text()
        found |= {*FLAG.findall(text)}
        for name in re.findall(r'^    "(\w+)": "', text, re.MULTILINE):  # kinds of worlds of the simulator
            found.add(f"--{name}")
        for name in re.findall(r"^    (\w+): Annotated\[", text, re.MULTILINE):
            found |= {f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"}
    return found


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    text = read(path)
    for target in links(text):
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(read(there)), target


@each_document
def test_paths_exist(path: Path) -> None:
    assert not [named for named in paths(read(path)) if not any(ROOT.glob(named))]


@each_document
def test_targets_of_make_exist(path: Path) -> None:
    for span in code(read(path)):
        for after in words_after("make", span.text):
            for word in after:
                if not re.fullmatch("[a-z]+", word):
                    break
                assert word in targets(), span


@each_document
def test_modules_that_are_run_exist(path: Path) -> None:
    for span in code(read(path)):
        for name in re.findall(r"python -m ((?:perf|tests|staged_pool)[\w.]*)", span.text):
            assert importlib.util.find_spec(name), span


def _exists(name: str) -> bool:
    """True if the package has a name. Names of `staged_pool.ray` are looked up in its text: it needs an extra."""
    package, _, rest = name.partition("staged_pool.ray")
    if package or rest[:1] not in ("", "."):
        return pkgutil.resolve_name(name) is not None
    return not rest or f'"{rest[1:]}"' in (ROOT / "api/ray/__init__.py").read_text()


def span_attributes() -> set[str]:
    """Return the names of attributes of spans, which look like those of modules."""
    source = (ROOT / "api" / "tracing" / "span_writer.py").read_text(encoding="utf-8")
    return set(re.findall(r'"(staged_pool\.\w+)"', source))


@each_document
def test_python_names_exist(path: Path) -> None:
    for span in code(read(path)):
        for name in re.findall(r"(?<![\w.\"])staged_pool(?:\.[A-Za-z_]\w*)+", span.text):
            assert name in span_attributes() or _exists(name), span


@each_document
def test_commands_exist(path: Path) -> None:
    for span in code(read(path)):
        for after in words_after("staged-pool", span.text):
            if after and re.fullmatch("[a-z][a-z-]*", after[0]):
                assert after[0] in commands(), span
                if isinstance(group := commands()[after[0]], click.Group) and len(after) > 1:
                    assert after[1] in group.commands, span


@each_document
def test_flags_exist(path: Path) -> None:
    for span in code(read(path)):
        for flag in FLAG.findall(span.text):
            if path in FOR_USERS and not TOOL.search(span.text) and "curl" not in span.text:
                assert flag in flags(), span
            elif not OTHERS.search(span.text):
                assert flag in flags() | flags_of_tools(), span


@each_document
def test_variables_exist(path: Path) -> None:
    for span in code(read(path)):
        for name in re.findall(r"STAGED_POOL_[A-Z_]*[A-Z]", span.text):
            assert name in variables(), span


@each_document
def test_metrics_exist(path: Path) -> None:
    sources = "".join(source.read_text() for folder in ("app", "fleet") for source in ROOT.glob(f"api/{folder}/*.py"))
    for span in code(read(path)):
        for name in re.findall(r"staged_pool_(\w+?)(?:_total)?(?=\b|\{)", span.text):
            assert re.search(rf'"(staged_pool_)?{name}"', sources), span


def test_the_readme_is_short() -> None:
    assert read(ROOT / "README.md").count("\n") <= README_LINES


def test_the_glossary_is_short() -> None:
    glossary = first_column(read(ROOT / "CONTRIBUTING.md"), "Glossary")
    assert 0 < len(glossary) <= GLOSSARY_WORDS
    assert len(glossary) == len(set(glossary))


def test_the_code_map_is_up_to_date() -> None:
    """`python -m tests.packaging.code_map` writes it."""
    assert read(CODE_MAP) == code_map()
    assert read(ARCHITECTURE) == with_folders(read(ARCHITECTURE))


def test_every_document_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        path = todo.pop()
        if path not in reached and path.suffix == ".md" and path.exists():
            reached.add(path)
            todo += [(path.parent / link.partition("#")[0]).resolve() for link in links(read(path)) if link[0] != "#"]
    assert not [path for path in DOCUMENTS if path not in reached and ".github" not in path.parts]


@each_document
def test_sentences_are_short_and_words_are_those_of_the_glossary(path: Path) -> None:
    if path in MADE_OF_DOCSTRINGS:
        return
    text = read(path)
    assert not re.search(r"\b(refus\w+|pictur\w+|turn(ed|s)? away|declin\w+)\b", text, re.IGNORECASE)
    assert not [sentence for sentence in prose(text) if words(sentence) > SENTENCE_WORDS]
