"""Commands that measure a server under load: throughput, liveness, overload, fairness, soak."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from perf.commands.command_line import BackendOption, DTypeOption, Load, Model, TorchThreads, factors_of, main
from perf.tools.jpegs import Size
from perf.tools.servers import Options
from perf.under_load import (
    crowd,
    deaths,
    fanout,
    flood,
    growth,
    images,
    liveness,
    liveness_images,
    matrix,
    media,
    mixed,
    overload,
    plugins,
    processes,
    soak,
    throughput,
)


@main.command("liveness")
def liveness_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each server, alternating.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one round.")] = 20.0,
    clients: Annotated[
        int | None, typer.Option(min=8, max=500, help="Connections. Default: 64; 300 with --images.")
    ] = None,
    with_images: Annotated[
        bool, typer.Option("--images", help="Send images instead of texts, in four kinds of load.")
    ] = False,
) -> None:
    """Latency of /health under load, compared with a FastAPI handler that computes inline."""
    if with_images and model is not None:
        raise typer.BadParameter("--images measures a generated CLIP with random weights: leave out --model")
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    if with_images:
        liveness_images.run(options, rounds=rounds, seconds=seconds, clients=clients or 300)
    else:
        liveness.run(options, rounds=rounds, seconds=seconds, clients=clients or 64)


@main.command("ray")
def ray_command(
    *,
    replicas: Annotated[int, typer.Option(min=2, max=16, help="Replicas, each with a tiny model.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 10.0,
    haproxy: Annotated[
        bool, typer.Option("--haproxy", help="Take HAProxy in place of Serve's proxy in Python.")
    ] = False,
) -> None:
    """Ray Serve: a killed replica, a rolling update and overload, with every vector checked; needs the extra `ray`."""
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(haproxy))  # read by the imports
    from perf.under_load import ray_serve

    ray_serve.run(replicas, seconds)


@main.command("ray-rates")
def ray_rates_command(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each starts both servers anew.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one cell.")] = 2.0,
    haproxy: Annotated[
        bool, typer.Option("--haproxy", help="Take HAProxy in place of Serve's proxy in Python.")
    ] = False,
) -> None:
    """Rates of one replica on Ray Serve beside the server itself; needs the extra `ray`."""
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(haproxy))  # read by the imports
    from perf.under_load import ray_rates

    ray_rates.run(rounds, seconds)


@main.command("ray-split")
def ray_split_command(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each starts a cluster for each form.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one load.")] = 5.0,
    haproxy: Annotated[
        bool, typer.Option("--haproxy", help="Take HAProxy in place of Serve's proxy in Python.")
    ] = False,
) -> None:
    """Ray Serve: the split form beside the undivided one, and kills of its replicas; needs the extra `ray`."""
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(haproxy))  # read by the imports
    from perf.under_load import ray_split

    ray_split.run(rounds, seconds)


@main.command("plugins")
def plugins_command(
    *,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which all kinds of hooks alternate.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of health checks beside each hook, in a round.")] = 4.0,
) -> None:
    """Hooks of plugins that wait, and /health beside hooks that compute."""
    plugins.run(Options(backend=backend), rounds=rounds, seconds=seconds)


@main.command("uploads")
def uploads_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    backend: BackendOption = "asyncio",
    calls: Annotated[int, typer.Option(min=2, help="Bodies of 1 MB, one after the other.")] = 30,
) -> None:
    """Latency of a body of 1 MB beside 200 clients that stall in their bodies."""
    flood.silent_uploads(Options(model=model, dtype=dtype, backend=backend), calls=calls)


@main.command("images")
def images_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    size: Annotated[Size, typer.Option(help="Size of the images.")] = "1080p",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has the bare pipeline and every server.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one block.")] = 6.0,
) -> None:
    """Images per second, compared with a bare pipeline, and texts beside images."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    images.run(options, size=size, rounds=rounds, seconds=seconds)


@main.command("throughput")
def throughput_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one cell; then it waits for answers.")] = 8.0,
) -> None:
    """Texts per second for 1, 4, 16 and 64 clients and three kinds of requests."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    throughput.run(options, seconds=seconds)


@main.command("growth")
def growth_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has every size and every number of clients.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one cell; then it waits for answers.")] = 6.0,
) -> None:
    """Time and memory of a text, by texts in a request and by clients."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    growth.run(options, rounds=rounds, seconds=seconds)


