"""Servers with settings of their own: keys, addresses, timeouts, restarts."""

import json
import signal
import subprocess
import time

import httpx
import pytest
import tinker
from tinker import types

from harness import API_KEY, ROOT, Server, binary, decode, encode, free_port, logprobs_of, next_token, same_bits, train
from wire import Wire, fwdbwd, next_token_datum

DATUM = next_token_datum(encode("the quick brown fox"))


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("locked"), "--api-key", "tml-secret") as running:
        yield running


@pytest.mark.parametrize("key", [None, "", "tml-wrong", "tml-secre", "tml-secret-and-more"])
def test_without_the_right_key_nothing_is_answered(locked, key):
    with Wire(locked.url, api_key=key) as wire:
        for path in ("client/config", "create_session", "asample", "retrieve_future", "forward_backward", "weights_info"):
            response = wire.post(path, {})
            assert response.status_code == 401 and response.content, path
        for path in ("get_server_capabilities", "checkpoints", "training_runs", "sessions"):
            assert wire.get(path).status_code == 401, path
        assert wire.http.get("/healthz").status_code == 200, "a health check needs no key"


def test_the_sdk_reports_a_wrong_key_and_works_with_the_right_one(locked):
    with pytest.raises(tinker.AuthenticationError):
        locked.base_model(api_key="tml-wrong")
    base_model = locked.base_model(api_key="tml-secret")
    with tinker.ServiceClient(base_url=locked.url, api_key="tml-secret") as service:
        client = service.create_lora_training_client(base_model=base_model, rank=2).result()
        client.forward([next_token(encode("hello"))], "cross_entropy").result()


def test_the_key_is_not_logged(locked):
    assert "tml-secret" not in locked.log()


def refuses_to_start(*flags, env=None):
    command = [binary(), "serve", "--port", str(free_port()), *flags]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert finished.returncode != 0, command
    return finished.stderr


def test_other_machines_are_served_only_with_a_key(tmp_path):
    for host in ("0.0.0.0", "::"):
        assert "api-key" in refuses_to_start("--host", host, "--data-dir", str(tmp_path))


def test_a_key_that_no_client_can_send_is_refused_at_start(tmp_path):
    assert "tml-" in refuses_to_start("--api-key", "secret", "--data-dir", str(tmp_path))


