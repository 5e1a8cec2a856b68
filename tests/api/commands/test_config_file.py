"""`--config FILE` and `staged-pool config`: flag, variable, file, default, in this order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from staged_pool.api.commands import cli


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that errors call `pool.toml`."""
    monkeypatch.chdir(tmp_path)
    return Path("pool.toml")


def run(*flags: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, ["config", *flags], env=variables)


def settings(*flags: str, **variables: str) -> dict[str, Any]:
    result = run("--json", *flags, **variables)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def values(found: dict[str, Any]) -> dict[str, Any]:
    return {key: each["value"] for key, each in found["settings"].items()}


def test_a_flag_wins_over_a_variable_a_variable_over_the_file_and_the_file_over_the_default(file: Path) -> None:
    file.write_text("max-requests = 1\nmax-items = 1\n\nmedia-limit = 1\n")
    found = settings(
        "--config", "pool.toml", "--max-requests", "3", STAGED_POOL_MAX_REQUESTS="2", STAGED_POOL_MAX_ITEMS="2"
    )["settings"]
    assert found["max-requests"] == {"value": 3, "source": "flag", "name": "--max-requests"}
    assert found["max-items"] == {"value": 2, "source": "environment", "name": "STAGED_POOL_MAX_ITEMS"}
    assert found["media-limit"] == {"value": 1, "source": "file", "name": "pool.toml, line 4"}
    assert found["max-batch-items"] == {"value": 256, "source": "default", "name": None}


def test_each_type_of_setting_can_stand_in_a_file(file: Path) -> None:
    given = {
        "host": "0.0.0.0",
        "port": 9000,
        "target-delay": 2,
        "coalesce": False,
        "offline": True,
        "matryoshka": True,
        "dtype": "float32",
        "tls-cert": "a.pem",
        "tls-key": "b.pem",
        "cors-origin": ["https://a.example", "https://b.example"],
        "allow-media-domain": ["a.example"],
        "memory-limit": "4G",
        "body-limit-mb": 1.5,
        "log-level": "debug",
    }
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items()))
    found = values(settings("--config", "pool.toml"))
    assert {key: found[key] for key in given} == given


def test_the_file_can_be_named_by_a_variable(file: Path) -> None:
    file.write_text("port = 9000\n")
    assert values(settings(STAGED_POOL_CONFIG="pool.toml"))["port"] == 9000


SEVERAL = """
max-batch-tokens = 1000
offline = true

[[models]]
model = "./a"
served-name = "a"
dtype = "float32"

[[models]]
model = "./b"
max-batch-tokens = 2000
"""


def test_each_of_several_models_has_its_own_settings(file: Path) -> None:
    file.write_text(SEVERAL)
    first, second = settings("--config", "pool.toml")["models"]
    assert {key: each["value"] for key, each in first.items()} == {
        "model": "./a",
        "served-name": "a",
        "dtype": "float32",
    }
    assert {key: each["value"] for key, each in second.items()} == {"model": "./b", "max-batch-tokens": 2000}
    assert second["max-batch-tokens"]["name"] == "pool.toml, line 12"


def test_a_flag_wins_over_the_tables_of_models(file: Path) -> None:
    file.write_text(SEVERAL)
    found = settings("--config", "pool.toml", "--dtype", "bfloat16")
    assert values(found)["dtype"] == "bfloat16"
    assert all("dtype" not in model for model in found["models"])


def test_models_of_flags_replace_those_of_the_file(file: Path) -> None:
    file.write_text(SEVERAL)
    found = settings("--config", "pool.toml", "--model", "./c")
    assert (values(found)["model"], found["models"]) == ("./c", [])


def test_what_is_printed_is_a_file_with_the_same_meaning(file: Path) -> None:
    file.write_text(SEVERAL)
    flags = ("--memory-limit", "4Gi", "--cors-origin", "https://a.example", "--port", "0", "--no-coalesce")
    printed = run("--config", "pool.toml", *flags)
    assert printed.exit_code == 0
    Path("again.toml").write_text(printed.stdout)
    before, after = settings("--config", "pool.toml", *flags), settings("--config", "again.toml")
    assert values(after) == values(before)
    for first, second in zip(before["models"], after["models"], strict=True):
        assert {key: each["value"] for key, each in first.items()} == {
            key: each["value"] for key, each in second.items()
        }


