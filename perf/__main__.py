"""The command line of the measurements. `python -m perf all` is the short form of everything."""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import replace
from typing import Annotated

import typer

from perf import (
    answers,
    coldstart,
    cores,
    crowd,
    fanout,
    flood,
    front,
    growth,
    images,
    liveness,
    liveness_images,
    memory,
    mixed,
    overhead,
    overload,
    parsing,
    preprocess,
    soak,
    throughput,
)
from perf.jpegs import Size
from perf.peers import run as peers
from perf.peers.catalogue import chosen
from perf.peers.inputs import SCENARIOS, some_of
from perf.peers.kept import OtherSettings
from perf.servers import Backend, Options, prepare_libraries
from perf.texts import Shape
from staged_pool.runtime.config import DType

Model = Annotated[str | None, typer.Option(help="Folder or hub id. Default: the server's own default.")]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Of the weights, for everything that is compared.")]
TorchThreads = Annotated[int | None, typer.Option(help="Of one forward, for everything that is compared.")]
BackendOption = Annotated[Backend, typer.Option("--backend", help="Event loop of the server.")]
Load = Annotated[Shape, typer.Option("--load", help="s1: 1 short text; m8: 8 of 64 tokens; x64: 64 mixed; day: mixed.")]

main = typer.Typer(
    help="Measure the server and the library on this machine. Every command starts what it needs on free ports of "
    "127.0.0.1, ends it again, prints a table and writes perf/results/COMMAND.json.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@main.callback()
def _prepare() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    prepare_libraries()


@main.command("overhead")
def overhead_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=2, help="Each has one block of every contender.")] = 20,
    calls: Annotated[int, typer.Option(min=1, help="Of one block.")] = 30,
    embedded: Annotated[bool, typer.Option(help="engine.embed() in processes of its own, too.")] = False,
) -> None:
    """What the server adds to a bare forward: one client, one short text."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    overhead.run(options, rounds=rounds, calls=calls, embedded=embedded)


@main.command("liveness")
def liveness_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Of each server, in turns.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Of one round.")] = 20.0,
    clients: Annotated[
        int | None, typer.Option(min=8, max=500, help="Connections that send. Default: 64; 300 with --images.")
    ] = None,
    with_images: Annotated[
        bool, typer.Option("--images", help="Images instead of texts, in four kinds of load.")
    ] = False,
) -> None:
    """Whether /health answers under load, beside a FastAPI handler that computes inline."""
    if with_images and model is not None:
        raise typer.BadParameter("--images measures a CLIP of its own, of random weights: leave --model out")
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    if with_images:
        liveness_images.run(options, rounds=rounds, seconds=seconds, clients=clients or 300)
    else:
        liveness.run(options, rounds=rounds, seconds=seconds, clients=clients or 64)


@main.command("uploads")
def uploads_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    backend: BackendOption = "asyncio",
    calls: Annotated[int, typer.Option(min=2, help="Bodies of 1 MB, one after the other.")] = 30,
) -> None:
    """A body of 1 MB beside 200 clients that announce one and do not send it."""
    flood.silent_uploads(Options(model=model, dtype=dtype, backend=backend), calls=calls)


@main.command("images")
def images_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    size: Annotated[Size, typer.Option(help="Of the images.")] = "1080p",
    rounds: Annotated[int, typer.Option(min=1, help="Each has the bare pipeline and every server.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Of one block.")] = 6.0,
) -> None:
    """Images per second beside a bare pipeline, and texts beside images."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    images.run(options, size=size, rounds=rounds, seconds=seconds)


@main.command("preprocess")
def preprocess_command(
    *,
    model: Model = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each has everything once.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of one block; there are 60 of them in a round.")] = 0.5,
) -> None:
    """What more threads of preprocess get done with texts and images, and what an image takes on either path."""
    preprocess.run(Options(model=model), rounds=rounds, seconds=seconds)


@main.command("parsing")
def parsing_command(
    *,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Each has every size of bodies at every server.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Of one block.")] = 4.0,
) -> None:
    """What the size up to which JSON is read on the event loop does to /health."""
    parsing.run(Options(backend=backend), rounds=rounds, seconds=seconds)


@main.command("memory")
def memory_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    requests: Annotated[int, typer.Option(min=1000, help="After the first 1,000.")] = 10_000,
) -> None:
    """Whether the server's memory stays flat over ten thousand requests."""
    memory.run(Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend), requests=requests)


@main.command("coldstart")
def coldstart_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    starts: Annotated[int, typer.Option(min=1, help="One after the other.")] = 5,
) -> None:
    """From exec to listening, to alive, to ready, to the first vector."""
    coldstart.run(Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend), starts=starts)


@main.command("throughput")
def throughput_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    seconds: Annotated[float, typer.Option(min=1, help="Of one cell; answers are then waited for.")] = 8.0,
) -> None:
    """Texts per second for 1, 4, 16 and 64 clients and three kinds of requests."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    throughput.run(options, seconds=seconds)


@main.command("cores")
def cores_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Each has every load once.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Of one load; answers are then waited for.")] = 5.0,
) -> None:
    """Where the time of the cores goes: event loop, preprocess, device, clients, or nowhere."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    cores.run(options, rounds=rounds, seconds=seconds)


@main.command("growth")
def growth_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Each has every size and every number of clients.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Of one cell; answers are then waited for.")] = 6.0,
) -> None:
    """What a text takes with 1 to 2,048 of them in a request, and with 1 to 512 clients; memory beside it."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    growth.run(options, rounds=rounds, seconds=seconds)


@main.command("fanout")
def fanout_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Of single texts alone, and beside rankings, in turns.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Of one round.")] = 6.0,
    clients: Annotated[int, typer.Option(min=1, max=256, help="That send single texts.")] = 8,
) -> None:
    """What a client that has 1,000 documents ranked does to others with single texts."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    fanout.run(options, rounds=rounds, seconds=seconds, clients=clients)


