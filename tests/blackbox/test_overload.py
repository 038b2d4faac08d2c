"""More work than there is room for: what was accepted is done, what is not is refused at the door, and nobody pays for another."""

import contextlib
import pathlib
import re
import socket
import subprocess
import time

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from harness import API_KEY, Server, binary, next_token
from wire import Wire, fwdbwd, is_user_error, next_token_datum, optim_step, sample_body

CONTEXT_SMALL = "48MiB"
FIXTURE = pathlib.Path(__file__).parents[1] / "reference/fixtures/tied_gqa3_f32"


def tokens(seed, count):
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def until_taken(wire, path, body, seconds=60):
    """Sends a request again and again until there is room for it."""
    deadline = time.monotonic() + seconds
    while True:
        response = wire.post(path, body)
        if response.status_code != 429:
            assert response.status_code == 200, (response.status_code, response.text)
            return response.json()
        assert "again" in response.json()["detail"]
        assert time.monotonic() < deadline, "no room for so long"
        time.sleep(0.05)


def sampled(wire, request_id):
    response = wire.result(request_id, pb.SampleResponse)
    assert isinstance(response, pb.SampleResponse), response
    return [(s.tokens, s.logprobs) for s in response.sequences]


def resident_bytes(server):
    lines = pathlib.Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("base_models", [0, 3])
def test_each_thread_of_an_engine_has_memory_of_its_own(tmp_path, base_models):
    """Threads that compute and share an arena of the C library's allocator wait for its lock in every step of a long sequence. Arenas begin at multiples of 64 MiB."""
    models = [str(tmp_path / f"model{i}") for i in range(base_models)]
    for model in models:
        subprocess.run([binary(), "init-model", model, "--config", str(FIXTURE / "model/config.json")], check=True, capture_output=True)
    with Server(tmp_path, *models) as server:
        process = pathlib.Path(f"/proc/{server.process.pid}")
        threads = [(thread / "comm").read_text().strip() for thread in (process / "task").iterdir()]
        of_engines = [name for name in threads if name.startswith("strata-")]
        starts = re.findall(r"^([0-9a-f]+)-[0-9a-f]+ rw-p 0+ 00:00 0 *$", (process / "maps").read_text(), re.MULTILINE)
        arenas = [start for start in starts if int(start, 16) % (64 << 20) == 0]
        assert len(of_engines) >= 4 * max(base_models, 1), of_engines
        assert len(arenas) >= len(of_engines), (arenas, threads)


def test_groups_of_samples_of_many_prompts_finish_in_a_small_cache_with_the_same_bits(tmp_path, server, base_model):
    """Prompts that were admitted must leave room for the samples behind them, or all wait for each other."""
    with Server(tmp_path, "--memory", CONTEXT_SMALL) as small, Wire(small.url) as wire, Wire(server.url) as roomy:
        sampler, roomy_sampler = wire.base_sampler(base_model), roomy.base_sampler(base_model)
        bodies = [sample_body("", seq, tokens(seq % 17, 230), 32, max_tokens=20, stop=[], seed=seq) for seq in range(30)]
        for body in bodies:
            until_taken(wire, "asample", body | {"sampling_session_id": sampler})
        for seq, body in enumerate(bodies):
            here = sampled(wire, f"{sampler}:{seq}")
            assert len(here) == 32
            if seq % 6 == 0:
                ack = roomy.ok("asample", body | {"sampling_session_id": roomy_sampler})
                assert here == sampled(roomy, ack["request_id"])


def test_a_request_that_can_never_fit_fails_alone(tmp_path):
    with Server(tmp_path, "--memory", CONTEXT_SMALL) as small, Wire(small.url) as wire:
        base = small.base_model()
        sampler, model = wire.base_sampler(base), wire.model(base)
        huge = wire.post("asample", sample_body(sampler, 0, tokens(1, 100), 4096, max_tokens=100))
        assert huge.status_code == 400 and "above the limit" in huge.json()["detail"], huge.text
        assert sampled(wire, wire.ok("asample", sample_body(sampler, 1, tokens(1, 100)))["request_id"])
        data = [next_token_datum(tokens(i, 200)) for i in range(400)]
        refused = wire.submit(fwdbwd(model, 1, data))
        # What is too large to be decoded takes its place and fails; what is too large to wait takes none.
        takes_its_place = refused.status_code == 200
        if takes_its_place:
            assert is_user_error(wire.result(refused.json()["request_id"]))
        else:
            assert refused.status_code == 400, refused.text
        assert "error" not in wire.result(wire.optim_step(model, 2 if takes_its_place else 1))


