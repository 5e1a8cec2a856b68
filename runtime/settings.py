"""Settings table: metadata of configuration fields, for flags, environment, files and docs.

A configuration is a frozen dataclass whose fields are made by `setting()`. All else follows from the fields: the
command line, the variables of the environment, the keys of a configuration file, the range checks and the docs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from staged_pool.stages.errors import ConfigError

T = TypeVar("T")

Group = Literal["Model", "Device", "Server", "Access", "Batching", "Limits", "Images", "Caching", "Logs"]
Kind = Literal["text", "texts", "path", "int", "float", "bool", "choice"]

GROUPS: Final[tuple[Group, ...]] = get_args(Group)
"""Headings of `--help-all` and of docs/configuration.md, in their order."""

ENV_PREFIX: Final = "STAGED_POOL_"
"""Start of each variable's name; the flag in capitals follows."""

DAY_S: Final = 86_400
"""Largest timeout in seconds. More is a mistake in the unit."""

_KEY: Final = "staged_pool.setting"
_KINDS: Final[dict[Any, Kind]] = {
    str: "text",
    tuple[str, ...]: "texts",
    Path: "path",
    int: "int",
    float: "float",
    bool: "bool",
}
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


class Unit(NamedTuple):
    """Unit in which flags and files give a field that holds bytes."""

    kind: Kind
    """Kind of value that a flag or a file gives."""
    read: Callable[[str, Any], int]
    """Convert such a value to bytes; the first argument is the name for errors."""
    show: Callable[[int], str]
    """Convert bytes to such a value, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Metadata of one field. See `setting()`."""

    help: str
    more: str
    group: Group
    flag: str
    metavar: str
    default: str
    basic: bool
    has_flag: bool
    low: float
    high: float
    unit: Unit | None
    shared: bool
    secret: bool
    completes: Literal["", "dir"]


def setting(
    default: T,
    help: str,
    *,
    group: Group,
    more: str = "",
    flag: str = "",
    metavar: str = "",
    default_text: str = "",
    basic: bool = False,
    has_flag: bool = True,
    low: float = -math.inf,
    high: float = math.inf,
    unit: Unit | None = None,
    shared: bool = False,
    secret: bool = False,
    completes: Literal["", "dir"] = "",
) -> T:
    """Make a dataclass field that flags, variables and configuration files can set.

    Args:
        default: Value of the field where nobody sets it.
        help: One or two sentences for `--help`.
        group: Heading that the flag stands under.
        more: Further sentences, for `--help-all` and the docs.
        flag: Name without dashes. Empty: made from the name of the field.
        metavar: Placeholder of the value in help. Empty: made from the type.
        default_text: Default in words, for a field whose default is None or empty.
        basic: List the flag in the short help.
        has_flag: False: only Python code can set the field.
        low: Smallest number allowed.
        high: Largest number allowed.
        unit: Unit of flags and files, where it differs from the field's.
        shared: All models of a process have the same value.
        secret: Never print the value.
        completes: Kind of path that a shell completes.
    """
    made = Setting(
        help=help, more=more, group=group, flag=flag, metavar=metavar, default=default_text, basic=basic,
        has_flag=has_flag, low=low, high=high, unit=unit, shared=shared, secret=secret, completes=completes,
    )  # fmt: skip
    return field(default=default, metadata={_KEY: made}, repr=not secret)