@main.command("front")
def front_command(
    *,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Each has every load once.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.2, help="Length of one load.")] = 4.0,
) -> None:
    """Requests a second through HTTP/1.1 to a model that computes nothing, on one core; rejections; /health."""
    front.run(backend, rounds=rounds, seconds=seconds)


@main.command("crowd")
def crowd_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Each has few and many large requests, of each tenant.")] = 3,
    calls: Annotated[int, typer.Option(min=1, help="Short texts of one block.")] = 12,
) -> None:
    """One short text beside 8 and beside 100 requests of 250 texts, on one engine in process."""
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
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Of one level in one round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Up and down the levels in turns.")] = 2,
    target_delay: Annotated[float, typer.Option(min=0.001, help="Of the server, in seconds.")] = 1.0,
    levels: Annotated[str, typer.Option(help="Multiples of the capacity.")] = "0.5,1,2,5,10",
) -> None:
    """Goodput, waits and rejections at up to ten times what the server can do."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    overload.run(
        options, shape=load, seconds=seconds, rounds=rounds, target_delay_s=target_delay, factors=_factors(levels)
    )


@main.command("mixed")
def mixed_command(
    *,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Of one round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of the load.")] = 3,
    factor: Annotated[float, typer.Option(min=0.1, max=10, help="Of what the server does in a closed loop.")] = 2.0,
) -> None:
    """Client time-outs and rejections under texts, images and requests of eight images, with a server's defaults."""
    options = Options(model=None, dtype=dtype, torch_threads=torch_threads, backend=backend)
    mixed.run(options, seconds=seconds, rounds=rounds, factor=factor)


@main.command("soak")
def soak_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    load: Load = "m8",
    minutes: Annotated[float, typer.Option(min=0.25, max=24 * 60, help="Of steady load.")] = 10.0,
    share: Annotated[float, typer.Option(min=0, max=0.1, help="Of each kind of fault, in all requests.")] = 0.01,
) -> None:
    """Whether anything grows while clients leave, stall, and send nonsense."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    soak.run(options, shape=load, minutes=minutes, share=share)


@main.command("peers")
def peers_command(
    *,
    model: Model = None,
    only: Annotated[
        str | None, typer.Option(help="Names with commas between them; staged-pool is always among them.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Each starts every server anew, in turns. 0, with --go-on: only the tables.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Of one cell; answers are then waited for.")] = 10.0,
    levels: Annotated[
        str, typer.Option(help="Multiples of the most that a server did, for the open loop, or: none.")
    ] = "0.7,2",
    scenarios: Annotated[
        str | None, typer.Option(help=f"Names with commas between them: {', '.join(SCENARIOS)}. Default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="One round, few cells of 2 s: to see that it works.")] = False,
    go_on: Annotated[bool, typer.Option(help="Have the rounds that were measured before in the tables, too.")] = False,
    float32: Annotated[
        bool, typer.Option(help="Compare all in float32 as well, where bfloat16 is what they are best at.")
    ] = True,
    neighbour: Annotated[
        bool, typer.Option("--neighbour", help="Beside a busy loop on each core. Results: peers-neighbour.*")
    ] = False,
) -> None:
    """Other servers beside this one. Builds an environment for each in .peers/, and takes hours for all of them."""
    try:
        contenders, asked = chosen(only), some_of(scenarios)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not rounds and not go_on:
        raise typer.BadParameter("--rounds 0 has nothing to show without --go-on")
    factors = [] if levels == "none" else _factors(levels)
    try:
        peers.run(
            model,
            peers=contenders,
            rounds=rounds,
            seconds=seconds,
            levels=factors,
            scenarios=asked,
            quick=quick,
            go_on=go_on,
            float32=float32,
            neighbour=neighbour,
        )
    except OtherSettings as error:
        raise typer.BadParameter(str(error), param_hint="--go-on") from None


@main.command("answers")
def answers_command(
    *,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Each has every encoding, and what they are compared with.")] = 10,
) -> None:
    """How late the event loop is while a thread writes 2,048 vectors of 1,024 values."""
    answers.run(backend=backend, rounds=rounds)


@main.command("all")
def all_commands(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
) -> None:
    """Everything but the soak, the growth and the peers, in short: about twenty minutes."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    coldstart.run(options, starts=3)
    overhead.run(options, rounds=20, calls=30, embedded=True)
    liveness.run(options, rounds=1, seconds=15.0, clients=64)
    throughput.run(options, seconds=4.0)
    fanout.run(options, rounds=5, seconds=6.0, clients=8)
    overload.run(options, shape=overload.DEFAULT_SHAPE, seconds=20.0, rounds=1, target_delay_s=1.0)
    answers.run(backend=backend, rounds=10)
    memory.run(options, requests=10_000)
    of_images = replace(options, model=None)  # one that is named is a model of texts
    preprocess.run(options, rounds=2, seconds=0.4)
    images.run(of_images, size="1080p", rounds=4, seconds=5.0)
    liveness_images.run(of_images, rounds=1, seconds=12.0, clients=300)


def _factors(levels: str) -> list[float]:
    try:
        factors = [float(level) for level in levels.split(",")]
    except ValueError:
        factors = []
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise typer.BadParameter(f"{levels!r}: expected numbers above 0 with commas between them")
    return factors


if __name__ == "__main__":
    main()
