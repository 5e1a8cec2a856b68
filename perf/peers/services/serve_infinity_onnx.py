"""Infinity's command line on the ONNX engine, which its documentation names for CPUs.

The model is exported first, once, by optimum: the folder of the sentence-transformers model has no ONNX file. What
Infinity 0.0.78 then hands to optimum is the file's whole path, which optimum looks for inside of the folder and does
not find; so it is given the path as seen from the folder.
"""

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from infinity_emb.cli import cli
from infinity_emb.transformer.embedder import optimum as embedder

_get_onnx_files = embedder.get_onnx_files


def relative_onnx_file(**settings: Any) -> Path:
    """Infinity's own choice of the file, seen from the model's folder."""
    file: Path = _get_onnx_files(**settings)
    return file.relative_to(settings["model_name_or_path"])


def exported(folder: Path, to: Path) -> Path:
    """A folder with the model as ONNX; made unless it is there already."""
    import torch
    from optimum.exporters.onnx import main_export

    if not (to / "model.onnx").exists():
        torch.onnx.export = partial(torch.onnx.export, dynamo=False)  # the exporter that this optimum is written for
        unfinished = to.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        main_export(str(folder), output=unfinished, task="feature-extraction", library_name="transformers")
        unfinished.rename(to)
    return to


if __name__ == "__main__":
    onnx_folder = exported(Path(os.environ["PEER_MODEL"]), Path(os.environ["PEER_ONNX"]))
    embedder.get_onnx_files = relative_onnx_file
    sys.argv = ["infinity_emb", "v2", "--model-id", str(onnx_folder), "--engine", "optimum", *sys.argv[1:]]
    cli()
