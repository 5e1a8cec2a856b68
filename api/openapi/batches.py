"""Operations of OpenAI's files and batches, and the types of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from staged_pool.api.addresses import CANCEL_BATCH, FILE_CONTENT, ONE_BATCH, ONE_FILE
from staged_pool.api.limits.uploads import BATCHES, FILES
from staged_pool.api.openapi.answers import AnswerSchema
from staged_pool.api.openapi.operation import Operation, get, post
from staged_pool.api.wire.batch_fields import BatchBody


class File(AnswerSchema):
    """One file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    """Unix time in seconds."""
    expires_at: int
    """Time at which it is deleted."""
    filename: str
    """Name that the client gave."""
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class Files(AnswerSchema):
    """Files of the client."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(AnswerSchema):
    """A file that is deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFault(AnswerSchema):
    """Reason why a batch failed."""

    code: str
    message: str
    line: int | None
    """Line of the input, from 1."""
    param: str | None


class BatchFaults(AnswerSchema):
    """Reasons why a batch failed."""

    object: Literal["list"]
    data: list[BatchFault]


class RequestCounts(AnswerSchema):
    """Numbers of requests."""

    total: int
    completed: int
    failed: int


class Batch(AnswerSchema):
    """One batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    """File of the answers, once the batch has ended."""
    error_file_id: str | None
    """File of the requests that failed or were not begun, once the batch has ended."""
    created_at: int
    expires_at: int
    """Time from which on no further request begins."""
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(AnswerSchema):
    """Batches of the client."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _page(most: int) -> dict[str, Mapping[str, object]]:
    """Return the parameters of a list, at most `most` objects of which are answered."""
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": most},
        "after": {"type": "string", "description": "Id of an object of the list: those behind it are returned."},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
    }


BATCH_OPERATIONS: Final[Mapping[str, Mapping[str, Operation]]] = {
    FILES: {
        **get("List files", "Batches", Files, query=_page(10_000) | {"purpose": {"enum": ["batch", "batch_output"]}}),
        "POST": Operation(
            summary="Upload a file",
            tag="Batches",
            text="A form with `purpose` (batch), `file` and, if wanted, `expires_after[anchor]` and "
            "`expires_after[seconds]`. At most 200 MiB.",
            answer=(File,),
            uploads=True,
        ),
    },
    ONE_FILE: {
        **get("One file", "Batches", File),
        "DELETE": Operation(summary="Delete a file", tag="Batches", answer=(DeletedFile,), conflicts=True),
    },
    FILE_CONTENT: get("Content of a file", "Batches", content_types=("application/octet-stream",)),
    BATCHES: {
        **get("List batches", "Batches", BatchList, query=_page(100)),
        **post(
            "Run a file of requests",
            "Batches",
            BatchBody,
            Batch,
            "Each line of the file is an object with `custom_id`, `method` (POST), `url` (the endpoint) and `body`.",
            examples={
                "embeddings": {
                    "input_file_id": "file-00000000000000000000000000000000",
                    "endpoint": "/v1/embeddings",
                    "completion_window": "24h",
                }
            },
        ),
    },
    ONE_BATCH: get("One batch", "Batches", Batch),
    CANCEL_BATCH: {"POST": Operation(summary="Cancel a batch", tag="Batches", answer=(Batch,))},
}
"""Operations of the routes that `--batch-dir` turns on."""