def test_a_taken_port_is_named(locked, tmp_path):
    command = [binary(), "serve", "--port", str(locked.port), "--data-dir", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode != 0 and str(locked.port) in finished.stderr + finished.stdout


def test_a_model_that_is_not_there_is_named(tmp_path):
    missing = tmp_path / "no-such-model"
    assert "no-such-model" in refuses_to_start(str(missing), "--data-dir", str(tmp_path))


def model_with_large_tokenizer(directory, tokenizer):
    """The small model with a `tokenizer.json` as large as those that are read while the server starts."""
    model = directory / "model"
    config = ROOT / "assets/tiny-base/config.json"
    subprocess.run([binary(), "init-model", "--config", str(config), str(model)], check=True, capture_output=True)
    (model / "tokenizer.json").write_text(tokenizer + " " * (1 << 20))
    return str(model)


def test_a_large_tokenizer_is_waited_for_by_who_needs_it(tmp_path):
    tokenizer = json.loads((ROOT / "assets/tiny-base/tokenizer.json").read_text())
    # Names of a row of the model that is no token, by the hundred thousand: the server is there before they have been read.
    tokenizer["model"]["vocab"] |= {f"word {i}": 271 for i in range(400_000)}
    model = model_with_large_tokenizer(tmp_path, json.dumps(tokenizer))
    with Server(tmp_path, model) as running, tinker.ServiceClient(base_url=running.url, api_key=API_KEY) as client:
        sampler = client.create_sampling_client(base_model=client.get_server_capabilities().supported_models[0].model_name)
        stop = types.SamplingParams(max_tokens=200, seed=1, stop=list("aeiou"))
        [sample] = sampler.sample(types.ModelInput.from_ints(encode("hello")), 1, stop).result().sequences
        assert sample.stop_reason == "stop"
        assert not set(decode(sample.tokens[:-1])) & set("aeiou")


@pytest.mark.parametrize("is_malformed", [True, False])
def test_a_large_tokenizer_that_is_not_the_models_ends_the_server(tmp_path, is_malformed):
    """Known before the model is loaded if it is malformed, and as a rule when it is served already if it is another model's."""
    other = json.loads((ROOT / "assets/tiny-base/tokenizer.json").read_text())
    other["model"]["vocab"] |= {f"word {i}": 300 + i for i in range(200_000)}
    model = model_with_large_tokenizer(tmp_path, '{"model": 5}' if is_malformed else json.dumps(other))
    ended = subprocess.run(Server(tmp_path, model).command(), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended
    assert ("tokenizer.json" if is_malformed else "the tokenizer is not this model's") in ended.stderr, ended


def test_more_memory_for_adapters_than_there_is_is_refused_at_start(tmp_path):
    flags = ["--data-dir", str(tmp_path), "--memory", "1GiB", "--adapter-memory", "2GiB"]
    assert "adapters are to have 2.00 GiB" in refuses_to_start(*flags)
    two = ["strata/tiny-base", "strata/tiny-base", "--name", "a", "--name", "b"]
    assert "adapters are to have 1.00 GiB" in refuses_to_start(*two, *flags)


def test_a_session_without_heartbeats_expires(tmp_path):
    with Server(tmp_path, "--session-timeout", "3s") as server, Wire(server.url) as wire:
        base_model = server.base_model()
        session = wire.session()
        model_id = wire.model(base_model, session=session)
        kept = wire.session()
        # Long enough for the timeout and for the next look at who is silent. A request would be a sign of life, so none is sent.
        deadline = time.monotonic() + 11
        while time.monotonic() < deadline:
            heartbeat = wire.post("session_heartbeat", {"session_id": kept, "type": "session_heartbeat"})
            assert heartbeat.status_code == 200
            time.sleep(0.5)
        assert 400 <= wire.submit(fwdbwd(model_id, 1, [DATUM], forward_only=True)).status_code < 500
        assert wire.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"}).status_code == 410
        wire.model(base_model, session=kept)


def test_checkpoints_outlive_the_server(tmp_path):
    data = [next_token(encode("the quick brown fox"))]
    with Server(tmp_path) as server:
        base_model = server.base_model()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            client = service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()
            train(client, data, steps=2)
            path = client.save_state("kept").result().path
            run_id = client.model_id
            expected = train(client, data, steps=2)
    with Server(tmp_path) as server, tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
        assert path in {c.tinker_path for c in rest.list_checkpoints(run_id).result().checkpoints}
        client = service.create_training_client_from_state_with_optimizer(path).result()
        assert train(client, data, steps=2) == expected


def test_a_killed_server_leaves_whole_checkpoints_or_none(tmp_path):
    data = [next_token(encode("the quick brown fox"))]
    server = Server(tmp_path)
    server.start()
    service = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
    client = service.create_lora_training_client(base_model=server.base_model(), rank=64, seed=1).result()
    expected = logprobs_of(client.forward(data, "cross_entropy").result())
    paths = [client.save_state("first").result().path]
    for i in range(5):
        client.save_state(f"interrupted-{i}")
    time.sleep(0.05)
    server.stop(signal.SIGKILL)
    with Server(tmp_path) as server, Wire(server.url) as wire:
        listed = {c["tinker_path"] for c in wire.get("checkpoints", params={"limit": 1000}).json()["checkpoints"]}
        assert paths[0] in listed
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            for path in listed:
                revived = service.create_training_client_from_state_with_optimizer(path).result()
                assert same_bits(logprobs_of(revived.forward(data, "cross_entropy").result()), expected)


def test_results_do_not_depend_on_the_number_of_threads(tmp_path):
    outcomes = []
    for threads in ("1", "2"):
        directory = tmp_path / threads
        directory.mkdir()
        with Server(directory, "--threads", threads) as server, Wire(server.url) as wire:
            model_id = wire.model(server.base_model(), seed=9)
            output = wire.forward_backward(fwdbwd(model_id, 1, [DATUM] * 3))
            step = wire.result(wire.optim_step(model_id, 2))
            after = wire.forward_backward(fwdbwd(model_id, 3, [DATUM]))
            outcomes.append((dict(output.metrics), step, dict(after.metrics)))
    assert outcomes[0] == outcomes[1]


def trained(service, base_model):
    client = service.create_lora_training_client(base_model=base_model, rank=4, seed=5).result()
    train(client, [next_token(encode("the quick brown fox"))], steps=1)
    return client


def agreed_logprobs(server):
    """Samples a trained model, and checks that scores and training passes compute the bits of the samples; examples and their log-probabilities."""
    prompt = encode("a prompt that is longer than a page of the cache. " * 3)
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        client = trained(service, server.base_model())
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=24, seed=11, stop=[])
        sequences = sampler.sample(types.ModelInput.from_ints(prompt), 4, params).result().sequences
        data = [next_token(prompt + sequence.tokens) for sequence in sequences]
        forward = client.forward(data, "cross_entropy").result()
        backward = client.forward_backward(data, "cross_entropy").result()
        for i, sequence in enumerate(sequences):
            recomputed = logprobs_of(forward, i)
            assert len(sequence.tokens) == 24
            assert same_bits(sequence.logprobs, recomputed[len(prompt) - 1 :])
            assert same_bits(logprobs_of(backward, i), recomputed)
            scores = sampler.compute_logprobs(types.ModelInput.from_ints(prompt + sequence.tokens)).result()
            assert same_bits(scores[1:], recomputed)
        return data, [logprobs_of(forward, i) for i in range(len(data))]


def test_with_portable_numerics_sampled_logprobs_are_the_bits_that_training_computes(tmp_path):
    with Server(tmp_path, "--numerics", "portable") as portable:
        agreed_logprobs(portable)
        assert "portable numerics" in portable.log_path.read_text(), "the kernels say in which order they add"


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_with_quantized_weights_sampled_logprobs_are_the_bits_that_training_computes(tmp_path, service, base_model, storage):
    with Server(tmp_path, "--quantize", storage) as quantized:
        data, logprobs = agreed_logprobs(quantized)
    dense = trained(service, base_model).forward(data, "cross_entropy").result()
    assert not any(same_bits(logprobs_of(dense, i), logprobs[i]) for i in range(len(data))), "weights in fewer bits are other weights"


def test_a_server_ends_when_it_is_told_to(tmp_path):
    server = Server(tmp_path)
    server.start()
    server.stop(signal.SIGTERM)
    assert server.process.returncode == 0, server.log()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/healthz", timeout=2)
