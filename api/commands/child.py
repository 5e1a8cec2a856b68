"""Program of a child process: `python -m staged_pool.api.commands.child`, started by the supervisor.

It imports as little as it can before its handlers of signals are set. Until then a signal ends it, and a service
manager may send one to all processes of a server while a child starts.
"""

from __future__ import annotations

from staged_pool.runtime.machine.signals import leave_the_end_to_the_parent, write_stacks_on_signals


def main() -> None:
    """Set the handlers of signals, then run one child until it is told to end."""
    write_stacks_on_signals()
    leave_the_end_to_the_parent()
    from staged_pool.api.commands.child_run import run_child  # imports for a third of a second

    run_child()


if __name__ == "__main__":
    main()
