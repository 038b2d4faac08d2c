"""Packed copies of base models: `--cache-dir`."""

import json
import os
import shutil
import signal
import subprocess
import time

import tinker
from tinker import types

from harness import API_KEY, ROOT, Server, binary, encode


def checkpoint(directory):
    """The embedded model as a checkpoint directory."""
    return shutil.copytree(ROOT / "assets/tiny-base", directory / "model")


def until(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def scores(server, name):
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        client = service.create_sampling_client(base_model=name)
        return client.compute_logprobs(types.ModelInput.from_ints(encode("The same numbers, twice over."))).result()


def test_a_second_start_uses_the_copy_and_has_the_same_numbers(tmp_path):
    model, copies = checkpoint(tmp_path), tmp_path / "copies"
    flags = [str(model), "--name", "org/model", "--cache-dir", str(copies)]
    with Server(tmp_path, *flags) as server:
        first = scores(server, "org/model")
        until(lambda: list(copies.glob("*.packed")), "no copy was written")
        (copy,) = copies.glob("*.packed")
    written = copy.stat()
    with Server(tmp_path, *flags) as server:
        assert scores(server, "org/model") == first
    assert copy.stat().st_ino == written.st_ino, "the copy was made again"

    # Overwritten in place, with one number another: the same name, size and times.
    weights = model / "model.safetensors"
    times, content = weights.stat(), bytearray(weights.read_bytes())
    middle = len(content) // 4 * 2
    content[middle : middle + 2] = b"\x80\x3f"
    with open(weights, "r+b") as file:
        file.write(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with Server(tmp_path, *flags) as server:
        assert scores(server, "org/model") != first
        until(lambda: copy.stat().st_ino != written.st_ino, "the copy was not made again")


def test_a_damaged_copy_is_found_and_a_directory_that_cannot_be_written_is_a_warning(tmp_path):
    model, copies = checkpoint(tmp_path), tmp_path / "copies"
    flags = [str(model), "--name", "org/model", "--cache-dir", str(copies)]
    with Server(tmp_path, *flags) as server:
        first = scores(server, "org/model")
        until(lambda: list(copies.glob("*.packed")), "no copy was written")
    (copy,) = copies.glob("*.packed")
    content = bytearray(copy.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    with Server(tmp_path, *flags) as server:
        assert scores(server, "org/model") == first
        assert "cannot be used" in server.log() and str(copy) in server.log()

    (tmp_path / "file").write_text("in the way")
    other = [str(model), "--name", "org/model", "--cache-dir", str(tmp_path / "file")]
    with Server(tmp_path, *other) as server:
        assert scores(server, "org/model") == first
        until(lambda: "no packed copy of the weights" in server.log(), "no warning")


def test_two_models_of_one_server_and_two_servers_at_once_share_a_directory(tmp_path):
    copies = tmp_path / "copies"
    models = []
    for name in "ab":
        (tmp_path / name).mkdir()
        models.append(str(checkpoint(tmp_path / name)))
    flags = [*models, "--name", "org/a", "--name", "org/b", "--cache-dir", str(copies)]
    with Server(tmp_path / "a", *flags) as one, Server(tmp_path / "b", *flags) as two:
        expected = scores(one, "org/a")
        assert all(scores(server, name) == expected for server in (one, two) for name in ("org/a", "org/b"))
        until(lambda: len(list(copies.glob("*.packed"))) == 2, "a copy for each place")
    written = {copy: copy.stat().st_ino for copy in copies.glob("*.packed")}
    with Server(tmp_path / "a", *flags) as server:
        assert scores(server, "org/a") == scores(server, "org/b") == expected
    assert {copy: copy.stat().st_ino for copy in copies.iterdir()} == written, "copies were made again, or left half"


def test_who_ends_while_a_copy_is_written_leaves_nothing_of_it(tmp_path):
    # So large that it is not written while the server ends.
    config = json.loads((ROOT / "assets/tiny-base/config.json").read_text()) | {"vocab_size": 1 << 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, copies = tmp_path / "model", tmp_path / "copies"
    command = [binary(), "init-model", str(model), "--config", str(tmp_path / "config.json")]
    subprocess.run(command, check=True, capture_output=True)

    def begun():
        return copies.exists() and list(copies.iterdir())

    with Server(tmp_path, str(model), "--cache-dir", str(copies)):
        until(begun, "no copy was begun")
    assert list(copies.iterdir()) == []

    (tmp_path / "tokens.json").write_text("[[1, 2]]")
    files = ["--tokens", str(tmp_path / "tokens.json"), "--out", str(tmp_path / "out")]
    trace = subprocess.Popen([binary(), "trace", str(model), *files, "--cache-dir", str(copies)], stderr=subprocess.DEVNULL)
    until(begun, "no copy was begun")
    trace.send_signal(signal.SIGINT)
    assert trace.wait(timeout=20) == 128 + signal.SIGINT
    assert list(copies.iterdir()) == []
