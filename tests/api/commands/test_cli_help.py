"""Help pages, shell completion and the reference page, which are made of the settings table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from staged_pool.api.commands import cli, reference
from staged_pool.api.commands.options import SettingOption, SettingsCommand
from staged_pool.api.commands.table import every_setting
from staged_pool.runtime.engine.agreement import SHARED_SETTINGS
from staged_pool.runtime.settings import SettingField
from tests.packaging.documents import every_command
from tests.packaging.writing import SENTENCE_WORDS, sentences, words

ROOT = Path(__file__).parents[3]
COMMANDS = sorted(" ".join(path) for path, command in every_command() if isinstance(command, SettingsCommand))
EVERY_COMMAND = sorted(" ".join(path) for path, _ in every_command())
SETTINGS = list(every_setting())


def output(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(cli.main, arguments, terminal_width=columns, prog_name="staged-pool")
    assert result.exit_code == 0, result.output
    return result.output


def test_the_help_of_serve_is_short_and_says_how_to_see_the_rest() -> None:
    lines = output("serve", "--help").splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert "`staged-pool serve --help-all` explains all flags" in "\n".join(lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_full_help_explains_every_flag(command: str) -> None:
    page = output(*command.split(), "--help-all")
    params = dict(every_command())[tuple(command.split())].params
    flags = [param.row.flag for param in params if isinstance(param, SettingOption)]
    assert [flag for flag in flags if f"\n  {flag} " not in page and f"\n  {flag}\n" not in page] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_environment_names_are_stated_once(command: str) -> None:
    for page in (output(*command.split(), "--help"), output(*command.split(), "--help-all")):
        assert page.count("STAGED_POOL_") == 2  # the rule, and one example of it


@pytest.mark.parametrize("arguments", [command.split() for command in ["", *EVERY_COMMAND]], ids=["", *EVERY_COMMAND])
def test_the_short_flag_of_help_works_everywhere(arguments: list[str]) -> None:
    assert output(*arguments, "-h") == output(*arguments, "--help")


@pytest.mark.parametrize("row", SETTINGS, ids=[row.name for row in SETTINGS])
def test_a_help_text_is_plain(row: SettingField) -> None:
    text = f"{row.about.help} {row.about.more}".strip()
    assert row.about.help.endswith(".")
    assert [each for each in sentences(text) if words(each) > SENTENCE_WORDS] == []
    assert words(next(sentences(row.about.help))) <= 20
    assert not text.startswith(("Whether", "What", "How", "Of ", "Which"))


def test_the_program_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "staged_pool", "-h"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("Usage: python -m staged_pool")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom staged_pool.api.commands.cli import main\n"
        "main(['serve', '--help'], standalone_mode=False)\n"
        "print({'torch', 'transformers', 'httpx', 'hypercorn', 'starlette', 'typer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("set()\n")


_COMPLETED = """
export PATH="$1:$PATH"
eval "$(staged-pool --show-completion bash)"
shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_staged_pool_completion staged-pool
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        (["staged-pool", "se"], ["serve"]),
        (["staged-pool", "serve", "--max-batch"], ["--max-batch-tokens", "--max-batch-items"]),
        (["staged-pool", "embed", "--dtype", "b"], ["bfloat16"]),
        (["staged-pool", "serve", "--config", "/no/such/file", "--backend", "t"], ["trio"]),
    ],
)
def test_bash_completes(typed: list[str], completions: list[str], tmp_path: Path) -> None:
    program = tmp_path / "staged-pool"
    program.write_text(f"#!{sys.executable}\nfrom staged_pool.api.commands.cli import main\nmain()\n")
    program.chmod(0o755)
    command = ["bash", "-c", _COMPLETED, "bash", str(tmp_path), *typed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (completions, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str) -> None:
    assert "_STAGED_POOL_COMPLETE" in output("--show-completion", shell)


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert page == reference.updated(page), "run: python -m staged_pool.api.commands.reference docs/configuration.md"


def test_shared_settings_are_those_that_models_must_agree_on() -> None:
    assert {row.name for row in SETTINGS if row.about.shared} == {*SHARED_SETTINGS}
