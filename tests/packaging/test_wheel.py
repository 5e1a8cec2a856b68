"""The wheel holds every module of the tree, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = {"stages": "staged_pool/stages", "runtime": "staged_pool/runtime", "api": "staged_pool/api"}


def test_the_wheel_holds_what_the_tree_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    python = ROOT / "api" / "python"
    expected = {f"staged_pool/{path.name}" for path in [*python.glob("*.py"), python / "py.typed"]}
    for folder, place in PLACES.items():
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.html")]:
            if python not in path.parents:
                expected.add(f"{place}/{path.relative_to(ROOT / folder).as_posix()}")
    assert found == expected
    assert licences