def test_results_that_nobody_fetches_fill_one_share_and_memory_stays_within_bounds(tmp_path):
    with Server(tmp_path, "--memory", "256MiB") as small, Wire(small.url) as hog, Wire(small.url, "tml-other") as other:
        base = small.base_model()
        sampler = hog.base_sampler(base)
        statuses = set()
        for seq in range(400):
            body = sample_body(sampler, seq, tokens(seq, 30), 64, max_tokens=60, stop=[]) | {"topk_sample_logprobs": 8}
            statuses.add(hog.post("asample", body).status_code)
        assert statuses == {200, 429}, statuses
        theirs = other.ok("asample", sample_body(other.base_sampler(base), 0, tokens(1, 30)))
        assert len(sampled(other, theirs["request_id"])) == 1
        # What is read makes room.
        assert len(sampled(hog, f"{sampler}:0")) == 64
        until_taken(hog, "asample", sample_body(sampler, 1000, tokens(1, 30)))
        assert resident_bytes(small) < (256 + 64) << 20


def test_lists_that_nobody_reads_keep_memory_within_bounds(tmp_path):
    """Answers with what users attached to checkpoints are large: whoever asks for them again and again, and reads none, is told to come back."""
    metadata = {f"k{i}": "x" * 6000 for i in range(10)}
    # Of less memory, a list is small enough for the system's buffers of a connection, where it is no more the server's.
    with Server(tmp_path, "--memory", "256MiB") as small, Wire(small.url) as wire:
        model = wire.model(small.base_model(), rank=1)
        save = {"model_id": model, "overwrite": False, "user_metadata": metadata, "type": "save_weights"}
        saved = []
        for seq in range(1, 301):
            ack = wire.ok("save_weights", save | {"path": f"c{seq}", "seq_id": seq})
            saved.append(wire.result(ack["request_id"]))
            if "error" in saved[-1]:
                break
        # A catalogue is a small part of a small memory, too.
        assert "path" in saved[0] and "as many as it can keep track of" in saved[-1].get("error", "")
        page = wire.get("checkpoints?limit=10").json()
        assert len(page["checkpoints"]) == 10 and page["checkpoints"][0]["user_metadata"] == metadata
        for path in ("checkpoints?limit=1000", f"training_runs/{model}/checkpoints"):
            with contextlib.ExitStack() as unread:
                statuses = set()
                for _ in range(25):
                    connection = unread.enter_context(socket.socket())
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    connection.connect(("127.0.0.1", small.port))
                    head = f"GET /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-test-key\r\n\r\n"
                    connection.sendall(head.encode())
                    connection.settimeout(20)
                    statuses.add(connection.recv(12))
                assert b"HTTP/1.1 429" in statuses, statuses
                assert resident_bytes(small) < (256 + 48) << 20, path
        assert wire.get("checkpoints?limit=10").json()["cursor"]["total_count"] == page["cursor"]["total_count"]


