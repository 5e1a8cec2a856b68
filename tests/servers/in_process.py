"""Commands that run in the test's own process, where torch is imported already."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CompletedProcess
from unittest.mock import patch

from click.testing import CliRunner
from transformers.utils import logging as transformers_logging

from staged_pool.api.commands import cli, logs
from staged_pool.runtime.models.kernels.torch_threads import restore_threads
from staged_pool.stages import log


def invoke_command(*arguments: str, stdin: str | bytes = "") -> CompletedProcess[str]:
    """Run `staged-pool` to its end here, which takes seconds less than `process.run_command`.

    An unexpected error is raised, where a process would print its traceback. Lines of the log are in stderr.
    """
    with _process_settings_restored():
        result = CliRunner(catch_exceptions=False).invoke(cli.main, arguments, stdin, prog_name="staged-pool")
    return CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


@contextmanager
def _process_settings_restored() -> Iterator[None]:
    """Restore what a command sets for its whole process: environment, loggers, interpreter and torch threads."""
    root, switch_interval_s = logging.getLogger(), sys.getswitchinterval()
    handlers, level, maker = root.handlers, root.level, log.use(log.on_standard_logging)
    # The allocator stays as it is: glibc has no way back, and a user's variable counts more than ours.
    kept_allocator = {"MALLOC_TRIM_THRESHOLD_": os.environ.get("MALLOC_TRIM_THRESHOLD_", "131072")}
    try:
        with (
            patch.dict(os.environ, kept_allocator),
            patch.object(logs, "_latest", None),
            patch.object(logging.getLogger("transformers"), "propagate", True),
            restore_threads(),
        ):
            transformers_logging.disable_default_handler()  # it holds the stderr of its import
            yield
    finally:
        transformers_logging.enable_default_handler()
        logging.captureWarnings(False)
        log.use(maker)
        root.handlers, root.level = handlers, level
        sys.setswitchinterval(switch_interval_s)
