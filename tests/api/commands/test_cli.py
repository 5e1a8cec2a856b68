"""The command as a user runs it.

Each command also runs in a process of its own. The other tests run it in theirs, or share a process.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from staged_pool.api.commands.process import in_flag_words
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Image, Output, Video
from tests.models.images.drawing import drawing, encode
from tests.models.requests import embed
from tests.models.tiny import CLASSIFIERS, build
from tests.models.videos import files as video_files
from tests.servers.in_process import invoke_command
from tests.servers.process import START_S, ServerProcess, run_command, serve_command


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """These tests have no event loop, and wait for processes."""


def server_of(*flags: str, folder: Path) -> ServerProcess:
    return ServerProcess(serve_command(*flags), folder / "log")


TOLD_AT_AN_IMPORT = """
import os, signal, sys

class Gate:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Gate())
from staged_pool.api.commands.cli import main
main(prog_name="staged-pool")
"""
"""The command, which gets SIGTERM in the moment in which it imports a module."""


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("staged_pool.runtime.models.find", []),
        ("staged_pool.api.http.server", ["--backend", "asyncio"]),
        ("staged_pool.api.http.server", ["--backend", "trio"]),
        ("staged_pool.api.fleet.supervisor", ["--api-servers", "1"]),
    ],
)
def test_sigterm_while_the_server_imports_drains_it(
    module: str, flags: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", TOLD_AT_AN_IMPORT.format(module=module)]
    command += serve_command("--model", str(tiny_folder), *flags)[3:]
    with ServerProcess(command, tmp_path / "log", preloads=None) as server:
        assert server.exit_code() == 0
        assert '"signal":"SIGTERM"' in server.log


STEPS = ["server.listening", "server.ready", "server.stopping", "server.stopped"]
"""Events of a server's life."""


def names(server: ServerProcess) -> list[str]:
    """The names of the events in its log, which is nothing but JSON."""
    return [json.loads(line)["event"] for line in server.log.splitlines()]


def test_it_answers_probes_at_once_serves_when_loaded_and_drains_when_told(tiny_folder: Path, tmp_path: Path) -> None:
    with server_of("--backend", "asyncio", "--model", str(tiny_folder), folder=tmp_path) as server:
        health, ready = server.ask("/health"), server.ask("/ready")
        server.wait_ready()
        answer = server.ask("/v1/embeddings", {"input": ["a", "b"]})
        code = server.end()
    assert (health[0], set(health[1])) == (200, {"unix"})
    assert (ready[0], ready[1]["reason"].partition(":")[0]) == (503, "loading the model")
    assert answer[0] == 200
    assert len(answer[1]["data"]) == 2
    assert code == 0
    assert names(server)[0] == "server.listening"
    assert [name for name in names(server) if name.startswith("server.")] == STEPS


def test_it_ends_when_told_while_it_loads(tiny_folder: Path, tmp_path: Path) -> None:
    command = serve_command("--model", str(tiny_folder))
    with ServerProcess(command, tmp_path / "log", preloads=None) as server:  # its imports take most of a load
        assert server.ask("/ready")[0] == 503
        assert server.end(signal.SIGINT) == 0
    assert "server.ready" not in names(server)


def test_a_port_that_is_taken_is_said_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = run_command("serve", STAGED_POOL_PORT=port)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --port {port}: another process already listens there on 127.0.0.1; stop it, or choose another port\n"
    )


_LIGHT = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
"""Neither can be imported: a command must end before it needs them, which takes seconds."""

LIGHT = [sys.executable, "-c", _LIGHT + "from staged_pool.api.commands.cli import main; main(prog_name='staged-pool')"]

