"""Uploads: requests whose body goes to the disk while it arrives, and is never in memory as a whole."""

from __future__ import annotations

from typing import Final

FILES: Final = "/v1/files"
"""Path of uploads, and of the list of files."""

BATCHES: Final = "/v1/batches"
"""Path of batches."""

FILE_BYTES: Final = 200 * 2**20
"""Maximum bytes of one file, as at OpenAI."""

UPLOAD_BYTES: Final = FILE_BYTES + 2**16
"""Maximum bytes of the body of an upload: a file, and the rest of its form."""

PROGRESS_BYTES: Final = 2**16
"""Bytes that must arrive within each body timeout."""
