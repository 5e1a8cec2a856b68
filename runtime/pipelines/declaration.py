"""Declarations of pipeline stages, as a program or a file gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Final, Literal, TypeAlias, get_args

from staged_pool.runtime import arguments
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.pipelines.references import ITEM, NAME, REQUEST
from staged_pool.runtime.requests import HYPOTHESIS, Output
from staged_pool.runtime.tasks import zero_shot
from staged_pool.stages.errors import ConfigError, InvalidInput

Task: TypeAlias = Literal["embed", "score", "maxsim", "classify", "plugin", "function"]
OnError: TypeAlias = Literal["fail", "skip"]

TASKS: Final[tuple[Task, ...]] = get_args(Task)

MAX_PARTS: Final = 64
"""Items that an expanding stage may make of one, if the stage does not say."""

QUERY: Final = "request.query"

_OPTIONS: Final[dict[Task, frozenset[str]]] = {
    "embed": frozenset({"outputs", "dimensions", "max_active_dims", "prompt_name", "max_tokens"}),
    "score": frozenset({"top_k", "max_tokens"}),
    "maxsim": frozenset({"top_k"}),
    "classify": frozenset({"candidate_labels", "hypothesis_template", "multi_label", "max_tokens"}),
    "plugin": frozenset({"plugin", "expand", "max_items"}),
    "function": frozenset({"function", "expand", "max_items"}),
}
"""Settings of the stages of one task; the others hold for all."""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage of a pipeline: an engine with a task, a plugin, or a function.

    Raises:
        ConfigError: A setting is wrong, or the task of the stage does not have it.
    """

    name: str
    """Name of the stage: letters, digits, `_` and `-`. Later stages refer to its value by it."""
    _: KW_ONLY
    engine: Engine | str | None = None
    """The engine, or its name among the `engines` of the pipeline."""
    task: Task | None = None
    """Task of the stage. None: `function` or `plugin` if one is given, else `embed`.

    - `embed`: the value is an `Embedding`.
    - `score`: the value is the score of the item for a query, by the engine.
    - `maxsim`: the value is the late interaction of a query with the multi-vector of an earlier stage. A query that is
      no vector yet is embedded once a request.
    - `classify`: the value is a `Labelled`.
    """
    plugin: str | None = None
    """Name of a plugin; the value is its output."""
    function: Callable[..., Any] | None = None
    """A function of the inputs. A plain one runs in a thread, and the result of an async one is awaited.

    An item for which it returns None vanishes.
    """
    source: str | Sequence[str] | None = None
    """Sources of the inputs: `item`, `request.FIELD`, the name of an earlier stage, or a field of one.

    None: the value of the stage before, or the item in the first stage; behind the query, for `score` and `maxsim`.
    `classify` may have a second one, its candidate labels.
    """
    outputs: str | Sequence[str] = ("dense",)
    """Outputs of `embed`; see `Engine.embed`."""
    dimensions: int | None = None
    """See `Engine.embed`."""
    max_active_dims: int | None = None
    """See `Engine.embed`."""
    prompt_name: str | None = None
    """See `Engine.embed`. Inputs of a `maxsim` are documents, if the stage does not say."""
    max_tokens: int | None = None
    """See `Engine.embed`."""
    candidate_labels: str | Sequence[str] | None = None
    """Labels to choose among, as for `Engine.classify`. None: a second source, or the labels of the model."""
    hypothesis_template: str = HYPOTHESIS
    """See `Engine.classify`."""
    multi_label: bool = False
    """See `Engine.classify`."""
    expand: bool | str = False
    """The value is a list, and each entry becomes an item. A text: the name of its field with the list."""
    max_items: int = MAX_PARTS
    """Most items that an expanding stage may make of one."""
    top_k: int | None = None
    """Number of items of a request that go on, the best first. None: all of them, in their order."""
    on_error: OnError = "fail"
    """`skip`: an item that fails is left out, with its error. `fail`: its request fails."""
    window: int | None = None
    """Most items in the stage at once. None: that of the pipeline."""

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or NAME.fullmatch(name) is None or name in (REQUEST, ITEM):
            raise ConfigError(
                f"name = {self.name!r}: a stage needs a name of letters, digits, _ and -, other than request and item"
            )
        if self.task is not None and self.task not in TASKS:
            self._reject("task", f"must be one of {', '.join(TASKS)}")
        function: object = self.function
        if function is not None and not callable(function):
            self._reject("function", "must be a function")
        if sum(given is not None for given in (self.function, self.plugin)) > 1:
            self._reject("plugin", "stands beside function; keep one of them")
        self._check_task()
        self._check_numbers()
        self._check_labels()
        if self.on_error not in get_args(OnError):
            self._reject("on_error", f"must be {' or '.join(get_args(OnError))}")

    @property
    def kind(self) -> Task:
        """The task of the stage."""
        if self.task is not None:
            return self.task
        return "function" if self.function is not None else "plugin" if self.plugin is not None else "embed"

    @property
    def sources(self) -> tuple[str, ...] | None:
        """The references of `source`; None if they are not given."""
        if self.source is None or isinstance(self.source, str):
            return None if self.source is None else (self.source,)
        return tuple(self.source)

    @property
    def has_labels(self) -> bool:
        """True if a stage that classifies, or a source of it, gives candidate labels."""
        return self.kind == "classify" and (self.candidate_labels is not None or len(self.sources or ()) > 1)

    def where(self, key: str) -> str:
        """Return the place of a setting, as errors name it."""
        return f"stage {self.name}: {_KEYS.get(key, key)}"

    def _reject(self, key: str, message: str) -> None:
        value = getattr(self, key)
        raise ConfigError(f"{self.where(key)} = {value!r}: {message}")

    def _check_task(self) -> None:
        kind = self.kind
        own = frozenset[str]().union(*_OPTIONS.values())
        for each in fields(self):
            if each.name in own and each.name not in _OPTIONS[kind] and getattr(self, each.name) != each.default:
                tasks = [task for task in TASKS if each.name in _OPTIONS[task]]
                self._reject(each.name, f"a stage of the task {kind} has no {each.name}; it is for {', '.join(tasks)}")
        if kind == "function" and self.function is None:
            self._reject("function", "the task function needs a function")
        if kind == "plugin" and self.plugin is None:
            self._reject("plugin", "the task plugin needs the name of a plugin")
        if self.engine is None and kind in ("embed", "score", "classify"):
            self._reject("engine", f"the task {kind} needs a model")
        if self.engine is not None and kind == "function":
            self._reject("engine", "a function has no model")

    def _check_numbers(self) -> None:
        for name in ("dimensions", "max_active_dims", "max_items", "top_k", "window"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                self._reject(name, "must be a whole number of at least 1")
        if self.max_tokens is not None and type(self.max_tokens) is not int:
            self._reject("max_tokens", "must be a whole number")
        if not self.expand and self.max_items != MAX_PARTS:
            self._reject("max_items", "is for a stage with expand")
        for name, kinds, message in (
            ("expand", bool | str, "must be true, false, or the name of the field with the list"),
            ("plugin", str | None, "must be a text"),
            ("prompt_name", str | None, "must be a text"),
            ("engine", str | Engine | None, "must be an engine of open_engine, or the name of one"),
            ("hypothesis_template", str, "must be a text"),
            ("multi_label", bool, "must be true or false"),
        ):
            if not isinstance(getattr(self, name), kinds):
                self._reject(name, message)
        for key in ("source", "outputs", "candidate_labels"):
            texts = getattr(self, key)
            if texts is not None and not _are_texts(texts):
                self._reject(key, "must be a text or a list of texts")
        if self.max_active_dims is not None and Output.SPARSE not in self.outputs:
            self._reject("max_active_dims", 'is for sparse vectors; write outputs = ["sparse"]')

    def _check_labels(self) -> None:
        if self.kind != "classify":
            return
        for key, usual in (("hypothesis_template", HYPOTHESIS), ("multi_label", False)):
            if not self.has_labels and getattr(self, key) != usual:
                self._reject(key, "is for candidate_labels, which are missing")
        if self.candidate_labels is not None and len(self.sources or ()) > 1:
            self._reject("candidate_labels", f"{_KEYS['source']} has labels, too; keep one of them")
        labels = arguments.candidate_labels(self.candidate_labels)
        try:
            zero_shot.check(("label",) if labels is None else labels, self.hypothesis_template)
        except InvalidInput as error:
            self._reject(error.param or "candidate_labels", str(error))


_KEYS: Final = {"source": "from", "engine": "model"}
"""Names of settings in a file, where they differ."""


def _are_texts(value: object) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, Iterable) and bool(texts := list(value)) and all(isinstance(text, str) for text in texts)
