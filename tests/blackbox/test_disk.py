"""What is on the disk after signals, kills and failures, and who may have a data directory."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import time

import pytest

from harness import Server, binary, encode, free_port
from wire import Wire, floats, fwdbwd, next_token_datum

DATUM = next_token_datum(encode("the quick brown fox jumps over the lazy dog"))
# How many kills have to come while a save is being written, and how many are tried for that.
KILLS = 6
ROUNDS_MAX = 60


def save(wire, model_id, seq_id, name, **more):
    """Asks for a save; the id of its future. Does not wait for it."""
    body = {"model_id": model_id, "seq_id": seq_id, "path": name, "type": "save_weights"} | more
    return wire.ok("save_weights", body)["request_id"]


def saved(wire):
    """Everything that is listed: its metadata by path."""
    listed = wire.get("checkpoints", params={"limit": 1000}).json()["checkpoints"]
    return {c["tinker_path"]: c.get("user_metadata") or {} for c in listed}


def load(wire, session, number, path):
    """A new model from a training checkpoint, optimizer included; its id."""
    body = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": True, "type": "load_weights"}
    answer = wire.result(wire.ok("load_weights", body)["request_id"])
    assert "error" not in answer, answer
    return answer["model_id"]


def logprobs(wire, model_id, seq_id=1):
    return [a.tobytes() for a in floats(wire.forward_backward(fwdbwd(model_id, seq_id, [DATUM], forward_only=True)))]


def on_disk(server, pattern):
    return list((server.directory / "data/checkpoints").glob(f"*/weights/{pattern}"))


def kill_while_saving(server, rng, pattern, saves_end):
    """Kills the server at a random moment of its saves, from when the first is begun; whether it left files of this pattern, half-written."""
    deadline = time.monotonic() + 20
    while not on_disk(server, pattern) and not saves_end():
        assert time.monotonic() < deadline, server.log()
    # How long a save takes depends on the machine: most waits are short, few are longer than several saves.
    time.sleep(0.25 * rng.random() ** 4)
    server.stop(signal.SIGKILL)
    return bool(on_disk(server, pattern))


def wait_for_log(server, text, seconds=20):
    deadline = time.monotonic() + seconds
    while text not in server.log():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.02)


@contextlib.contextmanager
def started(directory, *flags):
    """A server that the test ends in its own way; if the test fails before, it is killed."""
    server = Server(directory, *flags)
    server.start()
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def test_a_save_beyond_a_limit_on_file_sizes_fails_alone(tmp_path):
    with started(tmp_path) as server, Wire(server.url) as wire:
        model = wire.model(server.base_model(), rank=32)
        before = logprobs(wire, model, 1)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        answer = wire.result(save(wire, model, 2, "a"))
        assert answer["category"] == "server" and "File too large" in answer["error"], answer
        assert not on_disk(server, "*") and not on_disk(server, ".*") and not saved(wire)
        assert logprobs(wire, model, 3) == before
        server.stop()


def busy_model(wire, base_model, passes):
    """A model with work that takes a while, and the next free place in its order."""
    model_id = wire.model(base_model)
    datum = next_token_datum((encode("the quick brown fox jumps over the lazy dog ") * 30)[:200])
    for seq_id in range(1, passes + 1):
        assert wire.submit(fwdbwd(model_id, seq_id, [datum] * 64)).status_code == 200
    wire.optim_step(model_id, passes + 1)
    return model_id, passes + 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_every_acknowledged_save_is_there_after_a_signal(tmp_path, how):
    names = [f"s-{i}" for i in range(30)]
    with started(tmp_path) as server, Wire(server.url) as wire:
        # Behind training, so that it has to be finished first.
        model_id, first = busy_model(wire, server.base_model(), passes=2)
        for seq_id, name in enumerate(names, first):
            save(wire, model_id, seq_id, name)
        server.process.send_signal(how)
        written = len(on_disk(server, "s-*"))
        assert written < len(names), "the signal has to come while saves are in flight"
        assert server.process.wait(timeout=90) == 0, server.log()
        assert "still being written" in server.log()
    with Server(tmp_path) as server, Wire(server.url) as wire:
        listed = saved(wire)
        assert {f"tinker://{model_id}/weights/{name}" for name in names} <= set(listed)
        session = wire.session()
        bits = {tuple(logprobs(wire, load(wire, session, i, path))) for i, path in enumerate(listed)}
        assert len(bits) == 1, "they were all saved of the same weights"


def test_a_server_whose_log_nobody_takes_any_more_ends_in_order(tmp_path):
    server = Server(tmp_path)
    reader, writer = os.pipe()
    server.process = subprocess.Popen(server.command(), stdout=writer, stderr=writer)
    os.close(writer)
    with Wire(server.url) as wire:
        deadline = time.monotonic() + 30
        while b"Connect from Python" not in os.read(reader, 65536):
            assert time.monotonic() < deadline
        model_id = wire.model(wire.get("get_server_capabilities").json()["supported_models"][0]["model_name"])
        os.close(reader)
        for i in range(1, 4):
            request = save(wire, model_id, i, f"s-{i}")
        assert "error" not in wire.result(request), "what it says of a save is lost, and the save is not"
        server.stop(signal.SIGHUP)
    assert server.process.returncode == 0
    assert len(on_disk(server, "s-*")) == 3


def test_a_server_that_is_to_ignore_a_closed_terminal_does(tmp_path):
    inherited = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with started(tmp_path) as server:
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            assert server.process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, inherited)


@pytest.mark.parametrize("second_signal", [True, False])
def test_an_end_that_does_not_wait_says_how_many_saves_are_lost(tmp_path, second_signal):
    timeout = "60s" if second_signal else "500ms"
    with started(tmp_path, "--shutdown-timeout", timeout) as server, Wire(server.url) as wire:
        model_id, first = busy_model(wire, server.base_model(), passes=60)
        for i in range(3):
            save(wire, model_id, first + i, f"s-{i}")
        server.process.send_signal(signal.SIGTERM)
        wait_for_log(server, "3 checkpoints are still being written")
        if second_signal:
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=5) != 0
        assert "3 checkpoints were not written" in server.log()
        assert not on_disk(server, "*")


def test_many_quick_saves_all_succeed(tmp_path):
    with Server(tmp_path) as server, Wire(server.url) as wire:
        model_id = wire.model(server.base_model(), rank=1)
        saves = [save(wire, model_id, i + 1, f"s-{i}") for i in range(200)]
        answers = [wire.result(request_id) for request_id in saves]
        assert [a for a in answers if "error" in a] == []
        assert len(saved(wire)) == 200


def test_kills_at_random_moments_tear_nothing(tmp_path):
    rng = random.Random()
    torn, first, expected = 0, None, None
    for round_ in range(ROUNDS_MAX):
        with started(tmp_path) as server, Wire(server.url) as wire:
            session, listed = wire.session(), saved(wire)
            if round_ == 0:
                model_id = wire.model(server.base_model(), rank=64, session=session)
                expected = logprobs(wire, model_id)
                first = wire.result(save(wire, model_id, 2, "first"))["path"]
                seq_id = 3
            else:
                assert not on_disk(server, ".*"), "leftovers are cleared at start"
                last_round = [path for path in listed if path.rsplit("/", 1)[1].startswith(f"r{round_ - 1}-")]
                for number, path in enumerate([*last_round, first]):
                    model_id, seq_id = load(wire, session, number, path), 2
                    assert logprobs(wire, model_id) == expected, path
            if torn == KILLS:
                break
            for i in range(8):
                save(wire, model_id, seq_id + i, f"r{round_}-{i}")
            torn += kill_while_saving(server, rng, ".*.partial-*", lambda: len(on_disk(server, f"r{round_}-*")) == 8)
    assert torn == KILLS, f"only {torn} of {ROUNDS_MAX} kills came during a save"


def test_a_kill_while_a_name_is_saved_again_leaves_the_old_save_or_the_new(tmp_path):
    rng = random.Random()
    torn, path, answered, expected = 0, None, None, None
    for round_ in range(ROUNDS_MAX):
        with started(tmp_path) as server, Wire(server.url) as wire:
            session, listed = wire.session(), saved(wire)
            if path is None:
                model_id = wire.model(server.base_model(), rank=64, session=session)
                expected = logprobs(wire, model_id)
            else:
                assert list(listed) == [path], "there is one, whatever happened"
                assert answered <= int(listed[path]["n"]) <= answered + 8
                model_id = load(wire, session, 0, path)
                assert logprobs(wire, model_id) == expected
                run, kind, name = path.removeprefix("tinker://").split("/")
                assert wire.http.delete(f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}").status_code == 200
            if torn == KILLS:
                break
            answered = 100 * round_
            again = {"overwrite": True, "user_metadata": {"n": str(answered)}}
            path = wire.result(save(wire, model_id, 2, "again", **again))["path"]
            for i in range(1, 9):
                save(wire, model_id, 2 + i, "again", **again | {"user_metadata": {"n": str(answered + i)}})
            last = str(answered + 8)
            torn += kill_while_saving(server, rng, ".again.*", lambda: saved(wire)[path]["n"] == last)
    assert torn == KILLS, f"only {torn} of {ROUNDS_MAX} kills came during a save"


def test_a_second_server_on_a_data_directory_refuses_and_names_the_first(tmp_path):
    def start_another(data):
        command = [binary(), "serve", "--port", str(free_port()), "--data-dir", str(data)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    data = tmp_path / "data"
    (tmp_path / "by-another-name").symlink_to(data)
    with started(tmp_path) as first, Wire(first.url) as wire:
        model_id = wire.model(first.base_model())
        # Half-written directories of the first are what a second would remove.
        writing = data / "checkpoints/run/weights/.a.partial-1-1"
        writing.mkdir(parents=True)
        for name in (data, tmp_path / "by-another-name"):
            refused = start_another(name)
            assert refused.returncode != 0
            assert "in use" in refused.stderr and f"pid {first.process.pid} " in refused.stderr, refused.stderr
        assert writing.exists()
        assert "path" in wire.result(save(wire, model_id, 1, "a"))
        first.stop(signal.SIGKILL)
    with Server(tmp_path) as server, Wire(server.url) as wire:
        assert len(saved(wire)) == 1, "a lock whose holder was killed is taken over"
        assert not writing.exists()
    assert (data / "strata.lock").read_text() == "", "and one that ended in order says nothing"


def test_a_save_that_the_disk_refuses_fails_alone(tmp_path):
    with Server(tmp_path) as server, Wire(server.url) as wire:
        model_id = wire.model(server.base_model())
        in_the_way = tmp_path / "data/checkpoints" / model_id
        in_the_way.write_text("not a directory")
        answer = wire.result(save(wire, model_id, 1, "a"))
        assert answer["category"] == "server" and "not written" in answer["error"], answer
        assert str(tmp_path) not in json.dumps(answer)
        in_the_way.unlink()
        assert "path" in wire.result(save(wire, model_id, 2, "a"))


def test_what_a_stranger_put_into_the_data_directory_stops_nobody(tmp_path):
    with Server(tmp_path) as server, Wire(server.url) as wire:
        model_id = wire.model(server.base_model())
        wire.result(save(wire, model_id, 1, "a"))
        directory = tmp_path / "data/checkpoints" / model_id / "weights"
    for name in ("pipe", "long"):
        (directory / name).mkdir()
    subprocess.run(["mkfifo", directory / "pipe/strata.json"], check=True)
    record = (directory / "a/strata.json").read_text()
    (directory / "long/strata.json").write_text(record + " " * (1 << 20))
    (directory / "link").symlink_to(directory / "a")
    (directory / ".b.partial-1-1").symlink_to(directory / "a")
    (directory / ".mine").mkdir()
    with Server(tmp_path) as server, Wire(server.url) as wire:
        assert list(saved(wire)) == [f"tinker://{model_id}/weights/a"]
        weights = directory / "a/adapter_model.safetensors"
        weights.unlink()
        subprocess.run(["mkfifo", weights], check=True)
        body = {"session_id": wire.session(), "model_seq_id": 0, "path": f"tinker://{model_id}/weights/a", "optimizer": True}
        answer = wire.result(wire.ok("load_weights", body)["request_id"])
        assert answer["category"] == "user" and str(tmp_path) not in json.dumps(answer), answer
        assert "path" in wire.result(save(wire, wire.model(server.base_model()), 1, "b"))
    assert (directory / ".mine").exists() and (directory / ".b.partial-1-1").is_symlink()
