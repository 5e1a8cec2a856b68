"""Choices between ways of computing the same thing, made once for a processor and kept in a file.

The ways differ in speed, and in the last bits of what they compute. A choice by a stopwatch at every start would give
other vectors after a restart. So what was measured once is written to a decision file, and read from then on. Without
one, a table by what the processor can do decides.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from staged_pool.runtime.config import Tune
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.stages.log import get_logger

try:
    import fcntl
except ImportError:  # no locks of this kind: files are still replaced as a whole
    fcntl = None  # type: ignore[assignment]

log = get_logger("staged_pool.models")

Choice = TypeVar("Choice", str, int, bool)

_FORMAT: Final = 1
_MOST_BYTES: Final = 1 << 20
"""Of a decision file. A larger one is none of ours."""

_SHARE_TO_MEASURE: Final = 0.8
"""Of the cores. With less, others compute on them, and what is measured is chance."""
_SHARE_SEEN_S: Final = 0.03
_SHARE_EDGE: Final = 512
"""Of the square matrices that are multiplied meanwhile."""

_LOCK_TRIES: Final = 100
_LOCK_PAUSE_S: Final = 0.02
"""Another process holds the lock for as long as it takes to write a small file."""


class Tuning:
    """Makes the choices of one load.

    Args:
        mode: `auto`: as in the decision file, which gets what it does not have. `off`: by the table, and nothing is
            measured, read or written. `again`: everything is measured, and the file has it from then on.
        folder: Where decision files are; see `decision_folder`.
        threads: Torch threads of a forward that has the processor to itself. None: as many as are set.
    """

    threads: int
    """Torch threads that forwards will share, whatever is set while the model is loaded."""

    measured: int
    """Questions that took a measurement."""

    def __init__(self, mode: Tune, folder: Path | None = None, *, threads: int | None = None) -> None:
        self.threads = threads or torch.get_num_threads()
        self.measured = 0
        self._mode: Tune = mode
        self._busy: bool | None = None
        """Others use the cores. None: that has not been looked at."""
        self._folder = folder
        self._made: dict[str, Any] = {}
        """By question: one that is asked twice in a load has one answer."""

    def choose(
        self,
        question: str,
        *,
        table: Choice,
        measure: Callable[[], Choice],
        allowed: Callable[[Any], bool],
    ) -> Choice:
        """Answer a question, in the same way as at the last start.

        Args:
            question: With all that the answer depends on, beside the processor and the version of torch.
            table: The answer where nothing may be measured, or where it could not be kept.
            measure: Finds the answer by trying.
            allowed: Tells an answer from a value that somebody else has written into the file.
        """
        if question not in self._made:
            self._made[question] = self._choose(question, table, measure, allowed)
        answer: Choice = self._made[question]
        return answer

    @contextmanager
    def current(self) -> Iterator[None]:
        """A block in which `tuning` gives this one."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def _choose(
        self, question: str, table: Choice, measure: Callable[[], Choice], allowed: Callable[[Any], bool]
    ) -> Choice:
        if self._mode == "off":
            return table
        try:
            file = DecisionFile(self._folder or decision_folder())
            if self._mode == "auto":
                kept = file.read().get(question)
                if kept is not None and allowed(kept):
                    answer: Choice = kept
                    return answer
            file.prepare()  # before anything is measured: what cannot be kept would be another at the next start
            found = table
            if self._mode == "again" or not self._machine_is_busy():
                found = measure()
                self.measured += 1
            return file.keep(question, found, allowed, overwrite=self._mode == "again")
        except OSError as error:
            log.warning("model.decisions_not_kept", reason=str(error), instead="the table by processor")
            self._mode = "off"
            return table

    def _machine_is_busy(self) -> bool:
        """Others use the cores just now: a stopwatch would say more of them than of this model."""
        if self._busy is None:
            self._busy = share_of_cores(self.threads) < _SHARE_TO_MEASURE
            if self._busy:
                log.info(  # no fault: the table's choices are right, too, and a restart repeats them
                    "model.not_measured", reason="the machine is busy", instead="the table by processor; --tune again"
                )
        return self._busy


