"""Foreign JSON is decoded in one place: elsewhere only what the program has written itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

DECODES: Final = ("json.loads", "json.load", "orjson.loads", "msgspec.json.decode", "msgspec.msgpack.decode")

OWN: Final[Mapping[str, str]] = {
    "stages/foreign_json.py": "the one decoder",
    "api/app/live_routes.py": "a report of another process of this server",
    "api/batches/folder.py": "records of a folder that only this server writes; an unreadable one is left alone",
    "api/bulk/journal.py": "records whose checksum has been compared",
    "api/fleet/control.py": "orders of the supervisor to its children",
    "api/ray/object_store.py": "names of three fixed parts, of which none is nested",
    "runtime/models/devices/kernel_choices.py": "decisions that this program has kept; a damaged file is ignored",
    "runtime/models/tokenizing/long_texts.py": "settings that the tokenizers library writes of what it has loaded",
    "runtime/models/tokenizing/tokenizer_file.py": "settings that the tokenizers library writes of what it has loaded",
    "runtime/remote/messages.py": "heads of frames of fixed types, from a process of this server",
}
"""Modules that decode by themselves, each with the reason."""


def decodes(path: Path) -> Iterator[str]:
    """Yield each place of a module that decodes by itself: a call of a function, or of a decoder's method."""
    tree = ast.parse(path.read_text("utf-8"))
    decoders = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and "Decoder(" in ast.unparse(node.value)
        for name in ast.walk(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        of = called.partition(".decode")[0].partition("[")[0]
        if (
            called in DECODES
            or (called.endswith(".decode") and (of in decoders or "decoder" in of.lower()))
            or called in decoders
        ):
            yield f"line {node.lineno}: {called}"


def test_only_these_modules_decode_by_themselves() -> None:
    product = (path for floor in ("api", "runtime", "stages") for path in (ROOT / floor).rglob("*.py"))
    found = {path.relative_to(ROOT).as_posix(): places for path in product if (places := list(decodes(path)))}
    assert {name: places for name, places in found.items() if name not in OWN} == {}
    assert OWN.keys() - found.keys() <= {"stages/foreign_json.py"}, "they decode nothing any more"


def test_a_module_that_decodes_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "_D: Final = msgspec.json.Decoder(int)\n"
        "_E = {1: msgspec.msgpack.Decoder(int)}\n"
        "decode = msgspec.json.Decoder(int).decode\n"
        "a = json.loads(b), _D.decode(b), _E[1].decode(b), decode(b)\n"
        "c = text.decode(), foreign_json.decode(b, _D.decode)\n"
    )
    assert [place.partition(": ")[2] for place in decodes(module)] == [
        "json.loads",
        "_D.decode",
        "_E[1].decode",
        "decode",
    ]