@main.command("fanout")
def fanout_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of single texts, alternately alone and beside rankings.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one round.")] = 6.0,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Clients that send single texts.")] = 8,
) -> None:
    """Latency of single texts beside a client with rankings of 1,000 documents."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    fanout.run(options, rounds=rounds, seconds=seconds, clients=clients)


@main.command("crowd")
def crowd_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; each has few and many large requests, for each tenant.")
    ] = 3,
    calls: Annotated[int, typer.Option(min=1, help="Short texts of one block.")] = 12,
) -> None:
    """Latency of one short text beside 8 and beside 100 large requests, in process."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    crowd.run(options, rounds=rounds, calls=calls)


@main.command("overload")
def overload_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    load: Load = overload.DEFAULT_SHAPE,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Seconds of one level in one round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, alternately up and down the levels.")] = 2,
    target_delay: Annotated[float, typer.Option(min=0.001, help="Target delay of the server, in seconds.")] = 1.0,
    levels: Annotated[str, typer.Option(help="Multiples of the capacity.")] = "0.5,1,2,5,10",
) -> None:
    """Goodput, latency and rejections at up to ten times the server's capacity."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    overload.run(
        options, shape=load, seconds=seconds, rounds=rounds, target_delay_s=target_delay, factors=factors_of(levels)
    )


@main.command("mixed")
def mixed_command(
    *,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Seconds of one round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the load.")] = 3,
    factor: Annotated[
        float, typer.Option(min=0.1, max=10, help="Offered load as a multiple of the closed-loop rate.")
    ] = 2.0,
) -> None:
    """Client timeouts and rejections for texts, images and requests of eight images, by default settings."""
    options = Options(model=None, dtype=dtype, torch_threads=torch_threads, backend=backend)
    mixed.run(options, seconds=seconds, rounds=rounds, factor=factor)


@main.command("media")
def media_command(
    *,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Seconds of one load in one round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has texts alone, and both loads.")] = 3,
) -> None:
    """Texts, images and videos at 0.5 and 2 times capacity: errors, texts beside idle, and /health."""
    media.run(Options(dtype=dtype, torch_threads=torch_threads, backend=backend), seconds=seconds, rounds=rounds)


@main.command("soak")
def soak_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    load: Load = "m8",
    minutes: Annotated[float, typer.Option(min=0.25, max=24 * 60, help="Minutes of steady load.")] = 10.0,
    share: Annotated[float, typer.Option(min=0, max=0.1, help="Share of each kind of fault in all requests.")] = 0.01,
) -> None:
    """Growth of memory, threads and descriptors while some clients leave, stall and send garbage."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    soak.run(options, shape=load, minutes=minutes, share=share)


@main.command("processes")
def processes_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    fronts: Annotated[str, typer.Option(help="Comma-separated numbers of fronts; 0 is one process.")] = "0,1,2",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each load, alternating.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Seconds of one round.")] = 4.0,
) -> None:
    """Rates, latencies and CPU time of one process, beside fronts before an engine process."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    processes.run(options, fronts=tuple(int(count) for count in fronts.split(",")), rounds=rounds, seconds=seconds)


@main.command("matrix")
def matrix_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each cell, alternating.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Seconds of a cell in one round.")] = 4.0,
    only: Annotated[str, typer.Option(help="Part of the names of the kinds of requests; empty: all.")] = "",
) -> None:
    """Threads, processes and fronts for preprocess, by threads of torch: texts, images, and images in Python code."""
    matrix.run(Options(model=model, dtype=dtype, backend=backend), rounds=rounds, seconds=seconds, only=only)


@main.command("deaths")
def deaths_command(
    *,
    model: Model = None,
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    kills: Annotated[int, typer.Option(min=1, help="Kills of a front, and of the engine process.")] = 5,
    terms: Annotated[int, typer.Option(min=0, help="Servers that are ended by SIGTERM.")] = 20,
) -> None:
    """Kills of a front and of the engine process, and SIGTERM, under load: time to notice and to recover, losses."""
    options = Options(model=model, dtype="float32", torch_threads=torch_threads, backend=backend)
    deaths.run(options, kills=kills, terms=terms)
