"""The README's Python runs as it stands."""

import os
import re
import subprocess
import sys

from harness import ROOT


def test_the_training_loop_of_the_readme_runs(server):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "the README has a Python block"
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local"}
    finished = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True, timeout=120, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert "ench-wray" in finished.stdout, finished.stdout