@pytest.mark.parametrize("shape", [[], ["--json"]])
def test_keys_are_not_printed(shape: list[str], file: Path) -> None:
    file.write_text('api-key = ["very-secret"]\n')
    for flags in (["--config", "pool.toml"], ["--api-key", "very-secret"]):
        result = run(*shape, *flags)
        assert result.exit_code == 0
        assert "very-secret" not in result.output
        assert "(hidden)" in result.output


WRONG = [
    ("max_batch_tokens = 3", "line 1: max_batch_tokens is no setting; did you mean max-batch-tokens?"),
    ("port = 1\nmax-item = 3", "line 2: max-item is no setting; did you mean max-items?"),
    ("[xyz]\nport = 3", "line 1: xyz is no setting; `staged-pool serve --help-all` lists all"),
    ('port = "80"', 'line 1: port = "80": must be a whole number'),
    ("port = true", "line 1: port = true: must be a whole number"),
    ("offline = 1", "line 1: offline = 1: must be true or false"),
    ("host = 1", "line 1: host = 1: must be a text in quotes"),
    ("port = 99999", "line 1: port = 99999: must be between 0 and 65535"),
    ('dtype = "float64"', 'line 1: dtype = "float64": must be one of auto, float32, bfloat16, float16'),
    ('memory-limit = "4 gigs"', 'line 1: memory-limit = "4 gigs": must be bytes with a unit, such as 3500M'),
    ("body-limit-mb = 0", "line 1: body-limit-mb = 0: must be between 0.001 and 2048"),
    ('allow-media-domain = ["a b"]', "line 1: allow-media-domain = 'a b': must be a host name"),
    ('cors-origin = "x"', "line 1: cors-origin = 'x': expected scheme://host"),
    ("api-key = 12345", 'line 1: api-key must be a list of texts, such as ["a", "b"]'),
    ('device = "cpu"\ndtype = "float16"', "line 2: dtype = 'float16': is for GPUs"),
    ('api-key-file = "/nope"', "line 1: api-key-file = '/nope': cannot be read"),
    ("models = 3", "line 1: models must be tables, each begun by [[models]]"),
    ('[[models]]\nmodel = "a"\nport = 3', "line 3: port is for all models; write it above the first [[models]]"),
    ('[[models]]\nmodel = "a"\ndevice = "cpu"', "line 3: device is for all models; write it above"),
    ('[[models]]\nmodel = "a"\n[[models]]\ndtype = "float32"', "[[models]] number 2 needs model"),
    ('model = "a"\n[[models]]\nmodel = "b"', "line 1: model stands beside [[models]]; keep one of them"),
    (
        'device = "cpu"\n[[models]]\nmodel = "a"\n[[models]]\nmodel = "b"\ndtype = "float16"',
        "line 6: dtype = 'float16'",
    ),
    ("port = \n", "pool.toml: is not TOML: Invalid value (at line 1, column 8)"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text.replace("\n", " ")[:40] for text, _ in WRONG])
def test_what_is_wrong_in_a_file_is_named_by_line_and_key(text: str, message: str, file: Path) -> None:
    file.write_text(text)
    result = run("--config", "pool.toml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: pool.toml")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "12345" not in result.stderr


def test_a_file_that_is_not_there_is_told() -> None:
    result = run("--config", "/no/such/file")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --config '/no/such/file': cannot be read (No such file or directory); name a TOML file\n",
    )


def test_a_wrong_model_of_the_file_is_named_by_its_line(file: Path) -> None:
    file.write_text('port = 0\n[[models]]\nmodel = "/nope"\n')
    result = CliRunner().invoke(cli.main, ["serve", "--config", "pool.toml"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: pool.toml, line 3: model = '/nope': there is no such folder")


def test_a_wrong_variable_is_named() -> None:
    result = run(STAGED_POOL_PORT="x")
    assert result.exit_code == 2
    assert "'--port' (env var: 'STAGED_POOL_PORT')" in result.stderr


def test_an_empty_variable_counts_as_not_set() -> None:
    assert settings(STAGED_POOL_PORT="", STAGED_POOL_OFFLINE="")["settings"]["port"]["source"] == "default"
