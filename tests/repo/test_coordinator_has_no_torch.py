"""The coordinator's process stays light: no torch, no Ray, no transformers."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import sys
import coordinator.__main__, coordinator.api.app, coordinator.coordinator, coordinator.service
print([name for name in ("torch", "ray", "transformers") if name in sys.modules])
"""


def test_the_coordinator_imports_neither_torch_nor_ray_nor_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
