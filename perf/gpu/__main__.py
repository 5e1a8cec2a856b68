"""Measurements of one device: right results, speed, and other servers beside ours.

`python -m perf.gpu right`, `speed` and `beside` each end within four minutes on a GPU. With `--device cpu --quick` each
tries itself out without one.
"""

from __future__ import annotations

import typer

from perf.gpu.beside import beside
from perf.gpu.right import right
from perf.gpu.speed import speed

main = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
main.command()(right)
main.command()(speed)
main.command()(beside)

if __name__ == "__main__":
    main()
