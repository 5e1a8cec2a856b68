"""The command line of the measurements; `python -m perf all` is the short form of everything."""

from __future__ import annotations

from dataclasses import replace

from perf.commands import (  # noqa: F401  # they register their commands
    cost_commands,
    gateways_command,
    load_commands,
    peers_command,
    scale_command,
)
from perf.commands.command_line import BackendOption, DTypeOption, Model, TorchThreads, main
from perf.cost import answers, coldstart, memory, overhead, pool, preprocess
from perf.tools.servers import Options
from perf.under_load import fanout, images, liveness, liveness_images, media, overload, throughput


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
    fanout.run(options, rounds=3, seconds=12.0, clients=8)  # a ranking takes up to eight seconds
    overload.run(options, shape=overload.DEFAULT_SHAPE, seconds=20.0, rounds=1, target_delay_s=1.0)
    answers.run(backend=backend, rounds=10)
    memory.run(options, requests=10_000)
    pool.run(options, rounds=6, texts=1000, streamed=20_000)
    of_images = replace(options, model=None)  # one that is named is a model of texts
    preprocess.run(options, rounds=2, seconds=0.4)
    images.run(of_images, size="1080p", rounds=4, seconds=5.0)
    liveness_images.run(of_images, rounds=1, seconds=12.0, clients=300)
    media.run(of_images, seconds=5.0, rounds=1)


if __name__ == "__main__":
    main()