@dataclass(frozen=True, slots=True)
class SettingField:
    """One row of the table: a field of a configuration, its type and its metadata."""

    name: str
    kind: Kind
    choices: tuple[str, ...]
    optional: bool
    """The field may be None."""
    default: Any
    about: Setting

    @property
    def key(self) -> str:
        """Name of the flag without dashes; also the key in a configuration file."""
        return self.about.flag or self.name.removesuffix("_s").replace("_", "-")

    @property
    def flag(self) -> str:
        """Name of the flag."""
        return f"--{self.key}"

    @property
    def off_flag(self) -> str | None:
        """Flag that switches the field off. None: the flag alone suffices, as the field is off by default."""
        return f"--no-{self.key}" if self.kind == "bool" and self.default is not False else None

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + self.key.replace("-", "_").upper()

    @property
    def given_kind(self) -> Kind:
        """Kind of the value that flags and files give."""
        return self.about.unit.kind if self.about.unit else self.kind

    def read(self, value: Any) -> Any:
        """Convert a value of a flag or a file to that of the field.

        Raises:
            ConfigError: The value has no such unit, or is out of range.
        """
        if value is not None and self.about.unit is not None:
            value = self.about.unit.read(self.key.replace("-", "_"), value)
        return tuple(value) if self.kind == "texts" else value

    def check(self, value: Any) -> None:
        """Check a number against its range, and a choice against its list.

        Raises:
            ConfigError: The value is not allowed; names field, value and range.
        """
        if value is None and self.optional:
            return
        if self.kind == "choice":
            if value not in self.choices:
                raise ConfigError(f"{self.name}={value!r}: must be one of {', '.join(self.choices)}")
        elif self.kind in ("int", "float"):
            numbers = int if self.kind == "int" else (int, float)
            low, high = self.about.low, self.about.high
            if isinstance(value, bool) or not isinstance(value, numbers) or not low <= value <= high:
                wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise ConfigError(f"{self.name}={value!r}: must be {wanted}")

    def plain(self, value: Any) -> Any:
        """Convert a value of the field to one of a configuration file: a text, number, bool, list or None."""
        if value is None:
            return None
        if self.about.unit is not None:
            text = self.about.unit.show(value)
            return float(text) if self.given_kind == "float" else text
        return list(value) if self.kind == "texts" else str(value) if self.kind == "path" else value

    def show(self, value: Any) -> str:
        """Write a value of the field as a flag would give it; an empty text stands for nothing."""
        if value is None or value == ():
            return ""
        if self.about.unit is not None:
            return self.about.unit.show(value)
        if self.kind == "bool":
            return "on" if value else "off"
        if self.kind == "texts":
            return " ".join(value)
        return f"{value:g}" if self.kind == "float" else str(value)


_tables: Final[dict[type[Any], tuple[SettingField, ...]]] = {}


def settings_of(config: type[Any]) -> tuple[SettingField, ...]:
    """Return the table of a configuration class, in the order of its fields."""
    if config not in _tables:
        _tables[config] = tuple(_settings_of(config))
    return _tables[config]


def _settings_of(config: type[Any]) -> Iterator[SettingField]:
    hints = get_type_hints(config)
    for each in fields(config):
        annotation, optional = hints[each.name], False
        if get_origin(annotation) in (Union, UnionType):
            (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
            optional = True
        is_choice = get_origin(annotation) is Literal
        kind = "choice" if is_choice else _KINDS[annotation]
        assert each.default is not MISSING, each.name
        choices = get_args(annotation) if is_choice else ()
        yield SettingField(each.name, kind, choices, optional, each.default, each.metadata[_KEY])


def check_settings(config: Any) -> None:
    """Check each number and choice of a configuration.

    Raises:
        ConfigError: A value is not allowed; names field, value and range.
    """
    for row in settings_of(type(config)):
        row.check(getattr(config, row.name))


def read_bytes(name: str, text: str | int) -> int:
    """Read a number of bytes: `2500M` is 2500 * 10^6, and `4Gi` is 4 * 2^30.

    Args:
        name: Setting that the number is for.
        text: The number and its unit.

    Raises:
        ConfigError: It is written in another way.
    """
    if (found := _BYTES.fullmatch(str(text).strip())) is None:
        raise ConfigError(f"{name}={text!r}: must be bytes with a unit, such as 3500M, 4G or 4Gi")
    number, unit, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(unit.upper() or " "))


def show_bytes(count: int) -> str:
    """Write a number of bytes with the largest unit that keeps it exact."""
    for power, unit in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        for base, mark in ((1000, ""), (1024, "i")):
            if count and count % base**power == 0:
                return f"{count // base**power}{unit}{mark}"
    return str(count)


def _read_mebibytes(name: str, value: float) -> int:
    if not 0.001 <= value <= 2048:
        raise ConfigError(f"{name}={value:g}: must be between 0.001 and 2048")
    return int(value * 2**20)


BYTES: Final = Unit("text", read_bytes, show_bytes)
"""Bytes with a unit, such as `4G`."""

MEBIBYTES: Final = Unit("float", _read_mebibytes, lambda count: f"{count / 2**20:g}")
"""Numbers of 2^20 bytes."""