LIGHT_ONE_AFTER_THE_OTHER = [
    sys.executable,
    "-c",
    _LIGHT
    + """
import json
from click.testing import CliRunner
from staged_pool.api.commands.cli import main
for arguments in json.load(sys.stdin):
    done = CliRunner().invoke(main, arguments, "\\n", prog_name="staged-pool")
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
""",
]
"""Reads commands as JSON, and prints the exit code, stdout and stderr of each."""

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
    (["serve", "--preprocess-limit", "0"], "error: --preprocess-limit 0: must be at least 1\n"),
    (["serve", "--body-limit-mb", "0"], "error: --body-limit-mb 0: must be between 0.001 and 2048\n"),
    (["serve", "--port", "99999"], "error: --port 99999: must be between 0 and 65535\n"),
    (
        ["serve", "--host", "no.such.host.invalid"],
        "no such host name or address; 127.0.0.1 is this machine alone, and 0.0.0.0 all\n",
    ),
    (["serve", "--model", "organisation/model"], "HF_HUB_OFFLINE allows no download: unset it, download it"),
    (["serve", "--model", "organisation/model", "--offline"], "leave --offline out, download it on a machine"),
    (["serve", "--model", "./runtimes"], "there is no such folder; did you mean 'runtime'? Else name one"),
    (["serve", "--media-timeout", "0.0"], "error: --media-timeout 0.0: must be between 0.001 and 86400\n"),
    (["serve", "--max-image-pixels", "0"], "error: --max-image-pixels 0: must be at least 1\n"),
    (["serve", "--port", "0", "--api-key", ""], "--api-key (number 1): must be"),
    (["serve", "--port", "0", "--api-key-file", "/no/such/file"], "--api-key-file '/no/such/file': cannot be read"),
    (["serve", "--port", "0", "--tls-cert", "/no/such/file"], "TLS needs a certificate and its key"),
    (
        ["serve", "--port", "0", "--cors-origin", "example.org"],
        "--cors-origin 'example.org': expected scheme://host",
    ),
    (["serve", "--port", "0", "--quic-port", "4433"], "HTTP/3 is never without TLS"),
]


