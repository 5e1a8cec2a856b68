"""Flags of `run-batch` as one checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from staged_pool.runtime import arguments
from staged_pool.runtime.requests import HYPOTHESIS
from staged_pool.stages.errors import ConfigError, InvalidInput

InputFormat: TypeAlias = Literal["batch", "text", "parquet"]
OutputFormat: TypeAlias = Literal["jsonl", "npy", "parquet"]
Existing: TypeAlias = Literal["reject", "resume", "overwrite"]

_INPUT_SUFFIXES: Final[Mapping[str, InputFormat]] = {".jsonl": "batch", ".ndjson": "batch", ".parquet": "parquet"}
_OUTPUT_SUFFIXES: Final[Mapping[str, OutputFormat]] = {".npy": "npy", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The job that the flags ask for."""

    source: Path
    output: Path
    errors: Path | None
    source_format: InputFormat
    output_format: OutputFormat
    column: str | None
    existing: Existing
    task: str
    dimensions: int | None
    prompt_name: str | None
    candidate_labels: tuple[str, ...] | None
    hypothesis_template: str
    multi_label: bool
    truncate: bool
    url: str | None
    api_key: str | None
    concurrency: int
    model: str | None

    @property
    def classifies(self) -> bool:
        """True if texts get the scores of labels, and not vectors."""
        return self.task == "classify"

    @property
    def items_each(self) -> int:
        """Items that a model makes of one text: a pair with each candidate label, or the text itself."""
        return len(self.candidate_labels or ("",))

    def identity(self) -> Mapping[str, Any]:
        """Return everything that the answers depend on."""
        texts = {"dimensions": self.dimensions, "prompt_name": self.prompt_name, "truncate": self.truncate}
        # Only where they are given: a job that an earlier version has begun can be resumed.
        labels = {
            "candidate_labels": list(self.candidate_labels or ()),
            "hypothesis_template": self.hypothesis_template,
            "multi_label": self.multi_label,
        }
        return {
            "model": self.model,
            "task": self.task,
            "url": self.url,
            **({} if self.source_format == "batch" else texts),
            **({} if self.candidate_labels is None else labels),
        }

    @staticmethod
    def of(given: Mapping[str, Any], model: str | None) -> Batch:
        """Make the job of the values of the flags, by their names.

        Raises:
            ConfigError: Flags do not fit together.
        """
        source, output = given["input"], given["output"]
        source_format = given["input_format"] or _INPUT_SUFFIXES.get(source.suffix, "text")
        output_format = given["format"] or _OUTPUT_SUFFIXES.get(output.suffix, "jsonl")
        if given["resume"] and given["overwrite"]:
            raise ConfigError("--resume goes on with a job, and --overwrite begins anew; give one of them")
        if source_format == "batch" and output_format != "jsonl":
            raise ConfigError(f"format={output_format!r}: lines that are requests give lines of JSON; write jsonl")
        if given["column"] is not None and source_format != "parquet":
            raise ConfigError("--column: only an input in Parquet has columns")
        batch = Batch(
            source=source,
            output=output,
            errors=given["errors"],
            source_format=source_format,
            output_format=output_format,
            column=given["column"],
            existing="resume" if given["resume"] else "overwrite" if given["overwrite"] else "reject",
            task=given["task"],
            dimensions=given["dimensions"],
            prompt_name=given["prompt_name"],
            candidate_labels=arguments.candidate_labels(given["candidate_labels"]),
            hypothesis_template=given["hypothesis_template"],
            multi_label=given["multi_label"],
            truncate=given["truncate"],
            url=given["url"],
            api_key=given["api_key"],
            concurrency=given["concurrency"],
            model=model,
        )
        batch.check()
        return batch

    def check(self) -> None:
        """Check the values that only some jobs have.

        Raises:
            ConfigError: A value is of no use for this job.
        """
        of_vectors = {"--dimensions": self.dimensions, "--prompt-name": self.prompt_name}
        of_labels = {
            "--candidate-labels": self.candidate_labels,
            "--hypothesis-template": None if self.hypothesis_template == HYPOTHESIS else self.hypothesis_template,
            "--multi-label": self.multi_label or None,
        }
        of_texts = {**of_vectors, **of_labels, "--truncate": self.truncate or None}
        for flag, value in of_texts.items():
            if value is not None and self.source_format == "batch":
                raise ConfigError(f"{flag}: a line that is a request says this in its body")
            if value is not None and self.classifies and flag in of_vectors:
                raise ConfigError(f"{flag}: only vectors have it; --task classify gives scores of labels")
            if value is not None and not self.classifies and flag in of_labels:
                raise ConfigError(f"{flag}: only labels have it; write --task classify, too")
            if value is not None and self.candidate_labels is None and flag in of_labels:
                raise ConfigError(f"{flag}: is for --candidate-labels, which are missing")
        if self.classifies and self.source_format == "batch":
            raise ConfigError("task='classify': a line that is a request says this by its url, /classify")
        self._check_labels()
        if self.errors is not None and self.errors.absolute() == self.output.absolute():
            raise ConfigError(f"--errors {self.errors}: it is the output; without the flag, errors go there")
        if self.source.absolute() in {self.output.absolute(), self.errors and self.errors.absolute()}:
            raise ConfigError(f"--input {self.source}: it would be overwritten by the output")

    def _check_labels(self) -> None:
        if self.candidate_labels is None:
            return
        from staged_pool.runtime.tasks import zero_shot  # numpy, which a help page does without

        try:
            zero_shot.check(self.candidate_labels, self.hypothesis_template)
        except InvalidInput as error:
            flag = "--hypothesis-template" if error.param == "hypothesis_template" else "--candidate-labels"
            raise ConfigError(f"{flag}: {error}") from None
