"""The plugin in a server process with a tiny SigLIP, found by its entry point."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.examples.documents.drawn_pages import FOOT, TITLE, TWO_COLUMNS, Block, drawn, encoded, pdf
from tests.examples.file_host import HOLDS, FileHost, file_host
from tests.examples.installed import installed
from tests.models.tiny import build
from tests.servers.byte_client import post
from tests.servers.preloaded import ROOT
from tests.servers.process import ServerProcess, serve_command

PIPELINE = ROOT / "examples" / "documents" / "pages.toml"
PAGES = [
    drawn(*TWO_COLUMNS),
    drawn(TITLE, Block((90, 400), figure=(400, 300)), FOOT),
    drawn(TITLE, Block((100, 500), "a short page")),
]


@pytest.fixture(scope="module")
def host() -> Iterator[FileHost]:
    with file_host() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    command = serve_command(
        "--model", str(build("siglip", folder / "siglip")), "--dtype", "float32", "--tune", "off",
        "--plugin", "page_embeddings", "--plugin", "page_regions", "--pipeline", str(PIPELINE),
        "--allow-media-domain", "127.0.0.1", "--allow-media-path", str(folder),
    )  # fmt: skip
    with ServerProcess(command, folder / "log", environment=installed("documents", folder / "site")) as process:
        process.wait_ready()
        yield process
        assert process.end() == 0, process.log


def ask(server: ServerProcess, *pages: str, **data: Any) -> Any:
    given = {"data": {"pages": pages, **data}, "task": "plugin", "model": "page_embeddings"}
    status, body = server.ask("/pooling", given)
    assert status == 200, body
    assert set(body) == {"request_id", "created_at", "data"}
    return body["data"]["pages"]


def assert_embedded(server: ServerProcess, page: Any, image: Image.Image) -> None:
    """Compare embeddings with those of the crops, from the server's own route."""
    assert page["regions"]
    crops = [base64.b64encode(encoded(image.crop(region["box"]))).decode() for region in page["regions"]]
    status, body = server.ask(
        "/v1/embeddings", {"input": [{"image": f"data:image/png;base64,{crop}"} for crop in crops]}
    )
    assert status == 200, body
    expected = [row["embedding"] for row in body["data"]]
    assert np.allclose([region["embedding"] for region in page["regions"]], expected, atol=1e-5)


def test_a_page_from_a_url_has_its_regions_embedded(server: ServerProcess, host: FileHost) -> None:
    (page,) = ask(server, host.add("page.png", encoded(PAGES[0])))
    boxes = np.array([region["box"] for region in page["regions"]])
    assert np.abs(boxes - np.array([block.box for block in TWO_COLUMNS])).max() <= 1
    assert_embedded(server, page, PAGES[0])


def test_a_pdf_from_a_folder_has_all_its_pages(server: ServerProcess, folder: Path) -> None:
    (folder / "report.pdf").write_bytes(pdf(PAGES))
    pages = ask(server, (folder / "report.pdf").as_uri())
    assert [(page["source"], page["number"]) for page in pages] == [(0, 0), (0, 1), (0, 2)]
    assert [len(page["regions"]) for page in pages] == [8, 3, 2]


def test_one_bad_page_leaves_the_others(server: ServerProcess, host: FileHost) -> None:
    good = host.add("good.png", encoded(PAGES[1]))
    bad = (host.url("missing.png"), host.add("bad.png", b"no image"), host.url("page.png", host="localhost"),
           "file:///etc/hostname", "data:,abc")  # fmt: skip
    pages = ask(server, good, *bad, good)
    assert_embedded(server, pages[0], PAGES[1])
    assert pages[6]["regions"] == pages[0]["regions"]
    errors = [page["error"] for page in pages[1:6]]
    assert [error["type"] for error in errors] == [
        "UnusableMedia", "UnsupportedMedia", "UrlNotAllowed", "UrlNotAllowed", "InvalidInput"
    ]  # fmt: skip
    assert "answered with status 404" in errors[0]["message"]


def test_a_wrong_request_gets_a_clear_error(server: ServerProcess) -> None:
    status, body = server.ask("/pooling", {"data": {"pages": []}, "model": "page_embeddings"})
    assert (status, body["error"]["param"]) == (400, "data.pages")
    assert body["error"]["message"] == "data.pages must have 1 to 64 entries, and has 0"


def test_many_requests_at_once_each_get_their_own_pages(server: ServerProcess, host: FileHost) -> None:
    urls = [host.add(f"{index}.png", encoded(page)) for index, page in enumerate(PAGES)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda index: ask(server, urls[index % 3]), range(24)))
    for index, (page,) in enumerate(answers):
        (alone,) = answers[index % 3]
        assert [region["box"] for region in page["regions"]] == [region["box"] for region in alone["regions"]]
    for index in range(3):
        assert_embedded(server, answers[index][0], PAGES[index])


def test_a_client_who_leaves_ends_its_fetch(server: ServerProcess, host: FileHost) -> None:
    host.files["held.png"] = HOLDS
    body = json.dumps({"data": {"pages": [host.url("held.png")]}, "model": "page_embeddings"}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(post(body, path="/pooling"))
        assert host.is_held.wait(20)
    assert host.was_left.wait(20)
    server.wait_until(lambda: server.ask("/load")[1]["server_load"] == 0)


def test_the_pipeline_of_the_example_gives_the_same_embeddings(server: ServerProcess, host: FileHost) -> None:
    urls = [host.add(f"page-{index}.png", encoded(page)) for index, page in enumerate(PAGES)]
    status, body = server.ask("/pipelines/pages", {"data": [urls[0], host.url("missing.png"), *urls[1:]]})
    assert status == 200, body
    (error,) = body["errors"]
    assert (error["index"], error["stage"]) == (1, "regions")
    assert "answered with status 404" in error["error"]["message"]
    pages = ask(server, *urls)
    for index, page in zip((0, 2, 3), pages, strict=True):
        items = [item["value"] for item in body["items"] if item["index"] == index]
        assert [item["box"] for item in items] == [region["box"] for region in page["regions"]]
        expected = [region["embedding"] for region in page["regions"]]
        assert np.allclose([item["embedding"] for item in items], expected, atol=1e-5)