@pytest.fixture(scope="module")
def told_before_torch() -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command of `WRONG`, which share a process."""
    commands = json.dumps([arguments for arguments, _ in WRONG])
    done = run_command(command=LIGHT_ONE_AFTER_THE_OTHER, stdin=commands, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(WRONG)), ids=[" ".join(wrong)[:40] for wrong, _ in WRONG])
def test_what_is_wrong_is_said_before_torch_is_imported(
    index: int, told_before_torch: list[tuple[int, str, str]]
) -> None:
    code, stdout, stderr = told_before_torch[index]
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert WRONG[index][1] in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--model", "/nope"],
        ["embed", "--model", "/nope", "a"],
        ["score", "--model", "/nope", "a query", "a document"],
        ["classify", "--model", "/nope", "a"],
        ["check", "/nope"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_process_ends_with_one_line_before_torch_is_imported(arguments: list[str]) -> None:
    done = run_command(*arguments, command=LIGHT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --model '/nope': there is no such folder")
    assert done.stderr.count("\n") == 1


def test_a_model_without_weights_ends_it_with_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
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
    done = invoke_command(
        "embed", "--model", str(tiny_folder), "--offline", "--matryoshka", "--dimensions", "3", *arguments, stdin=stdin
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(row["index"], row["text"], len(row["embedding"])) for row in rows] == [
        (0, "a query", 3),
        (1, "another", 3),
    ]


def test_texts_of_the_standard_input_have_no_mark_and_either_line_end(tiny_folder: Path) -> None:
    flags = ("--model", str(tiny_folder), "--offline", "--dtype", "float32")
    expected = invoke_command("embed", *flags, "a quéry", "another")
    found = invoke_command("embed", *flags, stdin=b"\xef\xbb\xbfa qu\xc3\xa9ry\r\nanother\r\n")
    assert (found.returncode, found.stdout) == (0, expected.stdout)


@pytest.mark.parametrize("command", [("embed",), ("score", "a query"), ("classify",)])
def test_a_standard_input_that_is_not_utf_8_is_told_before_the_model_is_loaded(command: tuple[str, ...]) -> None:
    for stdin, why in (
        (b"one\ntwo\xff\n", "it is not UTF-8, from byte 4 of line 2 on"),
        ("one\ntwo\n".encode("utf-16"), "it is UTF-16, but must be UTF-8"),
        ("one\ntwo\n".encode("utf-16-be"), "it is UTF-16, but must be UTF-8"),
    ):
        done = invoke_command(*command, "--model", "no-such-folder", stdin=stdin)
        assert (done.returncode, done.stderr) == (2, f"error: standard input: cannot be read: {why}\n")


def test_an_argument_that_is_not_utf_8_is_told() -> None:
    for command, name in ((["embed", "ok"], "text 2"), (["score", "ok"], "document 1"), (["score"], "the query")):
        done = invoke_command(*command, "a\udcff")
        assert (done.returncode, done.stderr) == (
            2, f"error: {name}: cannot be read: it is not UTF-8, from byte 2 of line 1 on\n"
        )  # fmt: skip


@pytest.mark.parametrize("from_stdin", [False, True])
def test_score_prints_one_object_a_document(from_stdin: bool, tiny_folder: Path) -> None:
    documents = ["a query", "another"]
    arguments, stdin = ([], "\n".join(documents) + "\n") if from_stdin else (documents, "")
    done = invoke_command(
        "score", "--model", str(tiny_folder), "--offline", "--dtype", "float32", "a query", *arguments, stdin=stdin
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(row["index"], row["document"]) for row in rows] == [(0, "a query"), (1, "another")]
    assert rows[0]["score"] == pytest.approx(1, abs=1e-5)
    assert rows[1]["score"] < rows[0]["score"]


def test_classify_prints_one_object_a_text(tmp_path: Path) -> None:
    folder = build(next(iter(CLASSIFIERS)), tmp_path / "classifier")
    done = invoke_command("classify", "--model", str(folder), "--offline", "a text", "another")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(row["index"], row["text"]) for row in rows] == [(0, "a text"), (1, "another")]
    assert all(isinstance(row["label"], str) and len(row["probs"]) > 1 for row in rows)


def test_classify_chooses_among_candidate_labels(tmp_path: Path) -> None:
    folder = build("ce-nli-3label", tmp_path / "nli")
    asked = ["classify", "--model", str(folder), "--offline", "a text", "another", "--candidate-labels", "food, music"]
    done = invoke_command(*asked)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [row["text"] for row in rows] == ["a text", "another"]
    assert [row["label"] in ("food", "music") and len(row["probs"]) for row in rows] == [2, 2]
    assert [sum(row["probs"]) for row in rows] == pytest.approx([1, 1])
    done = invoke_command(*asked, "--multi-label", "--hypothesis-template", "About {}.")
    assert sum(json.loads(done.stdout.splitlines()[0])["probs"]) != pytest.approx(1, abs=1e-3)
    done = invoke_command(*asked, "--hypothesis-template", "About it.")
    assert (done.returncode, done.stdout) == (1, "")
    assert "hypothesis_template must have {} exactly once" in done.stderr


def test_a_task_that_the_model_cannot_do_ends_with_one_line(tiny_folder: Path) -> None:
    done = invoke_command("classify", "--model", str(tiny_folder), "--offline", "a text")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].endswith("has no labels to classify by.")


def test_an_image_is_read_from_its_file_and_a_model_of_texts_rejects_it(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"cat")
    done = invoke_command("embed", "--model", str(tiny_folder), "--offline", "--image", str(tmp_path / "cat.png"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].endswith("reads no images.")
    missing = invoke_command("embed", "--model", str(tiny_folder), "--offline", "--image", str(tmp_path / "dog.png"))
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
    done = invoke_command(*common, "--image", str(images[0]), "a text", "--image", str(images[1]))
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


def test_embed_takes_videos_behind_images(tmp_path: Path, tiny_folder: Path, images: list[Path]) -> None:
    folder, clip = build("qwen2-vl", tmp_path / "model"), tmp_path / "clip.mp4"
    clip.write_bytes(video_files.encode(video_files.shots(6, 56, 84), rate=2))
    common = ("embed", "--model", str(folder), "--offline", "--dtype", "float32")
    done = invoke_command(*common, "--video", str(clip), "--image", str(images[0]))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row.get("image"), row.get("video")) for row in rows] == [(str(images[0]), None), (None, str(clip))]
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    wanted = embed(model, [Video(clip.read_bytes())], Output.DENSE).dense
    assert wanted is not None
    assert rows[1]["embedding"] == pytest.approx(wanted[0].tolist(), abs=1e-4)
    shorter = invoke_command(*common, "--video", str(clip), "--max-video-seconds", "1")
    assert (shorter.returncode, shorter.stdout) == (1, "")
    assert shorter.stderr.startswith(f"error: {clip}: The video has 2 s: at most 1 s are accepted")
    other = invoke_command("embed", "--model", str(tiny_folder), "--offline", "--video", str(clip))
    assert other.stderr.splitlines()[-1].endswith("reads no videos.")


def test_classify_takes_images(tmp_path: Path, images: list[Path]) -> None:
    folder = build("vit-labels", tmp_path / "vit")
    done = invoke_command("classify", "--model", str(folder), "--offline", *(f"--image={file}" for file in images))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [row["image"] for row in rows] == [*map(str, images)]
    for row in rows:
        assert sum(row["probs"]) == pytest.approx(1, abs=1e-3)
        assert row["label"] == ["cat", "dog", "tree"][row["probs"].index(max(row["probs"]))]


def test_an_image_that_cannot_be_read_is_named_by_its_file(tmp_path: Path, images: list[Path]) -> None:
    folder = build("vit-labels", tmp_path / "vit")
    images[1].write_bytes(images[1].read_bytes()[:100])
    done = invoke_command("classify", "--model", str(folder), "--offline", *(f"--image={file}" for file in images))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {images[1]}: The image is a JPEG that cannot be decoded")


@dataclass(frozen=True)
class Served:
    """Answers and log of a server with keys, on a Unix socket and on trio."""

    probes: tuple[int, int]
    without_key: tuple[int, str]
    with_key: int
    code: int
    names: list[str]
    log: str
    socket_is_left: bool


@pytest.fixture(scope="module")
def served(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served")
    (folder / "keys").write_text("# ours\nvery-secret\n")
    path = folder / "pool.sock"
    keys = ("--api-key-file", str(folder / "keys"), "--log-level", "debug")
    flags = ("--backend", "trio", "--unix-socket", str(path), *keys)
    with server_of("--model", str(tiny_folder), *flags, folder=folder) as server:
        server.wait_listening()
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://pool", timeout=30) as client:
            probes = (client.get("/health").status_code, client.get("/ready").status_code)
            server.wait_until(lambda: client.get("/ready").status_code == 200, START_S)
            rejected = client.post("/v1/embeddings", json={"input": "a"})
            key = {"authorization": "Bearer very-secret"}
            answered = client.post("/v1/embeddings", json={"input": "a"}, headers=key)
        code = server.end()
    without_key = (rejected.status_code, rejected.json()["error"]["type"])
    return Served(probes, without_key, answered.status_code, code, names(server), server.log, path.exists())


def test_probes_requests_and_the_drain_are_the_same_on_trio(served: Served) -> None:
    assert served.probes == (200, 503)
    assert served.with_key == 200
    assert served.code == 0
    assert served.names[0] == "server.listening"
    assert [name for name in served.names if name.startswith("server.")] == STEPS


def test_keys_of_a_file_are_asked_for_and_do_not_come_out(served: Served) -> None:
    assert served.without_key == (401, "AuthenticationError")
    assert served.with_key == 200
    assert "very-secret" not in served.log


def test_a_server_on_a_unix_socket_removes_it_when_it_ends(served: Served) -> None:
    assert served.with_key == 200
    assert served.code == 0
    assert not served.socket_is_left


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