def test_a_full_sampling_queue_refuses_and_takes_the_same_request_later(tmp_path):
    """What was refused left nothing behind: sent again under its number it is computed once, with the bits that it gets where there is room."""
    with Server(tmp_path, "--memory", CONTEXT_SMALL) as small, Wire(small.url) as wire:
        sampler = wire.base_sampler(small.base_model())

        def body(seq):
            return sample_body(sampler, seq, tokens(seq, 200), 16, max_tokens=30, stop=[], seed=seq)

        accepted = 0
        while (response := wire.post("asample", body(accepted))).status_code == 200:
            accepted += 1
            assert accepted < 2000, "the queue never fills"
        assert response.status_code == 429 and accepted > 1, (accepted, response.text)
        assert wire.poll(f"{sampler}:{accepted}").status_code in (400, 404), "nothing is known of what was refused"
        assert wire.ok("asample", body(0))["request_id"] == f"{sampler}:0", "what was accepted still is"
        first = sampled(wire, f"{sampler}:0")
        for seq in range(1, accepted):
            assert len(sampled(wire, f"{sampler}:{seq}")) == 16
        ack = until_taken(wire, "asample", body(accepted))
        assert ack == until_taken(wire, "asample", body(accepted))
        assert ack["request_id"] == f"{sampler}:{accepted}" and len(set(ack["sample_sequence_ids"])) == 16
        assert len(sampled(wire, ack["request_id"])) == 16
        again = until_taken(wire, "asample", body(0) | {"seq_id": accepted + 1})
        assert sampled(wire, again["request_id"]) == first


def test_the_sdk_waits_while_the_sampling_queue_is_full(tmp_path):
    with Server(tmp_path, "--memory", CONTEXT_SMALL) as small, Wire(small.url) as hog:
        base = small.base_model()
        sampler, filled = hog.base_sampler(base), 0
        while hog.post("asample", sample_body(sampler, filled, tokens(filled, 200), 16, max_tokens=30, stop=[])).status_code == 200:
            filled += 1
        with tinker.ServiceClient(base_url=small.url, api_key=API_KEY) as client:
            base_client = client.create_sampling_client(base_model=base).result()
            params = types.SamplingParams(max_tokens=20, stop=[], seed=1)
            futures = [base_client.sample(types.ModelInput.from_ints(tokens(seq, 100)), 16, params) for seq in range(40)]
            # What nobody reads holds its room, whoever waits.
            for seq in range(filled):
                sampled(hog, f"{sampler}:{seq}")
            assert all(len(future.result().sequences) == 16 for future in futures)
            assert base_client.holder._sample_backoff_until is not None, "the client was told to wait"


