"""Choices between equivalent kernels, measured once for a processor and kept in a file.

Equivalent kernels differ in speed, and in the last bits of their results. A measurement at every start could choose
others, and give other vectors after a restart. So a decision file keeps each choice. Without measurements, a table by
processor features decides.
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
except ImportError:  # Windows: without locks, but files are still replaced as a whole
    fcntl = None  # type: ignore[assignment]

log = get_logger("staged_pool.models")

Choice = TypeVar("Choice", str, int, bool)

_FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 20
"""Size limit of a decision file. A larger file is ignored."""

_LEAST_SHARE: Final = 0.8
"""Share of the cores that a measurement needs. With less, other programs disturb it."""
_SHARE_MEASURED_S: Final = 0.03
"""Duration of a measurement of the share of the cores."""
_SHARE_EDGE: Final = 512
"""Rows and columns of the matrices that `share_of_cores` multiplies."""

_LOCK_TRIES: Final = 100
_LOCK_PAUSE_S: Final = 0.02
"""Pause between tries. Another process holds the lock while it writes a small file."""


class Tuning:
    """Kernel choices of one load.

    Args:
        mode: `auto`: read choices from the decision file, measure those that it lacks, and add them. `off`: use the
            table; measure, read and write nothing. `again`: measure all, and replace them in the file.
        folder: Folder of decision files. None: see `decision_folder`.
        threads: Torch threads of a forward that has the processor to itself. None: torch's current number.
    """

    threads: int
    """Torch threads that forwards will share; while a model loads, torch may use fewer."""

    measured: int
    """Number of questions that were measured."""

    def __init__(self, mode: Tune, folder: Path | None = None, *, threads: int | None = None) -> None:
        self.threads = threads or torch.get_num_threads()
        self.measured = 0
        self._mode: Tune = mode
        self._busy: bool | None = None
        """Other programs use the cores. None: not measured yet."""
        self._folder = folder
        self._answers: dict[str, Any] = {}
        """Answers by question, so that a question has one answer in a load."""

    def choose(
        self,
        question: str,
        *,
        table: Choice,
        measure: Callable[[], Choice],
        allowed: Callable[[Any], bool],
    ) -> Choice:
        """Answer a question, with the same answer as at the last start.

        Args:
            question: Key that names all that the answer depends on, except processor and version of torch.
            table: Answer if nothing may be measured, or if the answer could not be kept.
            measure: Finds the answer by measurement.
            allowed: Checks an answer from the file, which others may have edited.
        """
        if question not in self._answers:
            self._answers[question] = self._choose(question, table, measure, allowed)
        answer: Choice = self._answers[question]
        return answer

    @contextmanager
    def current(self) -> Iterator[None]:
        """Open a block in which `tuning` returns this object."""
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
            file.prepare()  # before a measurement: one that is not kept may differ at the next start
            found = table
            if self._mode == "again" or not self._machine_is_busy():
                found = measure()
                self.measured += 1
            return file.keep(question, found, allowed, overwrite=self._mode == "again")
        except OSError as error:
            log.warning("model.decisions_not_kept", reason=str(error), instead="the table of processors")
            self._mode = "off"
            return table

    def _machine_is_busy(self) -> bool:
        """Tell whether other programs use the cores, so that a measurement would be wrong."""
        if self._busy is None:
            self._busy = share_of_cores(self.threads) < _LEAST_SHARE
            if self._busy:
                log.info(  # not a warning: choices of the table are good, too, and the next start repeats them
                    "model.not_measured",
                    reason="other programs use the cores",
                    instead="the table of processors; measure later with --tune again",
                )
        return self._busy


class DecisionFile:
    """File of choices for this processor and version of torch, shared by processes.

    Args:
        folder: Folder of the file. It need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._processor = processor_facts()
        digest = hashlib.sha256(json.dumps(self._processor, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"decisions-{digest}.json"

    def read(self) -> Mapping[str, Any]:
        """Return all answers; none if the file is missing, damaged, or of another processor.

        Raises:
            OSError: The file exists and cannot be read.
        """
        if not self.path.exists():
            return {}
        if not self.path.is_file() or self.path.stat().st_size > _MAX_BYTES:
            return self._ignored("not a file of decisions")
        try:
            found = json.loads(self.path.read_bytes())
        except (ValueError, RecursionError) as error:
            return self._ignored(f"damaged: {error}")
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            return self._ignored("written in another format")
        if found.get("processor") != self._processor or not isinstance(found.get("decisions"), dict):
            return self._ignored("written for another processor")
        decisions: Mapping[str, Any] = found["decisions"]
        return decisions

    def prepare(self) -> None:
        """Check that the file can be written.

        Raises:
            OSError: It cannot.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{self.path.stem}-", dir=self.path.parent)
        os.close(handle)
        os.unlink(name)
        if self.path.exists() and not self.path.is_file():
            raise FileExistsError(f"{self.path} is not a file")

    def keep(self, question: str, answer: Choice, allowed: Callable[[Any], bool], *, overwrite: bool = False) -> Choice:
        """Write an answer, and return it; or return that of another process that was quicker.

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
        """Open a block under the file lock; after two seconds, or without locks, go on unlocked."""
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
            yield  # closing the file releases the lock

    def _ignored(self, reason: str) -> Mapping[str, Any]:
        log.warning("model.decisions_ignored", file=str(self.path), reason=reason)
        return {}


_CURRENT: ContextVar[Tuning | None] = ContextVar("tuning", default=None)


def tuning() -> Tuning:
    """Return the choices of the current load; outside of a load, those of the table."""
    return _CURRENT.get() or Tuning("off")


def decision_folder() -> Path:
    """Return the cache folder of the platform; `XDG_CACHE_HOME`, if set, on every platform.

    Raises:
        OSError: There is no home folder.
    """
    wanted = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(wanted):  # the XDG specification: ignore relative paths
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
    """Return the facts that choices of all models depend on: processor, usable cores, torch."""
    return {
        "processor": _processor_name(),
        "machine": platform.machine(),
        "able": sorted(name for name, value in capabilities().items() if value is True),
        "cores": usable_cores(),
        "torch": str(torch.__version__),
    }


def capabilities() -> Mapping[str, Any]:
    """Return processor features by torch's names; empty if this build of torch has none."""
    if (get := getattr(torch.cpu, "get_capabilities", None)) is not None:
        found: Mapping[str, Any] = get()
        return found
    getters = {  # torch before 2.10
        "avx512_bf16": getattr(torch.cpu, "_is_avx512_bf16_supported", None),
        "amx_bf16": getattr(torch.cpu, "_is_amx_tile_supported", None),
    }
    return {name: get() for name, get in getters.items() if get is not None}


def share_of_cores(threads: int) -> float:
    """Measure the share of time that threads get from the cores: 0 to 1."""
    matrix = torch.rand(_SHARE_EDGE, _SHARE_EDGE)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.mm(matrix, matrix)  # starts the threads
        started, used = time.perf_counter(), time.process_time()
        while time.perf_counter() - started < _SHARE_MEASURED_S:
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
