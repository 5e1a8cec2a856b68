"""The command as a user runs it: a process of its own."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from staged_pool.api.commands.process import in_flag_words
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Image, Output
from tests.models.images.drawing import drawing, encode
from tests.models.requests import embed
from tests.models.tiny import CLASSIFIERS, build
from tests.servers.process import START_S, ServerProcess, run_command, serve_command


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """These tests have no event loop, and wait for processes."""


def server_of(*flags: str, folder: Path) -> ServerProcess:
    return ServerProcess(serve_command(*flags), folder / "log")


def names(server: ServerProcess) -> list[str]:
    """The names of the events in its log, which is nothing but JSON."""
    return [json.loads(line)["event"] for line in server.log.splitlines()]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_answers_probes_at_once_serves_when_loaded_and_drains_when_told(
    backend: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with server_of("--backend", backend, "--model", str(tiny_folder), folder=tmp_path) as server:
        health, ready = server.ask("/health"), server.ask("/ready")
        server.wait_ready()
        answer = server.ask("/v1/embeddings", {"input": ["a", "b"]})
        code = server.end()
    assert (health[0], set(health[1])) == (200, {"unix"})
    assert ready == (503, {"ready": False, "reason": "loading the model"})
    assert answer[0] == 200
    assert len(answer[1]["data"]) == 2
    assert code == 0
    assert names(server)[0] == "server.listening"
    assert [name for name in names(server) if name.startswith("server.")][1:] == [
        "server.ready",
        "server.stopping",
        "server.stopped",
    ]


def test_it_ends_when_told_while_it_loads(tiny_folder: Path, tmp_path: Path) -> None:
    with server_of("--model", str(tiny_folder), folder=tmp_path) as server:
        assert server.ask("/ready")[0] == 503
        assert server.end(signal.SIGINT) == 0
    assert "server.ready" not in names(server)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (("--preprocess-limit", "0"), "must be at least 1"),
        (("--body-limit-mb", "0"), "must be between 0.001 and 2048"),
        (("--port", "99999"), "must be between 0 and 65535"),
        (("--media-timeout", "0.0"), "must be between 0.001 and 86400"),
        (("--max-image-pixels", "0"), "must be at least 1"),
    ],
)
def test_a_setting_out_of_range_is_named_as_a_flag(flag: tuple[str, str], words: str) -> None:
    done = run_command("serve", *flag)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {flag[0]} {flag[1]}: {words}\n"


def test_a_port_that_is_taken_is_said_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = run_command("serve", STAGED_POOL_PORT=port)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --port {port}: another process already listens there on 127.0.0.1; stop it, or choose another port\n"
    )


def test_a_host_that_is_not_there_is_said_in_a_sentence() -> None:
    done = run_command("serve", "--host", "no.such.host.invalid")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --host 'no.such.host.invalid': no such host name or address\n",
    )


LIGHT = [
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
    "from staged_pool.api.commands.cli import main; main(prog_name='staged-pool')",
]
"""The command where neither can be imported: it must end before it needs them, which takes seconds."""

WRONG: list[tuple[list[str], str]] = [
    (["serve", "--model", "/nope"], "--model '/nope': there is no such folder"),
    (["serve", "--model", "one=/nope", "--model", "two=/nope"], "--model '/nope': there is no such folder"),
    (["embed", "--model", "./nope", "a"], "--model './nope': there is no such folder; name one that holds"),
    (["embed", "--model", "no-org/nope", "--offline", "a"], "--model 'no-org/nope': there is no such folder, it is"),
    (["embed", "--model", "nope", "a"], "not in the hub's local cache"),
    (["embed", "--model", __file__, "a"], "is a file; name the folder that holds it"),
    (["embed", "--model", str(Path(__file__).parent), "a"], "no config.json"),
    (["embed", "--model", str(Path(__file__).parent), "--revision", "main", "a"], "only a hub id has revisions"),
    (["embed", "--model", "x" * 300, "a"], "cannot be read: File name too long"),
    (["score", "--model", "/nope", "a query", "a document"], "--model '/nope': there is no such folder"),
    (["classify", "--model", "/nope", "a"], "--model '/nope': there is no such folder"),
    (["check", "/nope"], "--model '/nope': there is no such folder"),
    (["embed"], "no text: give one as an argument, or one a line on the standard input"),
    (["classify"], "no text: give one"),
    (["score", "a query"], "no document: give one"),
    (["score", "", "a document"], "the query is empty; it must say what is looked for"),
    (["embed", "--dimensions", "0", "a"], "--dimensions 0: must be at least 1"),
    (["embed", "--device", "cpu", "--dtype", "float16", "a"], "--dtype 'float16': is for GPUs"),
    (["embed", "--device", "cuda", "--forward-workers", "2", "a"], "--forward-workers 2: a cuda device"),
    (["serve", "--score-template", "{query}", "--model", "."], "must have one field {document}"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(wrong)[:40] for wrong, _ in WRONG])
def test_what_is_wrong_is_said_before_torch_is_imported(arguments: list[str], words: str) -> None:
    done = run_command(*arguments, command=LIGHT, stdin="\n", HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("wrong", ["missing", "without weights"])
def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(wrong: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if wrong == "without weights":
        shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    done = run_command("serve", "--port", "0", "--model", str(folder))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2
    assert len(errors) == 1
    assert str(folder) in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("from_stdin", [False, True])
def test_embed_prints_one_object_a_text(from_stdin: bool, tiny_folder: Path) -> None:
    texts = ["a query", "another"]
    arguments, stdin = ([], "\n".join(texts) + "\n") if from_stdin else (texts, "")
    done = run_command(
        "embed", "--model", str(tiny_folder), "--offline", "--matryoshka", "--dimensions", "3", *arguments, stdin=stdin
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(row["index"], row["text"], len(row["embedding"])) for row in rows] == [
        (0, "a query", 3),
        (1, "another", 3),
    ]


@pytest.mark.parametrize("from_stdin", [False, True])
def test_score_prints_one_object_a_document(from_stdin: bool, tiny_folder: Path) -> None:
    documents = ["a query", "another"]
    arguments, stdin = ([], "\n".join(documents) + "\n") if from_stdin else (documents, "")
    done = run_command(
        "score", "--model", str(tiny_folder), "--offline", "--dtype", "float32", "a query", *arguments, stdin=stdin
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(row["index"], row["document"]) for row in rows] == [(0, "a query"), (1, "another")]
    assert rows[0]["score"] == pytest.approx(1, abs=1e-5)
    assert rows[1]["score"] < rows[0]["score"]


def test_classify_prints_one_object_a_text(tmp_path: Path) -> None:
    folder = build(next(iter(CLASSIFIERS)), tmp_path / "classifier")
    done = run_command("classify", "--model", str(folder), "--offline", "a text", "another")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(row["index"], row["text"]) for row in rows] == [(0, "a text"), (1, "another")]
    assert all(isinstance(row["label"], str) and len(row["probs"]) > 1 for row in rows)


def test_a_task_that_the_model_cannot_do_ends_with_one_line(tiny_folder: Path) -> None:
    done = run_command("classify", "--model", str(tiny_folder), "--offline", "a text")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].endswith("has no labels to classify by.")


def test_an_image_is_read_from_its_file_and_a_model_of_texts_rejects_it(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"cat")
    done = run_command("embed", "--model", str(tiny_folder), "--offline", "--image", str(tmp_path / "cat.png"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].endswith("reads no images.")
    missing = run_command("embed", "--model", str(tiny_folder), "--offline", "--image", str(tmp_path / "dog.png"))
    assert missing.returncode == 2
    assert "dog.png" in "".join(missing.stderr.replace("│", "").split())  # the box breaks lines


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """One lies, the other stands."""
    files = [tmp_path / "wide.png", tmp_path / "tall.jpg"]
    for file, size in zip(files, ((90, 70), (60, 100)), strict=True):
        file.write_bytes(encode(drawing(*size), "PNG" if file.suffix == ".png" else "JPEG"))
    return files


@pytest.mark.parametrize("kind", ["clip", "qwen2-vl"])
def test_embed_takes_texts_and_then_images(kind: str, tmp_path: Path, images: list[Path]) -> None:
    folder = build(kind, tmp_path / kind)
    common = ("embed", "--model", str(folder), "--offline", "--dtype", "float32")
    done = run_command(*common, "--image", str(images[0]), "a text", "--image", str(images[1]))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    named = [(row["index"], row.get("text"), row.get("image")) for row in rows]
    assert named == [(0, "a text", None), (1, None, str(images[0])), (2, None, str(images[1]))]
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    given: list[str | Image] = ["a text", *(Image(file.read_bytes()) for file in images)]
    for row, one in zip(rows, given, strict=True):
        wanted = embed(model, [one], Output.DENSE).dense
        assert wanted is not None
        assert row["embedding"] == pytest.approx(wanted[0].tolist(), abs=1e-4)


def test_classify_takes_images(tmp_path: Path, images: list[Path]) -> None:
    folder = build("vit-labels", tmp_path / "vit")
    done = run_command("classify", "--model", str(folder), "--offline", *(f"--image={file}" for file in images))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [row["image"] for row in rows] == [*map(str, images)]
    for row in rows:
        assert sum(row["probs"]) == pytest.approx(1, abs=1e-3)
        assert row["label"] == ["cat", "dog", "tree"][row["probs"].index(max(row["probs"]))]


def test_an_image_that_cannot_be_read_is_named_by_its_file(tmp_path: Path, images: list[Path]) -> None:
    folder = build("vit-labels", tmp_path / "vit")
    images[1].write_bytes(images[1].read_bytes()[:100])
    done = run_command("classify", "--model", str(folder), "--offline", *(f"--image={file}" for file in images))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {images[1]}: The image is a JPEG that cannot be decoded")


def test_keys_of_a_file_are_asked_for_and_do_not_come_out(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nvery-secret\n")
    keys = ("--api-key-file", str(tmp_path / "keys"))
    with server_of("--model", str(tiny_folder), *keys, "--log-level", "debug", folder=tmp_path) as server:
        server.wait_ready()
        status, rejected = server.ask("/v1/embeddings", {"input": "a"})
        assert (status, rejected["error"]["type"]) == (401, "AuthenticationError")
        assert server.end() == 0
    assert "very-secret" not in server.log


def test_a_server_on_a_unix_socket_removes_it_when_it_ends(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    with server_of("--model", str(tiny_folder), "--unix-socket", str(path), folder=tmp_path) as server:
        server.wait_listening()
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://pool", timeout=30) as client:
            server.wait_until(lambda: client.get("/ready").status_code == 200, START_S)
            assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200
        assert server.end() == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api-key", ""), "--api-key (number 1): must be"),
        (("--api-key-file", "/no/such/file"), "--api-key-file '/no/such/file': cannot be read"),
        (("--tls-cert", "/no/such/file"), "TLS needs a certificate and its key"),
        (("--cors-origin", "example.org"), "--cors-origin 'example.org': expected scheme://host"),
        (("--quic-port", "4433"), "HTTP/3 is never without TLS"),
    ],
)
def test_a_wrong_flag_of_access_or_transport_ends_with_one_line(flags: tuple[str, ...], words: str) -> None:
    done = run_command("serve", "--port", "0", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert words in line


def test_the_version_is_printed() -> None:
    done = run_command("--version")
    assert (done.returncode, done.stdout.strip().count(".")) == (0, 2)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("drain_timeout_s=-1: must be at least 0", "--drain-timeout -1: must be at least 0"),
        ("body_limit_mb=0: must be between", "--body-limit-mb 0: must be between"),
        ("the folder has no weights", "the folder has no weights"),
        ("allow_media_domains='a b': must be", "--allow-media-domain 'a b': must be"),
    ],
)
def test_messages_speak_of_flags(message: str, words: str) -> None:
    assert in_flag_words(message) == words
