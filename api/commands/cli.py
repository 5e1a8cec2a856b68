"""The command line: its commands, its version and its shell completion.

Only the commands read the environment, configure logging and end the process.
"""

from __future__ import annotations

from typing import Any, Final

import click
from click.shell_completion import get_completion_class

from staged_pool.api.commands.bench import bench
from staged_pool.api.commands.check import check
from staged_pool.api.commands.one_shot import classify, embed, score
from staged_pool.api.commands.options import HELP_WIDTH
from staged_pool.api.commands.run_batch import run_batch
from staged_pool.api.commands.serve import serve
from staged_pool.api.commands.show_config import config
from staged_pool.api.commands.standard_streams import open_standard_streams
from staged_pool.api.commands.top import top
from staged_pool.api.commands.trace import trace
from staged_pool.api.commands.variables import echo_unknown
from staged_pool.runtime.version import VERSION

PROGRAM: Final = "staged-pool"
"""Name that a shell completes."""

COMPLETION_VARIABLE: Final = "_STAGED_POOL_COMPLETE"
"""Variable by which a shell asks for completions; Click makes its name of the program's."""


class _Commands(click.Group):
    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line. Nothing opens a file before the standard ones are open."""
        open_standard_streams()
        return super().main(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of use, not of the alphabet."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command. Misspelt variables would change nothing in silence, so a warning names them."""
        found = super().resolve_command(ctx, args)
        if not ctx.resilient_parsing and found[1] is not serve:  # whose warnings are in its log
            echo_unknown(self)
        return found


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(VERSION)
        ctx.exit()


def _print_completion(ctx: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is not None and not ctx.resilient_parsing:
        made = get_completion_class(shell)
        assert made is not None
        click.echo(made(ctx.command, {}, PROGRAM, COMPLETION_VARIABLE).source())
        ctx.exit()


main: Final = _Commands(
    "staged-pool",
    commands=[serve, config, embed, score, classify, run_batch, check, top, bench, trace],
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version and exit.",
        ),
        click.Option(
            ["--show-completion"],
            type=click.Choice(["bash", "zsh", "fish"]),
            is_eager=True,
            expose_value=False,
            callback=_print_completion,
            help='Print the completion script of a shell: eval "$(staged-pool --show-completion bash)".',
        ),
    ],
    help="Serve pooling models: embeddings, scores and classes of texts and images.",
    epilog="`staged-pool COMMAND -h` explains a command.",
    no_args_is_help=True,
    context_settings={"max_content_width": HELP_WIDTH, "help_option_names": ["-h", "--help"]},
)
