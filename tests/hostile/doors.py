"""`python -m tests.hostile.doors`: answers of many megabytes by every door of a server with little memory.

Token vectors become answers of dozens of times the bytes of their texts. Each door gets requests at once that fit one
by one and not together, and some that never fit. Memory is looked at from outside.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tests.servers.process import ServerProcess, serve_command

LIMIT_BYTES: Final = 1400 * 10**6
"""Memory limit of the server."""

WIDTH: Final = 1024
"""Numbers of a token vector."""
TOKENS: Final = 500
"""Tokens of a text, about: an answer for it has 6 MB of JSON."""
FITTING: Final = 6
"""Requests that fit one by one."""
FITTING_TEXTS: Final = 10
LARGE: Final = 2
"""Requests that never fit."""
LARGE_TEXTS: Final = 60
PATIENCE_S: Final = 600.0
"""Limit in seconds for the requests of a door."""
PAUSE_S: Final = 0.2

PLUGIN: Final = """
import staged_pool


class Vectors(staged_pool.Processor):
    outputs = ("multi_vector",)

    def preprocess(self, loaded, context):
        return loaded

    def postprocess(self, rows, context):
        return [row.values["multi_vector"] for row in rows]

    def routes(self, process):
        import orjson
        from starlette.applications import Starlette
        from starlette.responses import Response
        from starlette.routing import Route

        async def vectors(request):
            found = await process(await request.json())
            return Response(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY))

        handlers = {
            staged_pool.Overloaded: lambda request, error: Response(status_code=429),
            staged_pool.InvalidInput: lambda request, error: Response(status_code=413),
        }
        return Starlette(routes=[Route("/vectors", vectors, methods=["POST"])], exception_handlers=handlers)
"""

PIPELINE: Final = """
name = "vectors"

[[stage]]
name = "embed"
model = "wide"
outputs = ["multi_vector"]
"""


def wide_model(folder: Path) -> Path:
    """Make a model of one thin layer, whose token vectors are wide: they cost memory, and no time."""
    import torch
    import transformers as hf
    from safetensors.torch import save_file

    from tests.models.tiny import bodies
    from tests.models.tiny.layout import write_json, write_modules
    from tests.models.tiny.vocabularies import word_piece

    tokenizer = word_piece()
    tokenizer.add_tokens(["[Q] ", "[D] "])
    config = bodies.bert_config(len(tokenizer), num_hidden_layers=1, max_position_embeddings=TOKENS + 12)
    bodies.save_body(folder, hf.BertModel(config), tokenizer, tokenizer_class="BertTokenizer")
    dense: dict[str, Any] = {"in_features": bodies.WIDTH, "out_features": WIDTH, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    write_modules(folder, ("pylate.models.Dense.Dense", dense))
    weights = {"linear.weight": torch.randn(WIDTH, bodies.WIDTH) / 6}
    save_file(weights, folder / "1_Dense" / "model.safetensors")
    lengths = {"max_seq_length": TOKENS + 11, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", lengths)
    marks = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 24, "document_length": TOKENS + 12}
    others: dict[str, Any] = {
        "model_type": "ColBERT",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
    }
    more = {"do_query_expansion": False, "attend_to_expansion_tokens": False, "skiplist_words": []}
    write_json(folder / "config_sentence_transformers.json", others | marks | more)
    return folder


def texts(count: int, of: int) -> list[str]:
    """Return different texts."""
    return [f"{of} {number} " + "a " * (TOKENS - 8) for number in range(count)]


@contextmanager
def serving_wide(folder: Path) -> Iterator[ServerProcess]:
    """Run a server with little memory, whose doors are all open."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "wide_plugin.py").write_text(PLUGIN)
    about = folder / "site" / "wide.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: wide\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[staged_pool.plugins]\nvectors = wide_plugin:Vectors\n")
    (folder / "vectors.toml").write_text(PIPELINE)
    model = folder / "model" if (folder / "model").exists() else wide_model(folder / "model")
    flags = [f"wide={model}", "--plugin", "vectors", "--pipeline", str(folder / "vectors.toml")]
    limits = ["--memory-limit", str(LIMIT_BYTES), "--batch-dir", str(folder / "batches"), "--dtype", "float32"]
    command = serve_command("--no-access-log", "--model", *flags, *limits)
    with ServerProcess(command, folder / "log", environment={"PYTHONPATH": str(folder / "site")}) as server:
        server.wait_ready()
        yield server
        server.end()


@dataclass(frozen=True)
class Seen:
    """Outcome of the requests of one door."""

    door: str
    outcomes: Mapping[str, int]
    """Requests by status, the rejections that were repeated left out."""
    rejections: int
    """Rejections that their client has repeated."""
    seconds: float
    before_bytes: int
    peak_bytes: int
    """Peak of the server's resident set meanwhile."""

    def __str__(self) -> str:
        found = ", ".join(f"{count} x {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return (
            f"{self.door:16} {found:44} {self.rejections:4} repeated {self.seconds:7.1f} s"
            f"  {self.before_bytes / 1e6:6.0f} MB -> {self.peak_bytes / 1e6:6.0f} MB"
        )


