"""The journal gives back its whole records, however torn, and belongs to one job."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.bulk.journal import Journal
from staged_pool.api.bulk.ranges import Ranges
from staged_pool.stages.errors import ConfigError

JOB = {"input_bytes": 10, "model": "m"}


def test_a_journal_gives_back_what_was_recorded(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", JOB, resume=False) as journal:
        journal.checkpoint(Ranges([(0, 3), (5, 6)]), 1, {"output": 100})
        journal.checkpoint(Ranges([(3, 5)]), 2, {"output": 200})
    with Journal(tmp_path / "j", JOB, resume=True) as again:
        assert (list(again.done), again.failed, again.state, again.published) == ([(0, 6)], 2, {"output": 200}, False)
        assert again.id == journal.id
        again.publishing()
    with Journal(tmp_path / "j", JOB, resume=True) as last:
        assert last.published
        last.remove()
    assert not (tmp_path / "j").exists()


CHECKPOINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=6)


@given(CHECKPOINTS, st.data())
def test_a_torn_journal_has_the_whole_checkpoints(counts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Cut or damage the file anywhere behind its first record: the records before the damage count, and no more."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        ends, done, failed = [], 0, 0
        states: list[tuple[int, int]] = [(0, 0)]
        with Journal(path, JOB, resume=False) as journal:
            ends.append(path.stat().st_size)
            for lines, failures in counts:
                done, failed = done + lines, failed + failures
                journal.checkpoint(Ranges([(done - lines, done)]), failed, {"output": done * 7})
                ends.append(path.stat().st_size)
                states.append((done, failed))
        content = path.read_bytes()
        at = data.draw(st.integers(ends[0], ends[-1]))
        tail = data.draw(st.binary(max_size=40))
        damaged = content[:at] + tail
        path.write_bytes(damaged)
        kept = max(number for number, end in enumerate(ends) if damaged[:end] == content[:end])
        with Journal(path, JOB, resume=True) as again:
            assert (again.done.end, again.failed) == states[kept]
            assert path.stat().st_size == ends[kept]
            again.checkpoint(Ranges([(100, 101)]), 9, {})
        with Journal(path, JOB, resume=True) as last:
            assert 100 in last.done
            assert len(last.done) == states[kept][0] + 1


def test_a_journal_whose_first_record_is_torn_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"00000000 {")
    with Journal(tmp_path / "j", JOB, resume=True) as journal:
        assert (len(journal.done), journal.state) == (0, {})
    Journal(tmp_path / "j", JOB, resume=True).close()


@pytest.mark.parametrize("at", [0, 9, 20])
def test_a_journal_whose_first_line_is_damaged_is_an_error_that_says_what_to_do(tmp_path: Path, at: int) -> None:
    with Journal(tmp_path / "j", JOB, resume=False) as journal:
        journal.checkpoint(Ranges([(0, 3)]), 1, {"output": 100})
    content = bytearray((tmp_path / "j").read_bytes())
    content[at] ^= 1
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(ConfigError, match=r"is damaged in its first line, .* overwrite it to begin anew"):
        Journal(tmp_path / "j", JOB, resume=True)
    assert (tmp_path / "j").read_bytes() == content, "a copy may be compared with it"
    Journal.discard(tmp_path / "j")
    Journal(tmp_path / "j", JOB, resume=True).close()


class Short:
    """A file whose writes take a few bytes each."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: Any) -> int:
        return int(self._file.write(bytes(content)[:5]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_record_is_written_whole_however_little_a_write_takes(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", JOB, resume=False) as journal:
        journal._file = Short(journal._file)  # type: ignore[assignment]
        journal.checkpoint(Ranges([(0, 3)]), 1, {"output": 100})
        journal.checkpoint(Ranges([(3, 9)]), 2, {"output": 200})
    with Journal(tmp_path / "j", JOB, resume=True) as again:
        assert (list(again.done), again.failed, again.state) == ([(0, 9)], 2, {"output": 200})


def test_a_journal_of_another_job_is_an_error_that_says_what_differs(tmp_path: Path) -> None:
    Journal(tmp_path / "j", JOB, resume=False).close()
    with pytest.raises(ConfigError, match="belongs to another job: input_bytes was 10 and is 11; task was None"):
        Journal(tmp_path / "j", {**JOB, "input_bytes": 11, "task": "embed"}, resume=True)


def test_an_unfinished_job_is_an_error_without_resume(tmp_path: Path) -> None:
    Journal(tmp_path / "j", JOB, resume=False).close()
    with pytest.raises(ConfigError, match="resume that job, or overwrite it"):
        Journal(tmp_path / "j", JOB, resume=False)


def test_a_journal_is_open_in_one_place(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", JOB, resume=False):
        with pytest.raises(ConfigError, match="another process runs this job"):
            Journal(tmp_path / "j", JOB, resume=True)
        with pytest.raises(ConfigError, match="another process runs this job"):
            Journal.discard(tmp_path / "j")
    Journal.discard(tmp_path / "j")
    Journal.discard(tmp_path / "j")
    Journal(tmp_path / "j", {"other": 1}, resume=False).close()


def test_a_journal_in_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the journal cannot be opened: No such file"):
        Journal(tmp_path / "none" / "j", JOB, resume=True)
