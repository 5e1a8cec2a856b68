"""Code in README.md and docs/ runs, or is parsed by its program."""

from __future__ import annotations

import argparse
import ast
import base64
import configparser
import importlib.util
import inspect
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import CodeType
from typing import Any, Final

import anyio
import anyio.to_thread
import httpx
import jsonschema_rs
import pytest
import yaml
from anyio.from_thread import start_blocking_portal
from PIL import Image

from staged_pool.runtime.pipelines.file import read_pipeline
from tests.conftest import BACKENDS
from tests.docs.blocks import PAGES, Block, Command, blocks, commands
from tests.models.tiny import build
from tests.packaging.documents import every_command
from tests.packaging.floors import ROOT
from tests.servers.in_process import invoke_command
from tests.servers.on_socket import serving
from tests.servers.tiny_models import folder, tiny, tiny_models

REASONS: Final = {
    "needs Docker",
    "needs a cluster",
    "needs root",
    "needs Ray",
    "needs the network",
    "needs a plugin of yours",
}
"""Reasons for which a block may be left out."""
MOST_LEFT_OUT: Final = 12
"""Most blocks that may be left out."""

ADMIN_KEY: Final = "an-admin-key-of-the-tests"
TINY: Final = {
    "STAGED_POOL_MODEL": "",
    "STAGED_POOL_DTYPE": "float32",
    "STAGED_POOL_TORCH_THREADS": "1",
    "STAGED_POOL_OFFLINE": "1",
}
"""Variables of commands that load a model. Empty: the folder of a tiny one."""

SHORT: Final = ("--duration", "0.2", "--rounds", "1", "--warmup", "0", "--file", "texts.txt")
"""Flags that shorten a load test."""

ALL: Final = [block for page in PAGES for block in blocks(page)]
RUN: Final = [block for block in ALL if not block.reason]


def of(*languages: str) -> pytest.MarkDecorator:
    """Parametrize a test by the blocks of some languages."""
    found = [block for block in RUN if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=lambda block: block.place)


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """The loops of these tests are those of the documents, and of servers beside them."""


