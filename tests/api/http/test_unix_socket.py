"""A Unix socket instead of a port."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from staged_pool.api.http.listener import SocketFile, bind_unix, url
from staged_pool.stages.errors import ConfigError
from tests.servers.on_socket import serving
from tests.support.model import expected

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]


@pytest.mark.parametrize("http2", [False, True])
async def test_clients_are_answered_and_the_file_goes_with_the_server(http2: bool, tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    async with serving(unix_socket=path, log_clients=True) as served:
        async with served.client(http1=not http2, http2=http2) as client:
            for text in ("a", "bb"):
                response = await client.post("/v1/embeddings", json={"input": text})
                assert response.json()["data"][0]["embedding"] == expected(text).tolist()
        assert path.exists()
    assert not path.exists()


def test_others_than_user_and_group_may_not_connect(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with bind_unix(tmp_path / "s"):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
            assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bind_unix(path).close()
    assert path.exists()
    with bind_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_that_somebody_listens_on_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind_unix(path), socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(ConfigError, match="another process already listens"):
            bind_unix(path)
        client.connect(str(path))


def test_anything_but_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="a file that is no socket is there"):
        bind_unix(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["no/such/folder/s", "x" * 200])
def test_an_impossible_path_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unix_socket="):
        bind_unix(tmp_path / name)


def test_the_socket_of_a_later_server_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind_unix(path) as first:
        file = SocketFile(first)
        path.rename(tmp_path / "moved")
        with bind_unix(path):
            file.remove()
            assert path.exists()


def test_the_log_says_where_the_server_is(tmp_path: Path) -> None:
    with bind_unix(tmp_path / "s") as listener:
        assert url(listener) == f"unix:{tmp_path / 's'}"
