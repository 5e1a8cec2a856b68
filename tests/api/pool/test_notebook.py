"""A notebook of Jupyter with a pool: the kernel's event loop runs in the thread of the cells."""

from __future__ import annotations

import os
import sys

import pytest

CELLS = (
    "import asyncio, staged_pool, threading",
    "pool = staged_pool.Pool(backend={backend!r}); pool.embed('a text').embeddings.shape",
    "await asyncio.sleep(0); pool.encode(['a', 'b'], show_progress_bar=True).shape",
    "pool = staged_pool.Pool(backend={backend!r}).open(); pool.encode('a').shape",  # the cell is run again
    "sum(thread.name == 'staged-pool event loop' for thread in threading.enumerate())",
    "sum(index for index, _ in pool.embed_stream(f'text {{n}}' for n in range(600)))",
)
SHOWN = ("(1, 384)", "(2, 384)", "(384,)", "1", str(sum(range(600))))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
def test_cells_of_a_notebook_share_a_pool(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}")
    cells = [nbformat.v4.new_code_cell(cell.format(backend=backend)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    results = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert tuple(results) == SHOWN
    assert not [output for cell in notebook.cells for output in cell.outputs if output.get("name") == "stdout"]