class Servers:
    """Servers of tiny models: one of texts, and one of images and texts."""

    def __init__(self, texts: str, images: str) -> None:
        self.texts = texts
        self.images = images

    def of_page(self, page: Path) -> str:
        """Return the address of the server for the commands of a page."""
        return self.images if page.stem == "images" else self.texts


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("clip", tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture(scope="module")
def servers(clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    batches = tmp_path_factory.mktemp("batches")
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        texts = stack.enter_context(
            portal.wrap_async_context_manager(
                serving(
                    *tiny_models("embedder", "ranker", "classifier"), admin_api_keys=(ADMIN_KEY,), batch_dir=batches
                )
            )
        )
        images = stack.enter_context(portal.wrap_async_context_manager(serving(tiny(clip, served_name="clip"))))
        yield Servers(texts.url, images.url)


@pytest.fixture
def place(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the documents name."""
    models = {"model": "embedder", "reranker": "ranker", "classifier": "classifier"}
    for name, kind in models.items():
        (tmp_path / f"my-{name}").symlink_to(folder(kind))
    (tmp_path / "my-clip").symlink_to(clip)
    Image.new("RGB", (64, 48), "gray").save(tmp_path / "cat.jpg")
    (tmp_path / "texts.txt").write_text("a text\nanother\na third\n")
    good = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "A man is eating food."}}
    lines = [
        good,
        good | {"custom_id": "b", "body": {"input": "b", "dimensions": -1}},
        good | {"custom_id": "c", "url": "/"},
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "server.log").touch()
    (tmp_path / "monday.trace").touch()
    (tmp_path / "keys").write_text("a-key\n")
    monkeypatch.chdir(tmp_path)
    for name, value in TINY.items():
        monkeypatch.setenv(name, value or str(folder("embedder")))
    return tmp_path


def fitted(text: str, url: str) -> str:
    """Return code with the addresses, files and amounts of the test."""
    picture = base64.b64encode(Path("cat.jpg").read_bytes()).decode()
    for pattern, ours in {
        r"http://(?:127\.0\.0\.1|localhost):800\d": url,
        r"(?<![/\w])(?:127\.0\.0\.1|localhost):800\d": url,
        r"http://example\.org(?=\")": f"{url}/health",
        r"base64,…": f"base64,{picture}",
        r"\"…\"": '"a-key"',
        r"path/to/model": str(folder("embedder")),
        r"path/to/reranker": str(folder("ranker")),
        r"path/to/clip": str(Path("my-clip").resolve()),
        r"/models/all-MiniLM-L6-v2": str(folder("embedder")),
        r"/etc/staged-pool/keys": "keys",
        r"\b100_000\b": "100",
        r"\b1_000\b": "20",
        r"time\.sleep\(1\)": "time.sleep(0.02)",
    }.items():
        text = re.sub(pattern, ours.replace("\\", r"\\"), text)
    return text


# All blocks


def test_every_block_has_a_language_with_a_test() -> None:
    known = {"python", "console", "json", "toml", "yaml", "ini", "text"}
    assert not [block.place for block in ALL if block.language not in known]
    for page in PAGES:
        text = page.read_text()
        assert text.count("```") == 2 * len(blocks(page)), page
        assert not re.search(r"^    (\$|curl|staged-pool|pip|make) ", "".join(text.split("```")[::2]), re.MULTILINE), (
            page
        )


def test_few_blocks_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = [block for block in ALL if block.reason]
    with capsys.disabled():
        print(f"\n{len(RUN)} blocks: {dict(Counter(block.language for block in RUN))}; left out:")
        for block in left_out:
            print(f"  {block.place}: {block.reason}")
    assert {block.reason for block in left_out} <= REASONS
    assert len(left_out) <= MOST_LEFT_OUT
    for block in left_out:
        if block.language == "python":
            compiled(block, block.text)


# Python


def compiled(block: Block, text: str) -> CodeType:
    """Compile a block, which may await. Its lines have the numbers of the document."""
    code: CodeType = compile(
        "\n" * (block.line - 1) + text, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    return code


async def run_page(found: Sequence[Block], url: str) -> None:
    """Run the blocks of a page in order, and each `main` of them."""
    names: dict[str, Any] = {"__name__": "a_page"}
    for block in found:
        names.pop("main", None)
        code = compiled(block, fitted(block.text, url))
        if code.co_flags & inspect.CO_COROUTINE:
            await eval(code, names)
        else:
            await anyio.to_thread.run_sync(exec, code, names)
        if "main" in names:
            await names["main"]()
    if "pool" in names and hasattr(names["pool"], "close"):
        await anyio.to_thread.run_sync(names["pool"].close)


PYTHON: Final = {
    str(page.relative_to(ROOT)): found
    for page in PAGES
    if (found := [block for block in blocks(page) if block.language == "python" and not block.reason])
}


def _waits(page: str) -> bool:
    """True if the code of a page awaits anything: it then runs on each event loop."""
    return any(re.search(r"\bawait\b|\basync ", block.text) for block in PYTHON[page])


@pytest.mark.parametrize(
    ("page", "backend"),
    [
        pytest.param(page, *backend.values, id=f"{page}-{backend.id}")
        for page in PYTHON
        for backend in BACKENDS[: None if _waits(page) else 1]
    ],
)
def test_python_runs(page: str, backend: tuple[str, dict[str, Any]], servers: Servers, place: Path) -> None:
    if any("import openai" in block.text for block in PYTHON[page]):
        pytest.importorskip("openai", reason="a package of make clients")
    name, options = backend
    anyio.run(run_page, PYTHON[page], servers.of_page(ROOT / page), backend=name, backend_options=options)


# Consoles


@of("console")
def test_commands_run(block: Block, servers: Servers, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGED_POOL_ADMIN_API_KEY", ADMIN_KEY)
    url = servers.of_page(block.page)
    for other in blocks(block.page):
        if other.language == "toml":
            named = re.match(r'name = "(\w+)"', other.text)
            Path(f"{named[1] if named else 'pool'}.toml").write_text(fitted(other.text, url))
    for command in commands(block):
        program, *arguments = command.words
        with monkeypatch.context() as variables:
            if program == "staged-pool" and (arguments[0] == "config" or "--url" in arguments):
                for name in TINY:
                    variables.delenv(name)
            for name, value in command.environment.items():
                variables.setenv(name, value)
            if arguments == ["top", "--once"]:
                arguments.append(url)
            PROGRAMS[Path(program).name]([fitted(each, url) for each in arguments], command)


def staged_pool(arguments: Sequence[str], command: Command) -> None:
    """Run a command; a server has its settings checked, and what takes long or another model its flags."""
    name, *rest = arguments
    if name == "trace" or {"--sweep", "--candidate-labels"} & set(rest):
        parse(arguments)
        return
    done = invoke_command(*{"serve": ["config", *rest], "bench": ["bench", *rest, *SHORT]}.get(name, arguments))
    printed = done.stdout + done.stderr
    statuses = {0, 3} if name == "bench" else {0}  # 3: the generator was slow, beside other tests
    if any(re.search(r"[1-9]\d* failed", line) for line in command.printed):
        statuses = {4}
    assert done.returncode in statuses, printed
    for line in command.printed:
        pattern = re.sub(r"(?<= )[\d.,]+(?= (?:s|lines/s)\b)", "NUMBER", line)
        assert re.search(re.escape(pattern).replace("NUMBER", r"[\d.,]+"), printed), (line, printed)


def parse(arguments: Sequence[str]) -> None:
    """Parse flags with the command line."""
    known = dict(every_command())
    words = next(words for words in known if list(words) == [*arguments[: len(words)]])
    known[words].make_context("a document", [*arguments[len(words) :]])


CURL: Final = argparse.ArgumentParser(prog="curl", exit_on_error=False)
CURL.add_argument("-s", action="store_true")
CURL.add_argument("-i", action="store_true")
CURL.add_argument("-X", default=None)
CURL.add_argument("-H", action="append", default=[])
CURL.add_argument("-d", default=None)
CURL.add_argument("-F", action="append", default=[])
CURL.add_argument("url")


def curl(arguments: Sequence[str], command: Command) -> None:
    """Send a request as curl does. Its answer has the fields that the document shows."""
    given = CURL.parse_args(list(arguments))
    headers = {"content-type": "application/x-www-form-urlencoded"} if given.d else {}
    headers |= dict(os.path.expandvars(header).split(": ", 1) for header in given.H)
    parts = [part.split("=", 1) for part in given.F]
    files = [
        (name, (None, value) if value[0] != "@" else (value[1:], Path(value[1:]).read_bytes())) for name, value in parts
    ]
    method = given.X or ("GET" if given.d is None and not files else "POST")
    answer = httpx.request(method, given.url, headers=headers, content=given.d, files=files or None, timeout=60)
    assert answer.status_code == 200, answer.text
    if given.url.endswith("/admin/models"):  # it would make other requests ambiguous
        httpx.delete(f"{given.url}/{answer.json()['name']}", headers=headers, timeout=60).raise_for_status()
    for field in re.findall(r'"(\w+)":', "".join(command.printed)):
        assert f'"{field}":' in answer.text.replace('": ', '":'), field


def make(arguments: Sequence[str], _: Command) -> None:
    """Find the targets in the Makefile."""
    targets = [word for word in arguments if "=" not in word]
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def pip(arguments: Sequence[str], _: Command) -> None:
    """Find the extras in pyproject.toml."""
    action, *packages = arguments
    assert action == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package in packages:
        found = re.fullmatch(r"staged-pool\[([\w,]+)\]", package)
        assert found, package
        assert {*found[1].split(",")} <= {*extras}, package


def python(arguments: Sequence[str], _: Command) -> None:
    """Find a module; `tests.packaging.test_documents` knows its flags."""
    assert arguments[0] == "-m"
    assert importlib.util.find_spec(arguments[1]), arguments


PROGRAMS: Final[dict[str, Callable[[Sequence[str], Command], None]]] = {
    "staged-pool": staged_pool,
    "curl": curl,
    "make": make,
    "pip": pip,
    "python": python,
}


# Files


@of("json")
def test_json_is_right(block: Block, servers: Servers, place: Path) -> None:
    """Lines of requests are sent to a server."""
    for line in block.text.splitlines():
        value = json.loads(line.replace("{…}", "{}").replace("[…]", "[]"))
        if "url" in value:
            answer = httpx.request(value["method"], servers.texts + value["url"], json=value["body"], timeout=60)
            assert answer.status_code == 200, answer.text


@of("toml")
def test_toml_is_right(block: Block, servers: Servers, place: Path) -> None:
    path = Path("file.toml")
    path.write_text(fitted(block.text, servers.texts))
    value = tomllib.loads(path.read_text())
    if "stage" in value:
        assert read_pipeline(path).name
    elif "project" in value:
        assert [*value["project"]["entry-points"]] == ["staged_pool.plugins"]
    else:
        done = invoke_command("config", "--config", str(path))
        assert done.returncode == 0, done.stderr


@of("yaml")
def test_yaml_is_right(block: Block) -> None:
    value = yaml.safe_load(block.text)
    settings = {row.flag.removeprefix("--") for row in every_flag()}
    if "applications" in value:
        for application in value["applications"]:
            assert application["import_path"] == "staged_pool.ray:build"
            assert {*application["args"]} <= settings | {"preparers"}
    else:
        schema = json.loads((ROOT / "deploy/helm/staged-pool/values.schema.json").read_text())
        jsonschema_rs.validate(schema, value)


def every_flag() -> Sequence[Any]:
    from staged_pool.api.commands.table import every_setting

    return [row for row in every_setting() if row.about.has_flag]


@of("ini")
def test_units_are_right(block: Block) -> None:
    """Keys of a drop-in are keys that the unit or systemd's manual names."""
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block.text)
    assert unit.sections() == ["Service"]
    assert {*unit["Service"]} <= {"LoadCredential", "Environment", "PrivateDevices", "DeviceAllow"}
