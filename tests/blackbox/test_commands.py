"""What commands do where whoever runs them stops, does not listen, or asks for too much."""

import json
import os
import pathlib
import resource
import signal
import socket
import stat
import subprocess
import threading
import time

import pytest

from harness import binary

FIXTURE = pathlib.Path(__file__).parents[1] / "reference/fixtures/tied_gqa3_f32"


def run(*arguments, **options):
    return subprocess.run([binary(), *map(str, arguments)], **{"capture_output": True, "text": True, "timeout": 60} | options)


def leftovers(directory):
    return sorted(path.name for path in directory.glob(".*.partial-*"))


def begin_long_write(out):
    """A command that writes a directory for seconds, and has begun to."""
    process = subprocess.Popen([binary(), "init-model", "--shape", "qwen3-0.6b", out], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not list(out.parent.glob(f".{out.name}.partial-*/model.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    return process


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_and_leaves_nothing_half_written(tmp_path, how):
    """Not the parents that were made for it either; a neighbour stays."""
    (tmp_path / "new").mkdir()
    process = begin_long_write(tmp_path / "new/a/b/model")
    process.send_signal(how)
    _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (128 + how, "error: interrupted\n")
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


def test_whenever_a_signal_comes_a_directory_is_there_whole_or_not_at_all(tmp_path):
    """A small model takes some milliseconds: the signal comes before, while and after it is written."""
    ends = set()
    for i in range(60):
        out = tmp_path / f"{i}/model"
        process = subprocess.Popen(
            [binary(), "init-model", "--config", FIXTURE / "model/config.json", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(0.0005 * (i % 30))
        process.send_signal(signal.SIGTERM)
        said, error = process.communicate(timeout=20)
        ends.add(process.returncode)
        if process.returncode == 0:
            assert (out / "model.safetensors").is_file() and str(out) in said and not error
        else:
            # The system ends it itself where it does not listen yet.
            assert error == ("error: interrupted\n" if process.returncode == 128 + signal.SIGTERM else ""), error
            assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
        assert not out.parent.exists() or [path.name for path in out.parent.iterdir()] == ["model"]
    assert len(ends) > 1, ends


def test_a_command_that_is_to_ignore_ctrl_c_does(tmp_path):
    """As one that a script runs in the background."""
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = begin_long_write(tmp_path / "model")
    finally:
        signal.signal(signal.SIGINT, inherited)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0 and (tmp_path / "model/model.safetensors").is_file()


@pytest.mark.parametrize("command", [["inspect", "/nonexist"], ["export", "/nonexist", "out", "--format", "peft"]], ids=lambda c: c[0])
def test_an_error_that_nobody_reads_is_an_error_all_the_same(command):
    assert run(*command, capture_output=False, stdout=subprocess.PIPE, stderr=open("/dev/full", "w")).returncode == 1


def test_what_a_killed_command_left_goes_with_the_next(tmp_path):
    out = tmp_path / "model"
    process = begin_long_write(out)
    process.kill()
    process.wait()
    assert len(leftovers(tmp_path)) == 1
    beside = begin_long_write(tmp_path / "beside")
    assert len(leftovers(tmp_path)) == 2, "what is written under another name is another's"
    assert run("init-model", "--config", FIXTURE / "model/config.json", out).returncode == 0
    assert all(name.startswith(".beside.") for name in leftovers(tmp_path)) and out.is_dir()
    beside.send_signal(signal.SIGINT)
    beside.wait(timeout=20)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_have_the_modes_that_other_files_have(tmp_path):
    out = tmp_path / "model"
    assert run("init-model", "--config", FIXTURE / "model/config.json", out, umask=0o022).returncode == 0
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in out.iterdir()}
    assert set(modes.values()) == {"-rw-r--r--"}, modes


@pytest.mark.parametrize("command", [["inspect", FIXTURE / "model"], ["bench", "limits", "--json"]], ids=lambda c: c[0])
def test_output_that_nobody_takes_is_no_panic(command):
    full = run(*command, capture_output=False, stdout=open("/dev/full", "w"), stderr=subprocess.PIPE)
    assert full.returncode == 1 and "error: writing to standard output: No space left on device" in full.stderr
    reader, writer = os.pipe()
    os.close(reader)
    closed = run(*command, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert closed.returncode == 141 and "error" not in closed.stderr and "panicked" not in closed.stderr


def test_a_trace_goes_where_its_path_leads(tmp_path):
    """Through a link, into a pipe; and what is there is written to, not replaced."""

    def trace(out):
        done = run("trace", FIXTURE / "model", "--tokens", FIXTURE / "tokens.json", "--out", out)
        assert done.returncode == 0, done.stderr

    plain, target, link, pipe = (tmp_path / name for name in ["plain", "target", "link", "pipe"])
    trace(plain)
    target.write_text("old")
    link.symlink_to(target)
    trace(link)
    assert link.is_symlink() and target.read_bytes() == plain.read_bytes()
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    trace(pipe)
    reader.join(timeout=20)
    assert read == [plain.read_bytes()] and pipe.is_fifo()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", "--threads", 2**64 - 1], "--threads 18446744073709551615 is more than 1024"),
        (["bench", "train", "--threads", 1_000_000], "--threads 1000000 is more than 1024"),
        (["bench", "train", "--adapters", 2**63 - 1], "--adapters 9223372036854775807 is more than 65536"),
        (["bench", "matmul", "--tokens", 10**9], "--tokens 1000000000 is above"),
        (["bench", "matmul", "--tokens", 2**64 - 1], "--tokens 18446744073709551615 is above"),
        (
            ["trace", FIXTURE / "model", "--tokens", FIXTURE / "tokens.json", "--out", "/dev/null", "--greedy", 2**64 - 1],
            "--greedy 18446744073709551615 is more than",
        ),
        (["serve", "--api-key", "tml-"], "--api-key must have something behind"),
        (["serve", "--api-key", "tml-é"], "--api-key must have something behind"),
    ],
)
def test_what_no_machine_has_is_refused_by_name(tmp_path, arguments, sentence):
    if arguments[0] == "serve":
        arguments = [*arguments, "--port", 0, "--data-dir", tmp_path]
    done = run(*arguments)
    assert done.returncode == 1 and sentence in done.stderr and "panicked" not in done.stderr, done.stderr


def test_more_connections_than_files_are_refused(tmp_path):
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (220, 220))
    done = run("serve", "--port", 0, "--data-dir", tmp_path, "--max-connections", 100_000, preexec_fn=few)
    assert done.returncode == 1 and "--max-connections 100000 is more than the 92 for which" in done.stderr, done.stderr


def test_tokens_that_are_none_are_named(tmp_path):
    for tokens in [[[1, "a"]], [[-1]], [[1.5]]]:
        path = tmp_path / "tokens.json"
        path.write_text(json.dumps(tokens))
        done = run("trace", FIXTURE / "model", "--tokens", path, "--out", tmp_path / "out")
        assert done.returncode == 1 and "neither a token id" in done.stderr, done.stderr


def test_a_write_beyond_a_limit_on_file_sizes_is_an_error_and_leaves_nothing(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

    done = run("init-model", "--shape", "qwen3-0.6b", tmp_path / "model", preexec_fn=limit)
    assert done.returncode == 1 and "File too large" in done.stderr, (done.returncode, done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_value_of_the_environment_that_is_refused_is_said_to_be_one(tmp_path):
    done = run("serve", "--data-dir", tmp_path, env=os.environ | {"STRATA_MEMORY": "much"})
    assert done.returncode == 2 and "'much' for '--memory <BYTES>, which the environment sets as STRATA_MEMORY'" in done.stderr, done.stderr
    done = run("serve", "--data-dir", tmp_path, "--memory", "more", env=os.environ | {"STRATA_MEMORY": "1GiB"})
    assert done.returncode == 2 and "'more' for '--memory <BYTES>':" in done.stderr, done.stderr


def test_a_port_in_use_is_said_before_a_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("serve", "--data-dir", tmp_path / "data", "--port", taken.getsockname()[1])
    assert done.returncode == 1 and f"listening on {address}" in done.stderr and "in use" in done.stderr, done.stderr
    assert "engine starts" not in done.stderr


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = run("inspect", tmp_path / "config.json")
    assert done.returncode == 1 and "config.json" in done.stderr and "is a file; name the directory" in done.stderr, done.stderr


def test_a_configuration_that_is_wrong_is_named_by_its_path(tmp_path):
    (tmp_path / "mine.json").write_text('{"model_type": "gpt2"}')
    done = run("init-model", "--config", tmp_path / "mine.json", tmp_path / "model")
    assert done.returncode == 1 and "mine.json" in done.stderr and 'model_type "gpt2"' in done.stderr, done.stderr


def test_a_shape_or_a_config_will_do_and_is_needed(tmp_path):
    done = run("init-model", tmp_path / "model")
    assert done.returncode == 2 and "--shape" in done.stderr and "--config" in done.stderr, done
