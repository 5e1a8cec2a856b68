"""Steps of a load, each in a thread and within the deadline of loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.load_deadline import LoadDeadline, LoadTimedOut
from staged_pool.runtime.load_progress import LoadProgress
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import LoadedModel
from staged_pool.runtime.models.find import FoundModel, find_model
from staged_pool.runtime.models.folders.local import local_folder
from staged_pool.runtime.models.images.torchvision import leave_out_broken_torchvision
from staged_pool.runtime.models.sharing import Sharing
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.stages.errors import DeviceLost

A = TypeVar("A")
T = TypeVar("T")


class OverdueLoads:
    """Loads that nobody waits for any more, but whose threads still run.

    While one does, no other load begins: two at once would disturb each other, as the libraries that build models have
    settings of the whole process.
    """

    def __init__(self) -> None:
        self._deadlines: list[LoadDeadline] = []

    def add(self, deadline: LoadDeadline) -> None:
        """Note a load that has passed its deadline."""
        self._deadlines.append(deadline)

    def check(self) -> None:
        """Reject a new load while an overdue one runs.

        Raises:
            LoadTimedOut: One does.
        """
        self._deadlines = [each for each in self._deadlines if each.is_running]
        if self._deadlines:
            raise LoadTimedOut(
                "an earlier load has passed its deadline and still hangs, and a thread cannot be ended: no other load "
                "begins before it ends. The models that serve go on; restart the server to be rid of it"
            )


class LoadThread:
    """Thread that loads models, step by step. A step that takes too long is given up, with its thread.

    Args:
        threads: Runs the steps.
        timeout_s: Longest duration of a step, in seconds.
        governor: Memory governor of this process.
        overdue: Gets the steps that are given up.
    """

    def __init__(
        self, threads: DedicatedThreads, timeout_s: float, governor: MemoryGovernor, overdue: OverdueLoads
    ) -> None:
        self._threads = threads
        self._timeout_s = timeout_s
        self._governor = governor
        self._overdue = overdue

    async def find(self, config: EngineConfig, progress: LoadProgress) -> FoundModel:
        """Find a model; see `find_model`. A download may take as long as it takes: its client has limits of its own."""
        find = partial(find_model, progress=progress)
        if config.model is not None and await self.run(local_folder, config.model) is None:
            return await self._threads.run(find, config)
        return await self.run(find, config)

    async def load(
        self, models: Sequence[tuple[EngineConfig, FoundModel]], sharing: Sharing, progress: LoadProgress
    ) -> Sequence[LoadedModel]:
        """Load a model, or several on the weights of one base model. What an overdue load makes is closed at once.

        Raises:
            ConfigError: A model cannot be loaded, or not in time.
        """
        deadline, made = LoadDeadline(self._timeout_s), list[LoadedModel]()

        def load(sharing: Sharing) -> None:
            loaded = _load(models, self._governor, progress, deadline, sharing)
            made.extend(loaded)  # before it settles: from then on the caller may look
            try:
                deadline.settle()
            except LoadTimedOut:
                for model in loaded:
                    model.close()
                made.clear()
                raise

        try:
            await self._run(load, sharing, deadline)
        except LoadTimedOut:
            if not deadline.is_settled:
                raise
        return made

    async def run(self, function: Callable[[A], T], argument: A) -> T:
        """Run a step that makes nothing that would have to be closed.

        Raises:
            LoadTimedOut: It takes too long.
        """
        return await self._run(function, argument, LoadDeadline(self._timeout_s))

    async def _run(self, function: Callable[[A], T], argument: A, deadline: LoadDeadline) -> T:
        def within_deadline(argument: A) -> T:
            with deadline.running():
                return function(argument)

        try:
            return await self._threads.run(within_deadline, argument, timeout_s=self._timeout_s)
        except DeviceLost:
            if deadline.give_up():
                self._overdue.add(deadline)
            raise deadline.error() from None


def share_memory_of(models: Sequence[LoadedModel]) -> Sequence[LoadedModel]:
    """Divide the memory of GPUs among models; see `share_memory`."""
    from staged_pool.runtime.models.encoder import Encoder
    from staged_pool.runtime.models.load import share_memory

    shared = iter(share_memory([model for model in models if isinstance(model, Encoder)]))
    return [next(shared) if isinstance(model, Encoder) else model for model in models]


def _load(
    models: Sequence[tuple[EngineConfig, FoundModel]],
    governor: MemoryGovernor,
    progress: LoadProgress,
    deadline: LoadDeadline,
    sharing: Sharing,
) -> Sequence[LoadedModel]:
    leave_out_broken_torchvision()
    from staged_pool.runtime.models.load import load_model  # imports torch, which takes seconds: off the event loop
    from staged_pool.runtime.models.load_shared import load_sharing

    members = [models[place] for place in sharing.places]
    if sharing.base is None:
        return [load_model(config, found, governor, progress, deadline=deadline) for config, found in members]
    return load_sharing(
        members[0][0], sharing.base, [found for _, found in members], governor, progress, deadline=deadline
    )
