"""The examples, as a stranger runs them."""

import re
import subprocess
import sys
import xml.etree.ElementTree

from harness import ROOT, binary


def test_a_random_model_learns_the_colour_of_a_square(tmp_path, monkeypatch):
    monkeypatch.setenv("STRATA_BINARY", binary())
    example = ROOT / "examples/colour_of_a_square/colour_of_a_square.py"
    plot = tmp_path / "plot.svg"
    command = [sys.executable, str(example), "--steps", "400", "--plot", str(plot)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    right, total = map(int, re.search(r"pictures right: (\d+) of (\d+)", finished.stdout).groups())
    assert total >= 200 and right > 0.9 * total, finished.stdout
    before = re.search(r"^ +0 .* (\d+)%$", finished.stdout, re.MULTILINE)
    assert int(before.group(1)) < 40, finished.stdout
    xml.etree.ElementTree.parse(plot)