class DecisionFile:
    """The answers for this processor and this version of torch, in a file that several processes may share.

    Args:
        folder: It need not exist. Each processor and version of torch has a file of its own in it.
    """

    def __init__(self, folder: Path) -> None:
        self._processor = processor_facts()
        digest = hashlib.sha256(json.dumps(self._processor, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"decisions-{digest}.json"

    def read(self) -> Mapping[str, Any]:
        """All answers; none where the file is missing, damaged, or of another processor.

        Raises:
            OSError: It is there and cannot be read.
        """
        if not self.path.exists():
            return {}
        if not self.path.is_file() or self.path.stat().st_size > _MOST_BYTES:
            return self._ignored("not a file of decisions")
        try:
            found = json.loads(self.path.read_bytes())
        except (ValueError, RecursionError) as error:
            return self._ignored(f"damaged: {error}")
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            return self._ignored("of another format")
        if found.get("processor") != self._processor or not isinstance(found.get("decisions"), dict):
            return self._ignored("of another processor")
        decisions: Mapping[str, Any] = found["decisions"]
        return decisions

    def prepare(self) -> None:
        """See that the file could be written.

        Raises:
            OSError: It could not.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{self.path.stem}-", dir=self.path.parent)
        os.close(handle)
        os.unlink(name)
        if self.path.exists() and not self.path.is_file():
            raise FileExistsError(f"{self.path} is not a file")

    def keep(self, question: str, answer: Choice, allowed: Callable[[Any], bool], *, overwrite: bool = False) -> Choice:
        """Write an answer, unless another process was quicker: then its answer counts, for both.

        Raises:
            OSError: The file cannot be written.
        """
        with self._locked():
            decisions = dict(self.read())
            if not overwrite and question in decisions and allowed(decisions[question]):
                theirs: Choice = decisions[question]
                return theirs
            decisions[question] = answer
            self._write({"format": _FORMAT, "processor": self._processor, "decisions": decisions})
        return answer

    def _write(self, content: Mapping[str, Any]) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{self.path.stem}-", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A block that no other process is in, unless one holds the lock for seconds or files have none."""
        with self.path.with_suffix(".lock").open("a") as file:
            if fcntl is not None:
                for _ in range(_LOCK_TRIES):
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(_LOCK_PAUSE_S)
                    except OSError:  # a file system without locks
                        break
            yield  # closing the file gives the lock back

    def _ignored(self, reason: str) -> Mapping[str, Any]:
        log.warning("model.decisions_ignored", file=str(self.path), reason=reason)
        return {}


_CURRENT: ContextVar[Tuning | None] = ContextVar("tuning", default=None)


def tuning() -> Tuning:
    """The choices of the load that is going on; those of the table outside of one."""
    return _CURRENT.get() or Tuning("off")


def decision_folder() -> Path:
    """Where the platform has files that may be lost: `XDG_CACHE_HOME` where it is set, on every platform.

    Raises:
        OSError: There is no home folder.
    """
    wanted = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(wanted):  # the specification has others ignored
        return Path(wanted) / "staged-pool"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise OSError(f"no folder for decision files: {error}") from error
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "staged-pool"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "staged-pool" / "Cache"
    return home / ".cache" / "staged-pool"


def processor_facts() -> Mapping[str, Any]:
    """What choices depend on, whatever the model: the processor, its cores that may be used, and torch."""
    return {
        "processor": _processor_name(),
        "machine": platform.machine(),
        "able": sorted(name for name, value in capabilities().items() if value is True),
        "cores": usable_cores(),
        "torch": str(torch.__version__),
    }


def capabilities() -> Mapping[str, Any]:
    """The instructions that the processor has, by torch's names; empty where this build of torch does not say."""
    if (said := getattr(torch.cpu, "get_capabilities", None)) is not None:
        found: Mapping[str, Any] = said()
        return found
    asked = {  # of torch before 2.10
        "avx512_bf16": getattr(torch.cpu, "_is_avx512_bf16_supported", None),
        "amx_bf16": getattr(torch.cpu, "_is_amx_tile_supported", None),
    }
    return {name: ask() for name, ask in asked.items() if ask is not None}


def share_of_cores(threads: int) -> float:
    """The part of these threads' time that they get from the cores, 0 to 1, seen over some 30 ms."""
    matrix = torch.rand(_SHARE_EDGE, _SHARE_EDGE)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.mm(matrix, matrix)  # the threads are made
        started, used = time.perf_counter(), time.process_time()
        while time.perf_counter() - started < _SHARE_SEEN_S:
            torch.mm(matrix, matrix)
        return (time.process_time() - used) / (time.perf_counter() - started) / threads
    finally:
        torch.set_num_threads(before)


def _processor_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
