"""Without Ray, the package says what to install."""

from __future__ import annotations

import subprocess
import sys


def test_an_import_without_ray_names_the_extra() -> None:
    code = "import sys; sys.modules['ray'] = None; import staged_pool.ray"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "ImportError: staged_pool.ray needs Ray Serve: pip install 'staged-pool[ray]'" in run.stderr
