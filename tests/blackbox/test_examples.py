"""The examples, as a stranger runs them."""

import re
import xml.etree.ElementTree

from harness import ROOT, binary, run_client


def test_a_random_model_learns_the_colour_of_a_square(tmp_path, monkeypatch):
    monkeypatch.setenv("STRATA_BINARY", binary())
    example = ROOT / "examples/colour_of_a_square/colour_of_a_square.py"
    plot = tmp_path / "plot.svg"
    printed = run_client(example, "--steps", 400, "--plot", plot, timeout=600).stdout
    right, total = map(int, re.search(r"pictures right: (\d+) of (\d+)", printed).groups())
    assert total >= 200 and right > 0.9 * total, printed
    before = re.search(r"^ +0 .* (\d+)%$", printed, re.MULTILINE)
    assert int(before.group(1)) < 40, printed
    xml.etree.ElementTree.parse(plot)
