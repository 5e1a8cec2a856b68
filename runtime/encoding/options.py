"""Arguments of `encode` and `predict`, checked as sentence-transformers checks them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, Required, TypeAlias, TypedDict, TypeVar, get_args

from staged_pool.stages.errors import InvalidArgument
from staged_pool.stages.scheduling.entries import Priority

if TYPE_CHECKING:
    from torch import Tensor

Precision: TypeAlias = Literal["float32", "int8", "uint8", "binary", "ubinary"]
OutputValue: TypeAlias = Literal["sentence_embedding", "token_embeddings"]
ActivationFunction: TypeAlias = "Callable[[Tensor], Tensor]"


class EngineKeywords(TypedDict, total=False):
    """Arguments that sentence-transformers has not; see `EngineApi`."""

    timeout_s: float
    priority: Priority | str
    tenant: Hashable
    cache_salt: str | None


class CommonKeywords(EngineKeywords, total=False):
    """Arguments of both `encode` and `predict`."""

    prompt_name: str | None
    prompt: str | None
    batch_size: int
    show_progress_bar: bool | None
    device: str | None
    pool: None
    chunk_size: int | None


class EncodeKeywords(CommonKeywords, total=False):
    """Arguments of `encode`, but those that select the type of the result."""

    output_value: OutputValue | None
    precision: Precision | None
    normalize_embeddings: bool
    truncate_dim: int | None
    task: str | None
    convert_to_sparse_tensor: bool
    save_to_cpu: bool
    max_active_dims: int | None


class ToArray(EncodeKeywords, total=False):
    """Arguments of `encode` for one array."""

    convert_to_numpy: Literal[True]
    convert_to_tensor: Literal[False]


class ToTensor(EncodeKeywords, total=False):
    """Arguments of `encode` for one tensor."""

    convert_to_numpy: bool
    convert_to_tensor: Required[Literal[True]]


class ToTensors(EncodeKeywords, total=False):
    """Arguments of `encode` for a list of tensors."""

    convert_to_numpy: Required[Literal[False]]
    convert_to_tensor: Literal[False]


class PredictKeywords(CommonKeywords, total=False):
    """Arguments of `predict`."""

    activation_fn: ActivationFunction | None
    apply_softmax: bool | None
    convert_to_numpy: bool
    convert_to_tensor: bool


class RankKeywords(CommonKeywords, total=False):
    """Arguments of `rank`."""

    activation_fn: ActivationFunction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Arguments of both `encode` and `predict`.

    The engine batches by itself, on the device that it was opened with: `batch_size` and `chunk_size` are checked, and
    change nothing.
    """

    prompt_name: str | None = None
    prompt: str | None = None
    batch_size: int = 32
    show_progress_bar: bool | None = None
    convert_to_numpy: bool | None = None
    """None: as the class of sentence-transformers for this kind of model."""
    convert_to_tensor: bool | None = None
    """None: likewise."""
    device: object = None
    pool: object = None
    chunk_size: int | None = None
    engine: Mapping[str, Any]
    """Arguments for the engine: `EngineKeywords`."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "chunk_size"):
            _positive(name, getattr(self, name))
        for name in ("prompt", "prompt_name"):
            if not isinstance(value := getattr(self, name), str | None):
                raise InvalidArgument(f"{name} must be a text, not of type {type(value).__name__}.", param=name)
        if self.pool is not None:
            raise InvalidArgument(
                "pool must be None: one engine uses all of its devices, without processes of a pool.", param="pool"
            )

    def check_device(self, device: str) -> None:
        """Check that no other device is wanted than that of the engine.

        Raises:
            InvalidArgument: Another one is wanted, or several processes.
        """
        if self.device is not None and str(self.device) not in {device, device.partition(":")[0]}:
            raise InvalidArgument(
                f"The model is on the device {device}, and stays there: leave device out, or open the engine with "
                "another one.",
                param="device",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions(_Options):
    """Arguments of `encode`."""

    output_value: OutputValue | None = "sentence_embedding"
    precision: Precision | None = "float32"
    normalize_embeddings: bool = False
    truncate_dim: int | None = None
    task: str | None = None
    convert_to_sparse_tensor: bool = True
    save_to_cpu: bool = False
    max_active_dims: int | None = None

    def __post_init__(self) -> None:
        super(EncodeOptions, self).__post_init__()  # slots make a new class
        if self.precision not in {None, *get_args(Precision)}:
            known = ", ".join(get_args(Precision))
            raise InvalidArgument(f"precision={self.precision!r}: must be one of {known}.", param="precision")
        if self.output_value not in {None, *get_args(OutputValue)}:
            known = " or ".join(get_args(OutputValue))
            raise InvalidArgument(f"output_value={self.output_value!r}: must be {known}.", param="output_value")
        _positive("max_active_dims", self.max_active_dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions(_Options):
    """Arguments of `predict`."""

    activation_fn: ActivationFunction | None = None
    apply_softmax: bool | None = False


O = TypeVar("O", bound=_Options)  # noqa: E741  # options

IN_ORDER: Final = ("prompt_name", "prompt", "batch_size", "show_progress_bar")
"""Arguments that may be given by place: in all classes of sentence-transformers they follow the inputs."""

_OF_ENGINE: Final = frozenset(EngineKeywords.__annotations__)


def options(kind: type[O], in_order: Sequence[Any], keywords: Mapping[str, Any]) -> O:
    """Check the arguments of a call.

    Args:
        kind: Class of the options.
        in_order: Arguments given by place, behind the inputs.
        keywords: Arguments given by name.

    Raises:
        InvalidArgument: One is unknown, given twice or wrong.
    """
    if len(in_order) > len(IN_ORDER):
        raise InvalidArgument(f"At most {', '.join(IN_ORDER)} may be given by place: give the others by name.")
    given = dict(zip(IN_ORDER, in_order, strict=False))
    if twice := sorted(given.keys() & keywords.keys()):
        raise InvalidArgument(f"{twice[0]} is given by place and by name.", param=twice[0])
    known = {field.name for field in fields(kind)} - {"engine"}
    if unknown := sorted(keywords.keys() - known - _OF_ENGINE):
        names = ", ".join(sorted(known | _OF_ENGINE))
        raise InvalidArgument(f"{unknown[0]} is no argument of this call, only: {names}.", param=unknown[0])
    given |= {name: value for name, value in keywords.items() if name in known}
    return kind(**given, engine={name: value for name, value in keywords.items() if name in _OF_ENGINE})


def _positive(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidArgument(f"{name}={value!r}: must be a whole number above 0.", param=name)
