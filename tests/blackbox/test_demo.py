"""The first thing a newcomer runs."""

import os
import re
import signal
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


def test_an_interrupted_demo_leaves_nothing(tmp_path):
    process = subprocess.Popen([binary(), "demo", "--steps", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    # Its server has begun once it says so.
    assert "serves" in process.stdout.readline()
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT and error.endswith("error: interrupted\n"), error
    assert not list(tmp_path.iterdir())
