"""Jobs by their files, which are checked and opened for a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Generic, Literal, Protocol, TypeAlias

import anyio
import anyio.to_thread

from staged_pool.api.bulk.batch_lines import BatchAnswer, BatchLine, batch_reader
from staged_pool.api.bulk.files import drop_parts, journal_of, publish
from staged_pool.api.bulk.job import Progress, Summary, Window, run_job
from staged_pool.api.bulk.journal import Identity, Journal, State
from staged_pool.api.bulk.lines_writer import LinesWriter
from staged_pool.api.bulk.parquet import ParquetReader, check_installed
from staged_pool.api.bulk.parts import A, A_contra, Answer, L, Reader, Work, Writer
from staged_pool.api.bulk.row_writers import NumpyWriter, ParquetWriter, errors_of
from staged_pool.api.bulk.text_file import LineReader
from staged_pool.api.bulk.texts import TextAnswer, TextLine, read_text_line
from staged_pool.stages.errors import ConfigError

Existing: TypeAlias = Literal["reject", "resume", "overwrite"]
"""Treatment of what an earlier run has left: an error, go on, or begin anew."""

TEXT_WINDOW: Final = Window(lines=2048, group_lines=64, group_size=32 * 2**10)
"""Window for texts, many of which share a request; see `text_window`."""

BATCH_WINDOW: Final = Window(lines=1024)
"""Window for lines that are requests."""


def text_window(items_each: int) -> Window:
    """Return the window for texts of each of which a model makes several items. It has as many items as for one."""
    lines, group = (max(1, most // max(1, items_each)) for most in (TEXT_WINDOW.lines, TEXT_WINDOW.group_lines))
    return replace(TEXT_WINDOW, lines=lines, group_lines=group)


@dataclass(frozen=True, slots=True)
class TextFormats:
    """Formats of a job of texts."""

    source: Literal["text", "parquet"]
    output: Literal["jsonl", "npy", "parquet"]
    column: str | None = None
    """Column of the texts in Parquet. None: `text`, or the only column of texts."""


@dataclass(frozen=True, slots=True)
class OpenJob(Generic[L, A]):
    """A job whose files are open."""

    reader: Reader[L]
    writer: Writer[A]
    journal: Journal
    output: Path
    errors: Path | None

    async def run(
        self,
        work: Work[L, A],
        *,
        window: Window,
        report: Callable[[Progress], None],
        stop: anyio.Event | None = None,
    ) -> Summary:
        """Run the job; see `run_job`."""
        return await run_job(self.reader, work, self.writer, self.journal, window=window, report=report, stop=stop)

    def drop_if_nothing_is_done(self) -> None:
        """Remove the files of a run that has done no line. Blocks."""
        if self.journal.is_open and not self.journal.done and not self.journal.published:
            self.writer.close()
            drop_parts(self.output, self.errors)
            self.journal.remove()


@asynccontextmanager
async def job_files(opening: Callable[[ExitStack], OpenJob[L, A]]) -> AsyncIterator[OpenJob[L, A]]:
    """Open the files of a job, in a thread, for the time of the block.

    Args:
        opening: Opens the files, and has the stack close them, such as a partial `open_batch`.
    """
    stack = ExitStack()
    try:
        job = await anyio.to_thread.run_sync(opening, stack)
        stack.callback(job.drop_if_nothing_is_done)
        yield job
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(stack.close)


def open_batch(
    stack: ExitStack, source: Path, output: Path, errors: Path | None, *, identity: Identity, existing: Existing
) -> OpenJob[BatchLine, BatchAnswer]:
    """Open a job of OpenAI's batch lines. Blocks.

    Args:
        stack: Closes the files.
        source: File of the lines.
        output: File of the answers. Until it is complete, `.part` and `.journal` files are beside it.
        errors: File of the answers that have failed. None: they go into `output`.
        identity: What the answers depend on, beside the input, such as the model.
        existing: Treatment of what an earlier run has left.

    Raises:
        ConfigError: A file cannot be used as asked.
    """
    reader = batch_reader(source)  # first: an input that cannot be read leaves no journal
    stack.callback(reader.close)
    journal = open_journal(stack, source, output, {"format": "batch", "errors": _named(errors), **identity}, existing)
    return OpenJob(reader, open_writer(stack, LinesWriter, output, errors, journal), journal, output, errors)


class OpensWriter(Protocol[A_contra]):
    """Class of a writer."""

    def __call__(self, output: Path, errors: Path | None, state: State) -> Writer[A_contra]: ...


def open_writer(
    stack: ExitStack, kind: OpensWriter[A], output: Path, errors: Path | None, journal: Journal
) -> Writer[A]:
    """Open the writer of a job at the state of its journal. Blocks.

    Raises:
        ConfigError: A file cannot be used as asked.
    """
    writer: Writer[A] = Published(output, errors) if journal.published else kind(output, errors, journal.state)
    stack.callback(writer.close)
    return writer


class Published:
    """Writer of a complete output, whose files only need their names."""

    def __init__(self, output: Path, errors: Path | None) -> None:
        self._output = output
        self._errors = errors

    def write(self, answers: Sequence[Answer]) -> None:
        """Raise an error: nothing is left to write."""
        raise RuntimeError("the output is complete")

    def sync(self) -> State:
        """Raise an error: nothing is left to sync."""
        raise RuntimeError("the output is complete")

    def complete(self, lines: int) -> None:
        """Do nothing: the output is complete."""

    def publish(self) -> None:
        """Give the files their names; see `Writer.publish`."""
        publish(self._output, self._errors)

    def close(self) -> None:
        """Do nothing: no file is open."""


def open_texts(
    stack: ExitStack,
    source: Path,
    output: Path,
    errors: Path | None,
    *,
    formats: TextFormats,
    identity: Identity,
    existing: Existing,
) -> OpenJob[TextLine, TextAnswer]:
    """Open a job of texts. Blocks.

    Args:
        stack: See `open_batch`.
        source: File of the texts.
        output: See `open_batch`.
        errors: See `open_batch`. An output of rows always has a file of errors.
        formats: Formats of the input and the output.
        identity: See `open_batch`.
        existing: See `open_batch`.

    Raises:
        ConfigError: A file cannot be used as asked.
    """
    if formats.output != "jsonl":
        errors = errors_of(output, errors)
    about = {
        "format": f"{formats.source} to {formats.output}",
        "column": formats.column,
        "errors": _named(errors),
        **identity,
    }
    if formats.output == "parquet":
        check_installed(output)
    reader: LineReader[TextLine] | ParquetReader = (
        ParquetReader(source, formats.column)
        if formats.source == "parquet"
        else LineReader(source, read_text_line, skip_blank=False)
    )
    stack.callback(reader.close)
    journal = open_journal(stack, source, output, about, existing)
    kinds: Mapping[str, OpensWriter[TextAnswer]] = {"jsonl": LinesWriter, "npy": NumpyWriter, "parquet": ParquetWriter}
    writer = open_writer(stack, kinds[formats.output], output, errors, journal)
    return OpenJob(reader, writer, journal, output, errors)


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def open_journal(stack: ExitStack, source: Path, output: Path, identity: Identity, existing: Existing) -> Journal:
    """Open the journal of a job, once its files are found to be usable. Blocks.

    Args:
        stack: Closes the journal.
        source: File of the input, which becomes a part of the identity.
        output: File of the output; the journal is beside it.
        identity: The rest of the identity.
        existing: Treatment of what an earlier run has left.

    Raises:
        ConfigError: The input cannot be read, or an earlier run has left files that do not fit.
    """
    try:
        about = source.stat()
    except OSError as error:
        raise ConfigError(f"{source}: the input cannot be read: {error.strerror}; name a file of texts") from error
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: there is no folder {output.parent}; make it first")
    if existing != "overwrite" and output.exists() and not journal_of(output).exists():
        raise ConfigError(f"{output}: the file exists; name another one, or overwrite it")
    whole = {"input_bytes": about.st_size, "input_mtime_ns": about.st_mtime_ns, **identity}
    if existing == "overwrite":
        # Under its lock: a job that runs is not overwritten.
        Journal.discard(journal_of(output))
    return stack.enter_context(Journal(journal_of(output), whole, resume=existing == "resume"))