def test_a_finished_session_stops_its_work(tmp_path):
    with Server(tmp_path, "--memory", "1GiB") as server, Wire(server.url) as wire, Wire(server.url) as other:
        base = server.base_model()
        session = wire.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
        sampler = wire.ok("create_sampling_session", body)["sampling_session_id"]
        model = wire.model(base, session=wire.session())
        for seq in range(40):
            wire.ok("asample", sample_body(sampler, seq, tokens(seq, 100), 8, max_tokens=1900, stop=[]))
        assert wire.submit(fwdbwd(model, 1, [next_token_datum(tokens(i, 500)) for i in range(200)])).status_code == 200
        theirs = other.ok("asample", sample_body(other.base_sampler(base), 0, tokens(5, 30), max_tokens=200, stop=[]))
        wire.ok(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        wire.ok(f"sessions/{model.split(':')[0]}/finish", {"reason": {"type": "success"}, "detail": None})
        # Half a million tokens of work are over at once; the other session's sample is not.
        for request_id in [f"{sampler}:0", f"{sampler}:39", f"{model}:1"]:
            answer = wire.result(request_id)
            assert is_user_error(answer) or "sequences" in answer, answer
        assert len(sampled(other, theirs["request_id"])[0][0]) == 4 * 200


def test_a_cancelled_request_fails_and_its_place_in_the_order_does_not_hold_up_others(tmp_path):
    with Server(tmp_path, "--memory", "1GiB") as server, Wire(server.url) as wire:
        base = server.base_model()
        sampler, model = wire.base_sampler(base), wire.model(base)
        endless = wire.ok("asample", sample_body(sampler, 0, tokens(1, 100), 200, max_tokens=1900, stop=[]))["request_id"]
        wire.ok("cancel_future", {"request_id": endless})
        assert is_user_error(wire.result(endless))
        waiting = wire.optim_step(model, 2)
        wire.ok("cancel_future", {"request_id": waiting})
        first, third = wire.optim_step(model, 1), wire.optim_step(model, 3)
        assert is_user_error(wire.result(waiting))
        assert "error" not in wire.result(first) and "error" not in wire.result(third)


def test_unnamed_snapshots_made_one_upon_another_do_not_pile_up(tmp_path):
    """With memory for a few dozen of them: were they kept, the later ones would be refused."""
    with Server(tmp_path, "--memory", "128MiB") as server, Wire(server.url) as wire:
        model = wire.model(server.base_model(), rank=8)
        save = {"model_id": model, "kind": "snapshot", "type": "save_weights_for_sampler"}
        for round in range(4):
            ids = []
            for seq in range(60 * round + 1, 60 * round + 61):
                ids.append(wire.ok("save_weights_for_sampler", save | {"seq_id": seq, "sampling_session_seq_id": seq})["request_id"])
            answers = [wire.result(request_id) for request_id in ids]
            made = [answer["sampling_session_id"] for answer in answers if "error" not in answer]
            assert len(made) >= 16 and answers[-1]["sampling_session_id"] == made[-1], answers[-1]
            here = [wire.post("asample", sample_body(sampler, 0, tokens(1, 20))).status_code for sampler in made]
            assert here[-16:] == [200] * 16 and sum(status == 200 for status in here) == 16, here
            # One that is in use would not make room for the next round.
            for sampler in made[-16:]:
                sampled(wire, f"{sampler}:0")


def test_a_full_queue_refuses_and_takes_the_same_operation_later(tmp_path):
    """What is refused took no place; what others wait for behind a gap is taken although the queue is full."""
    with Server(tmp_path, "--memory", "64MiB") as server, Wire(server.url) as wire:
        model = wire.model(server.base_model())
        data = [next_token_datum(tokens(i, 120)) for i in range(40)]
        behind = 2
        while (response := wire.submit(fwdbwd(model, behind, data))).status_code == 200:
            behind += 1
        assert response.status_code == 429 and behind > 3, (behind, response.text)
        assert wire.submit(fwdbwd(model, behind + 5, data)).status_code == 429
        assert wire.submit(fwdbwd(model, 1, data)).status_code == 200, "the others wait for it"
        deadline = time.monotonic() + 60
        while wire.submit(fwdbwd(model, behind, data)).status_code == 429:
            assert time.monotonic() < deadline
            for seq in range(1, behind):
                wire.poll(f"{model}:{seq}", accept="application/x-protobuf")
        for seq in range(1, behind + 1):
            assert isinstance(wire.result(f"{model}:{seq}", pb.ForwardBackwardOutput), pb.ForwardBackwardOutput)
        step = wire.result(wire.ok("optim_step", optim_step(model, behind + 1))["request_id"])
        once, all_of_them = wire.model(server.base_model()), step["metrics"]["optim/grad_norm"]
        wire.forward_backward(fwdbwd(once, 1, data))
        alone = wire.result(wire.ok("optim_step", optim_step(once, 2))["request_id"])["metrics"]["optim/grad_norm"]
        assert abs(all_of_them / (alone * behind) - 1) < 1e-3, "each counted once"


def test_a_loop_whose_snapshots_do_not_all_have_room_goes_on_with_the_last_of_them(tmp_path):
    with Server(tmp_path, "--memory", "256MiB", "--adapter-memory", "28MiB", "--threads", "1") as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            training = service.create_lora_training_client(base_model="strata/tiny-base", rank=32, seed=1).result()
            other = service.create_lora_training_client(base_model="strata/tiny-base", rank=8, seed=2).result()
            kept = other.save_weights_and_get_sampling_client()
            samplers, prompt, few = [], types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=4, seed=1)
            expected = kept.sample(prompt, 1, few).result()
            for _ in range(20):
                training.forward_backward([next_token(tokens(3, 20))], "cross_entropy").result()
                training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
                samplers.append(training.save_weights_and_get_sampling_client())
                samplers[-1].sample(prompt, 1, few).result()
            # More than one of them has room, and the last of another model is never what makes it.
            samplers[-2].sample(prompt, 1, few).result()
            assert kept.sample(prompt, 1, few).result().sequences[0].tokens == expected.sequences[0].tokens
            with pytest.raises(Exception, match="no more room for adapters"):
                samplers[0].sample(prompt, 1, few).result()
