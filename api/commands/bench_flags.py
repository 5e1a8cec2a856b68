"""Flags of `bench` and `trace replay`, and the checked settings that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from staged_pool.runtime.settings import ENV_PREFIX
from staged_pool.stages.errors import ConfigError

if TYPE_CHECKING:
    from staged_pool.api.bench.bench import Settings
    from staged_pool.api.bench.load import Limits
    from staged_pool.api.bench.sizes import Kind
    from staged_pool.api.bench.workload import Inputs, Target

DEFAULT_CLIENTS: Final = 8
DAY_S: Final = 86_400.0
_ROUTES: Final = ("embeddings", "rerank")
_COUNT: Final = click.IntRange(min=1)


def _option(*names: str, help: str, **settings: Any) -> click.Option:
    return click.Option(names, help=help, **settings)


URL: Final = click.Argument(["url"])

LOAD_OPTIONS: Final = (
    _option(
        "--clients", type=click.IntRange(1, 10_000), metavar="N",
        help="Closed loop: each client sends its next request after the answer to the last. Default: 8.",
    ),
    _option(
        "--rate", type=float, metavar="R",
        help="Open loop: requests a second, which come at random times whatever the server does.",
    ),
    _option(
        "--burstiness", type=float, metavar="X",
        help="Shape of the gaps of an open loop. 1: Poisson. Below 1: bursts. Far above: even. Default: 1.",
    ),
    _option(
        "--sweep", metavar="RATES",
        help="Rates to measure in turn, such as 50,100,200. auto: double, from --rate on, until the knee is found.",
    ),
    _option("--duration", type=float, default=10.0, metavar="SECONDS", help="Length of a round. Default: 10."),
    _option("--warmup", type=float, default=5.0, metavar="SECONDS", help="Load before the rounds. Default: 5."),
    _option("--rounds", type=click.IntRange(1, 1000), default=3, metavar="N", help="Rounds of each load. Default: 3."),
)  # fmt: skip

INPUT_OPTIONS: Final = (
    _option(
        "--route", type=click.Choice(_ROUTES), default="embeddings", metavar="ROUTE",
        help="embeddings (/v1/embeddings), or rerank (/v1/rerank). Default: embeddings.",
    ),
    _option("--path", metavar="PATH", help="Path of the route, where the server has another, such as /rerank."),
    _option(
        "--tokens", metavar="N|N-M",
        help="Tokens of each text, or of a query and a document together: 64, or 8-256. Default: 64.",
    ),
    _option("--texts-per-request", metavar="N|N-M", help="Texts of a request to embed texts. Default: 1."),
    _option("--documents", type=_COUNT, metavar="N", help="Documents of a ranking. Default: 10."),
    _option("--images", metavar="WxH", help="Embed images of this size in pixels, such as 640x480, one a request."),
    _option(
        "--mix", metavar="SHARES",
        help="Shares of texts, images and rerank among the requests, such as texts=0.9,images=0.1.",
    ),
    _option(
        "--file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Texts of your own, one a line, in place of made-up ones.",
    ),
)  # fmt: skip

SERVER_OPTIONS: Final = (
    _option("--model", metavar="NAME", help="Model of the requests. Default: the server's, if it lists only one."),
    _option("--api-key", metavar="KEY", envvar=f"{ENV_PREFIX}API_KEY", help="API key of the server."),
    _option(
        "--encoding-format", type=click.Choice(("float", "base64")), metavar="FORMAT",
        help="Format of vectors to ask for: float or base64. Default: the server's.",
    ),
    _option(
        "--ca-file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Certificates of authorities to trust, in PEM. Default: those of this machine.",
    ),
    _option("--timeout", type=float, default=30.0, metavar="SECONDS", help="Limit for an answer. Default: 30."),
    _option(
        "--max-connections", type=click.IntRange(1, 60_000), default=1024, metavar="N",
        help="Most requests at once of an open loop; further ones fail, unsent. Default: 1024.",
    ),
)  # fmt: skip

REPORT_OPTIONS: Final = (
    _option(
        "--slo", type=float, metavar="SECONDS", help="Count the answers that take at most this long as good (goodput)."
    ),
    _option("--seed", type=click.IntRange(0, 2**63 - 1), metavar="N", help="Seed of inputs and times, to repeat them."),
    _option(
        "--json", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="File for all numbers, as JSON."
    ),
    _option(
        "--plots", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
        help="Folder for plots (SVG). Needs matplotlib: pip install 'staged-pool[bench]'.",
    ),
)  # fmt: skip


def seconds(flag: str, value: float, *, zero: bool = False) -> float:
    """Check a number of seconds.

    Raises:
        ConfigError: It is below zero, or zero where that is not allowed, or more than a day.
    """
    if not (0 if zero else 1e-3) <= value <= DAY_S:
        raise ConfigError(f"--{flag} {value:g}: must be a number of seconds {'from 0' if zero else 'above 0'} to a day")
    return value


def target_of(given: Mapping[str, Any]) -> Target:
    """Make the server side of the requests.

    Raises:
        ConfigError: The key or the path cannot be sent.
    """
    from staged_pool.api.bench.workload import Target

    key: str | None = given["api_key"]
    if key is not None and not (key.isascii() and key.isprintable() and key):
        raise ConfigError("--api-key: must be printable ASCII, and not empty")  # without the key, which is secret
    path: str | None = given.get("path")
    if path is not None and not (path.startswith("/") and path.isascii() and path.isprintable() and " " not in path):
        raise ConfigError(f"--path {path!r}: must be a path, such as /rerank")
    return Target(authority="", api_key=key, model=given["model"], path=path, encoding_format=given["encoding_format"])


def limits_of(given: Mapping[str, Any]) -> Limits:
    """Make the limits of the generator."""
    from staged_pool.api.bench.load import Limits

    return Limits(timeout_s=seconds("timeout", given["timeout"]), max_connections=given["max_connections"])


def bench_settings(given: Mapping[str, Any]) -> Settings:
    """Make the settings of `bench`.

    Raises:
        ConfigError: A value is wrong, or flags do not fit together.
    """
    from staged_pool.api.bench.bench import Settings
    from staged_pool.api.bench.level import Plan

    clients, rate, burstiness = given["clients"], given["rate"], given["burstiness"]
    is_open = rate is not None or given["sweep"] is not None
    if clients is not None and is_open:
        raise ConfigError("--clients is a closed loop, --rate and --sweep are an open one; give one of them")
    if rate is not None and not 0 < rate <= 1e6:
        raise ConfigError(f"--rate {rate:g}: must be above 0, in requests a second")
    if burstiness is not None and not is_open:
        raise ConfigError("--burstiness: only an open loop has times of its own; give --rate or --sweep")
    if burstiness is not None and not 1e-3 <= burstiness <= 1e6:
        raise ConfigError(f"--burstiness {burstiness:g}: must be from 0.001 to 1000000")
    rates, finds_knee = _sweep(given["sweep"], rate)
    plan = Plan(
        rate=rate,
        clients=None if is_open else clients or DEFAULT_CLIENTS,
        burstiness=1.0 if burstiness is None else burstiness,
        warmup_s=seconds("warmup", given["warmup"], zero=True),
        round_s=seconds("duration", given["duration"]),
        rounds=given["rounds"],
        slo_s=slo_of(given),
    )
    if rate is not None and rate * plan.seconds < 1:
        raise ConfigError(f"--rate {rate:g}: no request comes within {plan.seconds:g} s; give a longer --duration")
    inputs = _inputs(given)
    if given["path"] is not None and len(inputs.mix) > 1 and "rerank" in inputs.mix:
        raise ConfigError("--path: this mix has two routes; give it for a load of one route")
    address, target = server_of(given)
    return Settings(
        address=address,
        target=target,
        inputs=inputs,
        plan=plan,
        seed=seed_of(given),
        sweep=rates,
        finds_knee=finds_knee,
        limits=limits_of(given),
    )


def server_of(given: Mapping[str, Any]) -> tuple[Any, Target]:
    """Return the address of the server, and the server side of the requests to it.

    Raises:
        ConfigError: The URL, the certificates, the key or the path are wrong.
    """
    from dataclasses import replace

    from staged_pool.api.bench.address import Address

    address = Address.of(given["url"], given["ca_file"])
    return address, replace(target_of(given), authority=address.authority, prefix=address.prefix)


def slo_of(given: Mapping[str, Any]) -> float | None:
    """Return the limit of good answers in seconds; None if there is none."""
    return None if given["slo"] is None else seconds("slo", given["slo"])


def seed_of(given: Mapping[str, Any]) -> int:
    """Return the seed, or draw one."""
    from random import SystemRandom

    seed: int | None = given["seed"]
    return SystemRandom().randrange(2**32) if seed is None else seed


def check_outputs(given: Mapping[str, Any]) -> None:
    """Check that the report can be written, before the load.

    Raises:
        ConfigError: A folder is missing or cannot be written, or matplotlib is missing.
    """
    if (path := given["json"]) is not None:
        was_there = path.exists()
        try:
            path.touch()
        except OSError as error:
            raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from error
        if not was_there:
            path.unlink()  # there is no file until there is a report
    if (folder := given["plots"]) is not None:
        from staged_pool.api.bench.plots import check_matplotlib

        check_matplotlib()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--plots {folder}: cannot be made: {error.strerror}") from error


def _sweep(text: str | None, rate: float | None) -> tuple[Sequence[float] | None, bool]:
    """Return the rates of a sweep, and whether they are to be found."""
    from staged_pool.api.bench.sweep import read_rates

    if text is None:
        return None, False
    rates = read_rates(text)
    if rates is not None and rate is not None:
        raise ConfigError("--rate: --sweep names its rates itself; only --sweep auto begins at --rate")
    return rates, rates is None


def _inputs(given: Mapping[str, Any]) -> Inputs:
    from staged_pool.api.bench.sizes import ImageSize, Range
    from staged_pool.api.bench.texts import lines_of
    from staged_pool.api.bench.workload import Inputs

    mix = _mix(given)
    for flag, kinds in {
        "tokens": {"texts", "rerank"},
        "texts_per_request": {"texts"},
        "documents": {"rerank"},
        "images": {"images"},
        "file": {"texts", "rerank"},
        "encoding_format": {"texts", "images"},
    }.items():
        if given[flag] is not None and not kinds & set(mix):
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name}: this load has only {', '.join(mix)}; leave the flag out, or change --mix")
    if "images" in mix and given["images"] is None:
        raise ConfigError("--mix has images; give their size, such as --images 640x480")
    if given["file"] is not None and given["tokens"] is not None:
        raise ConfigError("--tokens: the texts of --file have their own lengths; give one of the two flags")
    return Inputs(
        mix=mix,
        tokens=Range.of("tokens", given["tokens"] or "64"),
        texts_per_request=Range.of("texts_per_request", given["texts_per_request"] or "1", 100_000),
        documents=given["documents"] or 10,
        image_size=None if given["images"] is None else ImageSize.of(given["images"]),
        lines=None if given["file"] is None else lines_of(given["file"]),
    )


def _mix(given: Mapping[str, Any]) -> Mapping[Kind, float]:
    from staged_pool.api.bench.sizes import read_mix

    if given["mix"] is not None:
        if given["route"] == "rerank":
            raise ConfigError("--route rerank: --mix names the kinds itself, such as texts=0.5,rerank=0.5")
        return read_mix(given["mix"])
    if given["route"] == "rerank":
        return {"rerank": 1.0}
    return {"texts": 1.0} if given["images"] is None else {"images": 1.0}


def check_speed(speed: float) -> float:
    """Check the speed of a replay.

    Raises:
        ConfigError: It is out of range.
    """
    if not 1e-3 <= speed <= 1e3 or math.isnan(speed):
        raise ConfigError(f"--speed {speed:g}: must be from 0.001 to 1000, where 1 is the speed of the trace")
    return speed
