"""Commands that measure the cost of one part: overhead, preprocess, memory, start, HTTP front."""

from __future__ import annotations

from typing import Annotated

import typer

from perf.commands.command_line import BackendOption, DTypeOption, Model, TorchThreads, main
from perf.cost import answers, bulk, coldstart, cores, front, int8, memory, overhead, parsing, pool, preprocess, traces
from perf.tools.servers import Options


@main.command("overhead")
def overhead_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; each has one block of every contender.")] = 20,
    calls: Annotated[int, typer.Option(min=1, help="Calls of one block.")] = 30,
    embedded: Annotated[bool, typer.Option(help="Measure engine.embed() in processes of its own, too.")] = False,
) -> None:
    """Latency that the server adds to a bare forward: one client, one short text."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    overhead.run(options, rounds=rounds, calls=calls, embedded=embedded)


@main.command("preprocess")
def preprocess_command(
    *,
    model: Model = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has everything once.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of one block; a round has 60 blocks.")] = 0.5,
) -> None:
    """Throughput of preprocess by number of threads, and the cost of an image."""
    preprocess.run(Options(model=model), rounds=rounds, seconds=seconds)


@main.command("int8")
def int8_command(
    *,
    model: Model = None,
    torch_threads: TorchThreads = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has every data type once for each batch.")] = 9,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds of one block.")] = 0.2,
) -> None:
    """Speed and retrieval of int8 beside float32 and bfloat16."""
    int8.run(Options(model=model, torch_threads=torch_threads), rounds=rounds, seconds=seconds)


@main.command("parsing")
def parsing_command(
    *,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has every body size at every server.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one block.")] = 4.0,
) -> None:
    """Latency of /health by the size limit of JSON decoded on the event loop."""
    parsing.run(Options(backend=backend), rounds=rounds, seconds=seconds)


@main.command("memory")
def memory_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    requests: Annotated[int, typer.Option(min=1000, help="Requests after the first 1,000.")] = 10_000,
) -> None:
    """Growth of the server's memory over ten thousand requests."""
    memory.run(Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend), requests=requests)


@main.command("pool")
def pool_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; each has every contender once.")] = 12,
    texts: Annotated[int, typer.Option(min=100, help="Texts of one call.")] = 1000,
    streamed: Annotated[int, typer.Option(min=1000, help="Texts of the stream.")] = 100_000,
) -> None:
    """Cost of a Pool beside its engine, memory of a stream, and encode beside sentence-transformers."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    pool.run(options, rounds=rounds, texts=texts, streamed=streamed)


@main.command("coldstart")
def coldstart_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    starts: Annotated[int, typer.Option(min=1, help="Starts, one after the other.")] = 5,
) -> None:
    """Time from exec to listening, alive, ready, and the first vector."""
    coldstart.run(Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend), starts=starts)


@main.command("cores")
def cores_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has every load once.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one load; then it waits for answers.")] = 5.0,
) -> None:
    """CPU time by consumer: event loop, preprocess, device, clients, idle."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    cores.run(options, rounds=rounds, seconds=seconds)


@main.command("front")
def front_command(
    *,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has every load once.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.2, help="Seconds of one load.")] = 4.0,
) -> None:
    """Requests a second over HTTP/1.1 to a mock model, on one core; rejections; /health."""
    front.run(backend, rounds=rounds, seconds=seconds)


@main.command("traces")
def traces_command(
    *,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; each has every server once.")] = 9,
    seconds: Annotated[float, typer.Option(min=0.2, help="Seconds of one load.")] = 2.0,
) -> None:
    """Throughput with traces off, for one request in a hundred, and for all."""
    traces.run(backend, rounds=rounds, seconds=seconds)


@main.command("answers")
def answers_command(
    *,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each has every encoding and both references.")] = 10,
) -> None:
    """Lag of the event loop while a thread encodes 2,048 vectors of 1,024 values."""
    answers.run(backend=backend, rounds=rounds)


@main.command("bulk")
def bulk_command(
    *,
    model: Model = None,
    dtype: DTypeOption = "auto",
    torch_threads: TorchThreads = None,
    backend: BackendOption = "asyncio",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; each has the bare loop and a job.")] = 5,
    texts: Annotated[int, typer.Option(min=100, help="Texts of one job.")] = 8000,
    lines: Annotated[int, typer.Option(min=20_000, help="Lines of the long file.")] = 1_000_000,
) -> None:
    """Rate of run-batch beside the bare model, and its memory."""
    options = Options(model=model, dtype=dtype, torch_threads=torch_threads, backend=backend)
    bulk.run(options, rounds=rounds, texts=texts, lines=lines)
