"""Rules of plain English for docstrings and comments, and of size for modules and functions.

`python -m tests.packaging.writing [PATH ...]` prints every place that breaks one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("stages", "runtime", "api", "perf", "examples", "tests")

FIRST_LINE_WORDS: Final = 15
SENTENCE_WORDS: Final = 30
MODULE_LINES: Final = 350
FUNCTION_LINES: Final = 70

LONGER: Final = re.compile(r"^# Longer than 350 lines: .{10}", re.MULTILINE)
"""A module's line that says why it is longer."""

_INDIRECT: Final = re.compile(
    r"(Whether|What|Whatever|How|Who|Whoever|Whose|Which|Whichever|Where|When|Why|Of|Those|So many|So much"
    r"|As many|As much)\b"
)
_QUESTION: Final = re.compile(
    r"(Whether|What|Whatever|Who|Whoever|Whose|Whichever|Of which|So many|So much|As many|As much)\b"
    r"|Which [^?]*$|(whether|what)\b|([Hh]ow|[Ww]hy) [^?]*$"
)
"""The first words of a comment that begins with an indirect question; one with a question mark is direct."""

_PHRASES: Final = re.compile(
    r"\b([Ww]hat (is|it|they)|[Ss]o many|[Aa]s many as|[Ww]hoever|[Ww]hichever|[Hh]ad better|[Tt]hat which|[Tt]hose who"
    r"|[Pp]ictures?|[Rr]efus(es?|ed|ing)|[Tt]urn(s|ed|ing)? away|[Dd]eclin(es?|ed|ing))\b|^Of which\b"
)
"""Phrases with a plainer one, and words that the vocabulary has another for (image, reject)."""

_OTHERS_WORDS: Final = re.compile(r"`[^`]*`|[Cc]onnections? (is |was |are )?refused")
"""Code spans and the operating system's own words, in which a phrase is no fault."""

_GOES_ON: Final = re.compile(r"(and|or|but|of|so|how|which|than|what|in|for|with|by|as|to|the|an?)\b")
_SENTENCE_END: Final = re.compile(r"(?<=[.?!:;])[)\"'`]*\s+")
_ABBREVIATION: Final = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|No)\.$")
_ENDS_WELL: Final = re.compile(r"[.?!:]['\"`)*_]*$|[)`]$")
_BREAK: Final = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|>]|\d+\.|[A-Za-z_]\w*: |Args:|Returns:|Raises:|Yields:))")
_PRAGMA: Final = re.compile(r"#\s*(type:|noqa|fmt:|pragma|mypy:|ruff:|pylint:|!)|#!")


class Fault(NamedTuple):
    """A place that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.rule}: {self.text[:90]}"


class Docstring(NamedTuple):
    """A docstring of a module, class, function or attribute."""

    line: int
    text: str


def docstrings(tree: ast.Module) -> Iterator[Docstring]:
    """Yield each docstring of a module, those of attributes and constants included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for place, statement in enumerate(body):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            if not isinstance(text := statement.value.value, str):
                continue
            first_of = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if (place == 0 and first_of) or (place and isinstance(body[place - 1], ast.Assign | ast.AnnAssign)):
                yield Docstring(statement.lineno, "\n".join(line.strip() for line in text.strip().split("\n")))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; list items, table rows and fields end one too."""
    text = re.sub(r"```.*?```|^( {4,}|>>> ).*$", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in _BREAK.split(text):
        held = ""
        for part in _SENTENCE_END.split(" ".join(paragraph.split())):
            held = f"{held} {part}".strip()
            if _ABBREVIATION.search(held):
                continue
            yield held
            held = ""
        if held:
            yield held


def comments(source: str) -> Iterator[Docstring]:
    """Yield each block of comment lines as one text, without pragmas."""
    held: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _PRAGMA.match(token.string):
            continue
        alone = token.line.lstrip().startswith("#")
        if held and not (alone and token.start[0] == last + 1):
            yield Docstring(start, "\n".join(held))
            held = []
        if not held:
            start = token.start[0]
        held.append(token.string.lstrip("# ").split("  # ")[0])
        last = token.start[0]
    if held:
        yield Docstring(start, "\n".join(held))


def words(text: str) -> int:
    """Count words; a span of code is one."""
    return len(re.sub(r"`[^`]*`", "code", text).split())


def phrase_of(sentence: str) -> str | None:
    """Return the first phrase of a sentence that has a plainer one; None if there is none."""
    found = _PHRASES.search(_OTHERS_WORDS.sub("code", sentence))
    return found.group() if found else None


def faults_of(path: Path) -> Iterator[Fault]:
    """Yield the places of a file that break a rule."""
    source = path.read_text()
    tree = ast.parse(source)
    for line, text in docstrings(tree):
        first = next(sentences(text), "")
        if _INDIRECT.match(first):
            yield Fault(path, line, "begins with an indirect question or a bare Of", first)
        if words(first) > FIRST_LINE_WORDS:
            yield Fault(path, line, f"first sentence over {FIRST_LINE_WORDS} words", first)
        if _GOES_ON.match(text):
            yield Fault(path, line, "begins like the end of another", first)
        if not _ENDS_WELL.search(text.rstrip()):
            yield Fault(path, line, "does not end its sentence", text.rsplit("\n", 1)[-1])
        for sentence in sentences(text):
            if words(sentence) > SENTENCE_WORDS:
                yield Fault(path, line, f"sentence over {SENTENCE_WORDS} words", sentence)
            if phrase := phrase_of(sentence):
                yield Fault(path, line, f"has a plainer phrase than {phrase!r}", sentence)
    for line, text in comments(source):
        if _QUESTION.match(first := next(sentences(text), "")):
            yield Fault(path, line, "comment begins with an indirect question", first)
        for sentence in sentences(text):
            if words(sentence) > SENTENCE_WORDS:
                yield Fault(path, line, f"sentence over {SENTENCE_WORDS} words", sentence)
            if phrase := phrase_of(sentence):
                yield Fault(path, line, f"has a plainer phrase than {phrase!r}", sentence)
    if path.relative_to(ROOT).parts[0] == "tests":
        return
    if source.count("\n") > MODULE_LINES and not LONGER.search(source):
        yield Fault(path, 1, f"over {MODULE_LINES} lines", str(source.count("\n")))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield Fault(path, node.lineno, f"function over {FUNCTION_LINES} lines", f"{node.name}: {lines}")


def files(places: list[str]) -> list[Path]:
    """Return the Python files of these paths of the repository."""
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return found


def main() -> None:
    faults = [fault for path in files(sys.argv[1:] or list(FOLDERS)) for fault in faults_of(path)]
    for fault in faults:
        print(fault)
    print(f"{len(faults)} places break a rule.")


if __name__ == "__main__":
    main()
