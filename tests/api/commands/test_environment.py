"""Variables of the environment that keep a command from its work are named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from staged_pool.runtime.models.folders.local import offline_variable
from tests.servers.in_process import invoke_command


@pytest.mark.parametrize("command", [("embed", "a", "--model"), ("check",)])
def test_a_machine_without_a_temporary_folder_is_told_in_a_line(
    command: tuple[str, ...], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    done = invoke_command(*command, str(tiny_folder))
    assert done.returncode == 2
    assert "error: no folder for temporary files can be written to: name one in the variable TMPDIR" in done.stderr


@pytest.mark.parametrize(
    ("hub", "transformers", "name"),
    [
        ("1", None, "HF_HUB_OFFLINE"), (None, "1", "TRANSFORMERS_OFFLINE"), ("", "true", "TRANSFORMERS_OFFLINE"),
        ("0", "1", ""), (None, None, ""), (None, "0", ""), ("on", "1", "HF_HUB_OFFLINE"),
    ],
)  # fmt: skip
def test_the_variable_that_forbids_downloads_is_named(
    hub: str | None, transformers: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (("HF_HUB_OFFLINE", hub), ("TRANSFORMERS_OFFLINE", transformers)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert offline_variable() == name
    if name:
        done = invoke_command("embed", "--model", "organisation/absent", "a")
        assert f"{name} allows no download: unset it" in done.stderr
