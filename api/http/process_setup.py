"""Setup of a process that serves: its limit of open files."""

from __future__ import annotations

from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.server")


def allow_files(count: int) -> None:
    """Raise the process's limit of open files to `count`, as far as the system allows."""
    try:
        import resource
    except ImportError:
        return  # only POSIX has this limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        log.warning("server.few_files", limit=wanted, wanted=count)
