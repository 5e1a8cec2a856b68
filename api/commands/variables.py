"""Environment variables: those that look like a setting and are none, and what was probably meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Set
from difflib import get_close_matches
from typing import Final, NamedTuple

import click

from staged_pool.runtime.settings import ENV_PREFIX
from staged_pool.stages.errors import shortened
from staged_pool.stages.log import get_logger

_log: Final = get_logger("staged_pool.server")

_SERVICE_LINK: Final = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Variables that Kubernetes sets in each pod, by the names of services."""


class Unknown(NamedTuple):
    """A variable that begins as settings do, and is none."""

    name: str
    meant: str | None
    """The variable that was probably meant."""


def echo_unknown(command: click.Command) -> None:
    """Write a line on standard error for each unknown variable."""
    for variable in unknown_variables(os.environ, variables_of(command)):
        meant = f"; did you mean {variable.meant}?" if variable.meant else ""
        click.echo(f"Warning: the variable {variable.name} is no setting, and is ignored{meant}", err=True)


def log_unknown(command: click.Command) -> None:
    """Log a warning for each unknown variable, where nothing but the log is written."""
    for variable in unknown_variables(os.environ, variables_of(command)):
        _log.warning("settings.unknown_variable", variable=variable.name, meant=variable.meant)


def unknown_variables(names: Iterable[str], known: Set[str]) -> Iterator[Unknown]:
    """Yield the variables that begin as settings do, and are none; Kubernetes' service links left out.

    Args:
        names: Names of all variables.
        known: Names of the variables that some command reads.
    """
    for name in sorted(names):
        if name.startswith(ENV_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name):
            yield Unknown(shortened(name), next(iter(get_close_matches(name, sorted(known), 1, cutoff=0.8)), None))


def variables_of(command: click.Command) -> frozenset[str]:
    """Return the variables that a command reads, and those of its subcommands."""
    own = {name for param in command.params for name in _names(param.envvar)}
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return frozenset(own.union(*map(variables_of, inner)))


def _names(given: str | Iterable[str] | None) -> Iterable[str]:
    return (given,) if isinstance(given, str) else given or ()