def post(server: ServerProcess, path: str, content: bytes, **headers: str) -> tuple[int, bytes, float]:
    """Send a body; return the status, the first bytes of the answer, and the pause in seconds that it asks for."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, content, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        first = answer.read(2**16)
        while answer.read(2**20):
            pass
    finally:
        connection.close()
    return answer.status, first, float(answer.headers.get("retry-after", PAUSE_S))


def patiently(server: ServerProcess, path: str, body: object, repeated: Counter[str], **headers: str) -> str:
    """Send a body until it is not rejected for overload; return the status."""
    content, latest = json.dumps(body).encode(), time.monotonic() + PATIENCE_S
    while time.monotonic() < latest:
        try:
            status, _, pause_s = post(server, path, content, **headers)
        except (OSError, HTTPException):
            return "connection lost"
        if status != 429:
            return str(status)
        repeated["429"] += 1
        time.sleep(pause_s)
    return "never"


def by_http(path: str, body: Callable[[Sequence[str]], object], server: ServerProcess, **headers: str) -> Counter[str]:
    """Send all requests at once; return their statuses, and the rejections."""
    repeated, sizes = Counter[str](), [FITTING_TEXTS] * FITTING + [LARGE_TEXTS] * LARGE
    with ThreadPoolExecutor(len(sizes)) as threads:
        bodies = [body(texts(size, number)) for number, size in enumerate(sizes)]
        outcomes = Counter(threads.map(lambda each: patiently(server, path, each, repeated, **headers), bodies))
    outcomes["repeated"] = repeated["429"]
    return outcomes


def by_batch(server: ServerProcess) -> Counter[str]:
    """Send all requests as the lines of one batch; return the statuses of its lines."""
    sizes = [FITTING_TEXTS] * FITTING + [LARGE_TEXTS] * LARGE
    lines = [
        json.dumps(
            {"custom_id": f"r{number}", "method": "POST", "url": "/pooling", "body": _pooled(texts(size, number))}
        )
        for number, size in enumerate(sizes)
    ]
    form = "\r\n".join([
        "--b", 'content-disposition: form-data; name="purpose"', "", "batch",
        "--b", 'content-disposition: form-data; name="file"; filename="lines.jsonl"', "", "\n".join(lines), "--b--", "",
    ])  # fmt: skip
    _, content, _ = post(server, "/v1/files", form.encode(), **{"content-type": "multipart/form-data; boundary=b"})
    _, batch = server.ask("/v1/batches", {
        "input_file_id": json.loads(content)["id"], "endpoint": "/pooling", "completion_window": "24h",
    })  # fmt: skip
    latest = time.monotonic() + PATIENCE_S
    while batch["status"] not in ("completed", "failed") and time.monotonic() < latest:
        time.sleep(PAUSE_S)
        _, batch = server.ask(f"/v1/batches/{batch['id']}")
    counts = batch["request_counts"]
    outcomes = Counter({"200": counts["completed"], "never": counts["total"] - counts["completed"] - counts["failed"]})
    if batch["error_file_id"]:
        _, failed = server.ask(f"/v1/files/{batch['error_file_id']}/content")
        for line in failed.splitlines():
            outcomes[str(json.loads(line)["response"]["status_code"])] += 1
    return +outcomes


def _pooled(given: Sequence[str]) -> Mapping[str, Any]:
    return {"input": given, "task": "token_embed", "model": "wide"}


DOORS: Final[Mapping[str, Callable[[ServerProcess], Counter[str]]]] = {
    "http": partial(by_http, "/pooling", _pooled),
    "plugin": partial(by_http, "/pooling", lambda given: {"data": given, "plugin": "vectors"}),
    "plugin's route": partial(by_http, "/plugins/vectors/vectors", lambda given: given),
    "pipeline": partial(by_http, "/pipelines/vectors", lambda given: {"data": given}),
    "pipeline, lines": partial(
        by_http, "/pipelines/vectors", lambda given: {"data": given}, accept="application/x-ndjson"
    ),
    "batch": by_batch,
}
"""Each sends the same texts in its own way."""


def look(door: str, folder: Path) -> Seen:
    """Use one door of a new server."""
    with serving_wide(folder) as server:
        post(server, "/pooling", json.dumps(_pooled(["warm"])).encode())
        before, began = server.resident_bytes, time.monotonic()
        server.forget_peak()
        done = threading.Event()
        outcomes = DOORS[door](server)
        done.set()
        repeated = outcomes.pop("repeated", 0)
        return Seen(door, +outcomes, repeated, time.monotonic() - began, before, server.peak_bytes)


def faults(seen: Seen) -> Sequence[str]:
    """Return the faults of the outcome of a door."""
    found = []
    if seen.peak_bytes >= LIMIT_BYTES:
        found.append(f"{seen.peak_bytes / 1e6:.0f} MB of {LIMIT_BYTES / 1e6:.0f} MB")
    strange = {outcome for outcome in seen.outcomes if outcome not in ("200", "413")}
    if strange or seen.outcomes.get("200", 0) < FITTING:
        found.append(f"outcomes {dict(seen.outcomes)}")
    return found


def main(only: Annotated[str, typer.Option(help="Part of the names of the doors. Default: all.")] = "") -> None:
    """Fail if a door takes too much memory, or gives no answer."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for door in DOORS:
            if only in door:
                seen = look(door, Path(folder))
                wrong += bool(faults(seen))
                typer.echo(f"{seen}{''.join(f'  <- {fault}' for fault in faults(seen))}")
    typer.echo(f"{wrong} are wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
