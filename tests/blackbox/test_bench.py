"""How cost grows, as a user measures and draws it. Nothing here looks at how fast it was."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from harness import ROOT, binary

AXES = {
    "train": ["batch", "length", "rank", "adapters", "layers"],
    "prefill": ["length"],
    "decode": ["batch", "length", "rank", "adapters", "layers"],
}
SVG = "{http://www.w3.org/2000/svg}"
PLOT = ROOT / "docs/plot_scaling.py"


def plot(*arguments):
    return subprocess.run([sys.executable, str(PLOT), *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def printed():
    command = [binary(), "bench", "all", "--quick", "--json", "--memory", "1GiB", "--threads", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_every_axis_is_measured_and_held_against_the_limits(printed):
    found = json.loads(printed)
    assert found["benchmark"] == "all" and found["shape"] == "strata/tiny-base" and found["dtype"] == "bf16" and found["threads"] == 2
    assert found["version"] and found["machine"]["cores"] > 0 and found["machine"]["memory_bytes"] > 0
    assert found["settings"]["layers"] == 2 and found["settings"]["layers_of_shape"] == 5
    left_out = {(of["work"], of["axis"]): of["reason"] for of in found["left_out"]}
    # A decode step of so small a model may drown in noise, and nothing else may be left out.
    assert all(work == "decode" and "too few to time their steps" in reason for (work, _), reason in left_out.items())
    assert [(curve["work"], curve["axis"]) for curve in found["curves"]] == [(work, axis) for work in AXES for axis in AXES[work]]
    gflop_per_s, gb_per_s = found["limits"]["fastest"]["gflop_per_s"], found["limits"]["read_gb_per_s"]
    for curve in found["curves"]:
        points = curve["points"]
        assert len(points) > 1 or (curve["work"], curve["axis"]) in left_out
        name = {"batch": "batch", "length": "tokens"}.get(curve["axis"], curve["axis"])
        assert all(point["x"] == point[name] for point in points)
        for point in points:
            tokens = point["batch"] * (1 if curve["work"] == "decode" else point["tokens"])
            assert point["tokens_per_s"] == pytest.approx(tokens / point["seconds"])
            needs = {"arithmetic": point["flops"] / gflop_per_s / 1e9, "bandwidth": point["bytes"] / gb_per_s / 1e9}
            assert point["bound"] == max(needs, key=needs.get)
            for limit, seconds in needs.items():
                assert point[f"fraction_of_{limit}"] == pytest.approx(seconds / point["seconds"])
            assert point["fraction_of_limit"] == pytest.approx(max(needs.values()) / point["seconds"])
            assert point["limit_tokens_per_s"] == pytest.approx(tokens / max(needs.values()))
            assert point["passes"] > 0 and point["peak_memory_bytes"] > 0


def bench(*arguments):
    return subprocess.run([binary(), "bench", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_the_peak_of_memory_is_that_of_the_work_and_not_of_the_measurement_of_limits():
    """Memory is read in a buffer of 1 GiB, or an eighth of what there is, before and after each decode."""
    flags = ["--shape", "strata/tiny-base", "--json", "--memory", "128MiB", "--threads", 2]
    of_sample = json.loads(bench("sample", *flags, "--prompt", 64, "--batch", 1, "--new", 8, "--repeats", 2).stdout)
    (peak,) = of_sample["peak_memory_bytes"]
    assert 10 << 20 < peak["bytes"] < 256 << 20, peak


@pytest.mark.parametrize("arguments", [("limits", "--layers", 3), ("limits", "--quantize", "int4"), ("limits", "--compare", "python3"), ("delta", "--quantize", "int8")])
def test_a_flag_that_would_change_nothing_is_refused_by_name(arguments):
    done = bench(*arguments)
    assert done.returncode == 1 and f"error: {arguments[1]} is of" in done.stderr, done.stderr


def test_limits_are_of_a_shape_that_there_is():
    done = bench("limits", "--shape", "nope")
    assert done.returncode == 1 and 'shape "nope" is not known' in done.stderr, done.stderr


def test_what_was_measured_is_drawn(printed, tmp_path):
    (tmp_path / "found.json").write_text(printed)
    done = plot(tmp_path / "found.json", tmp_path / "found.svg")
    assert done.returncode == 0, done.stderr
    curves = [curve for curve in json.loads(printed)["curves"] if curve["points"]]
    picture = ElementTree.parse(tmp_path / "found.svg").getroot()
    assert len(picture.findall(f"{SVG}polyline")) == 2 * len(curves)
    assert len(picture.findall(f"{SVG}circle")) == sum(len(curve["points"]) for curve in curves)
    lines = done.stdout.splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {w.replace('train', 'training')} by {axis}" for w in AXES for axis in AXES[w]]


def test_the_picture_in_the_documentation_is_that_of_its_numbers(tmp_path):
    found, picture = ROOT / "docs/scaling.json", tmp_path / "scaling.svg"
    done = plot(found, picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_text() == (ROOT / "docs/scaling.svg").read_text()
    assert done.stdout in (ROOT / "docs/bench.md").read_text()


def test_what_is_no_such_measurement_is_not_drawn(tmp_path):
    (tmp_path / "other.json").write_text('{"benchmark": "train"}')
    done = plot(tmp_path / "other.json", tmp_path / "other.svg")
    assert done.returncode == 2 and "holds benchmark 'train'" in done.stderr
    assert not (tmp_path / "other.svg").exists()
