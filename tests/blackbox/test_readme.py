"""The README's Python runs as it stands."""

import os
import re

from harness import ROOT, run_client


def test_the_training_loop_of_the_readme_runs(server):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "the README has a Python block"
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local"}
    printed = run_client("-c", blocks[0], env=environment).stdout
    assert "ench-wray" in printed, printed
