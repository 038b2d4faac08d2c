"""The first thing a newcomer runs."""

import re
import subprocess

from harness import binary


def test_the_demo_teaches_and_finds_every_bit_equal():
    finished = subprocess.run([binary(), "demo"], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    before, total, after = map(int, re.search(r"words right: (\d+) of (\d+) before, (\d+) of", finished.stdout).groups())
    assert after >= total * 3 // 4 > before, finished.stdout
    equal, compared = re.search(r"log-probabilities: ([\d,]+) of ([\d,]+) are equal", finished.stdout).groups()
    assert equal == compared


def test_a_demo_that_falls_short_fails():
    finished = subprocess.run([binary(), "demo", "--steps", "1"], capture_output=True, text=True, timeout=300)
    assert finished.returncode != 0 and "nothing was learned" in finished.stderr
