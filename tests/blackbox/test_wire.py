"""What the server answers to clients that are wrong, late, doubled or hostile."""

import base64
import concurrent.futures
import socket
import time

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from harness import encode, same_bits
from wire import PROTOBUF, create_model, floats, fwdbwd, is_user_error, next_token_datum, optim_step, sample_body, tensor

TOKENS = encode("the quick brown fox")
DATUM = next_token_datum(TOKENS)
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


@pytest.fixture
def model(wire, base_model):
    return wire.model(base_model)


def still_works(wire, model_id, seq_id):
    """The tenant answers its next operations; the loss of the probe."""
    output = wire.forward_backward(fwdbwd(model_id, seq_id, [DATUM], forward_only=True))
    assert not isinstance(output, dict), output
    return output.metrics["loss:sum"]


def refused(wire, response):
    """A user's mistake is a 4xx with a body that is not 409, or a failed future of category `user`; the text."""
    if response.status_code == 200:
        answer = wire.result(response.json()["request_id"], pb.ForwardBackwardOutput)
        assert is_user_error(answer), answer
        return answer["error"]
    assert 400 <= response.status_code < 500 and response.status_code not in (408, 409, 425, 429), response.status_code
    assert response.content, "an empty body is taken for a proxy's"
    return response.text


# ---- health, configuration -------------------------------------------------------------------------------------------


def test_health_and_configuration(wire, server):
    assert wire.get("healthz").json()["status"] == "ok"
    assert wire.http.get("/healthz").status_code == 200
    assert wire.post("client/config", {"sdk_version": "0.38.0"}).status_code == 200
    assert wire.post("client/dynamic_config", {"sdk_version": "0.38.0"}).status_code == 200
    assert wire.ok("telemetry", {"events": [], "platform": "x", "sdk_version": "0.38.0", "session_id": "s", "process_uuid": "p"}) == {"status": "accepted"}


def test_capabilities_name_the_model(wire, base_model):
    models = wire.get("get_server_capabilities").json()["supported_models"]
    assert [m["model_name"] for m in models] == [base_model]
    assert models[0]["max_context_length"] == 2048


def test_an_unknown_path_is_a_404_with_a_body(wire):
    response = wire.post("no_such_thing", {})
    assert response.status_code == 404 and response.content


# ---- order, duplicates, futures --------------------------------------------------------------------------------------


def test_requests_that_arrive_as_3_1_2_run_as_1_2_3(wire, base_model):
    def outcome(order):
        model_id = wire.model(base_model, seed=9)
        requests = {1: fwdbwd(model_id, 1, [DATUM]), 3: fwdbwd(model_id, 3, [DATUM])}
        ids = {}
        for seq in order:
            if seq == 2:
                ids[seq] = wire.optim_step(model_id, 2, learning_rate=1e-2)
            else:
                ids[seq] = wire.submit(requests[seq]).json()["request_id"]
        return [floats(wire.result(ids[seq], pb.ForwardBackwardOutput))[0].tolist() for seq in (1, 3)]

    in_order = outcome((1, 2, 3))
    assert in_order[0] != in_order[1]
    assert outcome((3, 1, 2)) == in_order
    assert outcome((2, 3, 1)) == in_order


def test_a_request_is_acknowledged_before_those_it_waits_for(wire, model):
    started = time.monotonic()
    response = wire.submit(fwdbwd(model, 2, [DATUM]))
    assert response.status_code == 200 and time.monotonic() - started < 5
    wire.submit(fwdbwd(model, 1, [DATUM]))
    assert wire.result(response.json()["request_id"], pb.ForwardBackwardOutput).metrics["loss:sum"] > 0


def test_a_repeated_request_runs_once(wire, base_model):
    norms = []
    for times in (1, 3):
        model_id = wire.model(base_model, seed=9)
        acks = [wire.submit(fwdbwd(model_id, 1, [DATUM])).json()["request_id"] for _ in range(times)]
        assert len(set(acks)) == 1
        steps = [wire.optim_step(model_id, 2) for _ in range(times)]
        assert len(set(steps)) == 1
        norms.append(wire.result(steps[0])["metrics"]["optim/grad_norm"])
        repeated = wire.submit(fwdbwd(model_id, 1, [DATUM])).json()["request_id"]
        assert repeated == acks[0], "also when the first is long done"
        still_works(wire, model_id, 3)
    assert norms[0] == norms[1]


def test_creating_a_model_twice_is_one_model(wire, base_model):
    body = create_model(wire.session(), base_model)
    ids = {wire.result(wire.ok("create_model", body)["request_id"])["model_id"] for _ in range(2)}
    assert len(ids) == 1 and ids.pop() == f"{body['session_id']}:train:0"


def test_a_result_can_be_read_twice(wire, model):
    request_id = wire.submit(fwdbwd(model, 1, [DATUM])).json()["request_id"]
    first, second = (wire.result(request_id, pb.ForwardBackwardOutput) for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def test_one_future_wakes_all_who_wait(wire, model):
    second = wire.submit(fwdbwd(model, 2, [DATUM])).json()["request_id"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(wire.result, second, pb.ForwardBackwardOutput) for _ in range(4)]
        time.sleep(0.2)
        wire.submit(fwdbwd(model, 1, [DATUM]))
        values = [future.result(timeout=20).metrics["loss:sum"] for future in waiting]
    assert len(set(values)) == 1


@pytest.mark.parametrize("request_id", ["", "garbage", "0", "-1", "../../etc/passwd", "a" * 5000, "\x00", "request:999999", "💥"])
def test_garbage_future_ids_are_unknown(wire, request_id):
    response = wire.poll(request_id)
    assert response.status_code in (400, 404, 422) and response.content


def test_results_are_protobuf_only_where_the_client_says_so(wire, model):
    request_id = wire.submit(fwdbwd(model, 1, [DATUM])).json()["request_id"]
    wire.result(request_id, pb.ForwardBackwardOutput)
    assert wire.poll(request_id, PROTOBUF).headers["content-type"].startswith(PROTOBUF)


# ---- wrong training requests -----------------------------------------------------------------------------------------

WRONG_DATA = {
    "targets shorter than the input": ((TOKENS[:-1], {"target_tokens": tensor(TOKENS[2:]), "weights": tensor([1.0] * (len(TOKENS) - 2))}), "target_tokens"),
    "weights longer than the targets": ((TOKENS[:-1], {"target_tokens": tensor(TOKENS[1:]), "weights": tensor([1.0] * 100)}), "weights"),
    "a token outside the vocabulary": (([1, 2, 70000], {"target_tokens": tensor([1, 2, 3]), "weights": tensor([1.0] * 3)}), "70000"),
    "a negative token": (([1, -7, 2], {"target_tokens": tensor([1, 2, 3]), "weights": tensor([1.0] * 3)}), "-7"),
    "a target outside the vocabulary": (([1, 2, 3], {"target_tokens": tensor([1, 2, 70000]), "weights": tensor([1.0] * 3)}), "70000"),
    "no tokens": (([], {"target_tokens": tensor([], "int64"), "weights": tensor([], "float32")}), ""),
    "weights that are not numbers": ((TOKENS[:-1], {"target_tokens": tensor(TOKENS[1:]), "weights": tensor([float("nan")] * (len(TOKENS) - 1))}), "weights"),
    "infinite weights": ((TOKENS[:-1], {"target_tokens": tensor(TOKENS[1:]), "weights": tensor([float("inf")] * (len(TOKENS) - 1))}), "weights"),
    "targets that are not integers": ((TOKENS[:-1], {"target_tokens": tensor([0.5] * (len(TOKENS) - 1)), "weights": tensor([1.0] * (len(TOKENS) - 1))}), "target_tokens"),
    "a shape that is not the data's": ((TOKENS[:-1], {"target_tokens": tensor(TOKENS[1:], shape=[3]), "weights": tensor([1.0] * (len(TOKENS) - 1))}), "target_tokens"),
    "a negative shape": ((TOKENS[:-1], {"target_tokens": tensor(TOKENS[1:], shape=[-18]), "weights": tensor([1.0] * (len(TOKENS) - 1))}), "target_tokens"),
    "a shape whose product overflows": ((TOKENS[:-1], {"target_tokens": tensor(TOKENS[1:], shape=[2**62, 8]), "weights": tensor([1.0] * (len(TOKENS) - 1))}), "target_tokens"),
    "more tokens than the context": (next_token_datum([5] * 5000), "4999"),
    "no targets": ((TOKENS[:-1], {"weights": tensor([1.0] * (len(TOKENS) - 1))}), "target_tokens"),
}


@pytest.mark.parametrize("wrong", WRONG_DATA)
def test_a_wrong_datum_is_refused_and_leaves_no_gradient(wire, base_model, wrong):
    datum, word = WRONG_DATA[wrong]
    model_id = wire.model(base_model, seed=9)
    text = refused(wire, wire.submit(fwdbwd(model_id, 1, [DATUM, datum])))
    assert word in text, text
    wire.forward_backward(fwdbwd(model_id, 2, [DATUM]))
    norm = wire.result(wire.optim_step(model_id, 3))["metrics"]["optim/grad_norm"]
    clean = wire.model(base_model, seed=9)
    wire.forward_backward(fwdbwd(clean, 1, [DATUM]))
    assert wire.result(wire.optim_step(clean, 2))["metrics"]["optim/grad_norm"] == norm


def test_one_tenants_mistake_does_not_fail_anothers_request(wire, base_model):
    good, bad = wire.model(base_model), wire.model(base_model)
    pairs = []
    for seq in range(1, 6):
        wrong = wire.submit(fwdbwd(bad, seq, [([1, 2, 70000], DATUM[1])]))
        pairs.append((wire.submit(fwdbwd(good, seq, [DATUM])), wrong))
    for right, wrong in pairs:
        assert wire.result(right.json()["request_id"], pb.ForwardBackwardOutput).metrics["loss:sum"] > 0
        refused(wire, wrong)


def test_an_empty_batch_is_refused(wire, model):
    refused(wire, wire.submit(fwdbwd(model, 1, [])))
    still_works(wire, model, 2)


def test_an_image_is_refused_by_a_text_model(wire, model, base_model):
    request = fwdbwd(model, 1, [DATUM])
    request.data[0].model_input.add().image.CopyFrom(pb.ImageChunk(data=PNG, format="png", expected_tokens=1))
    assert "image" in refused(wire, wire.submit(request)).lower()
    sampler = wire.base_sampler(base_model)
    chunks = [{"type": "encoded_text", "tokens": [5]}, {"type": "image", "data": base64.b64encode(PNG).decode(), "format": "png"}]
    response = wire.post("asample", sample_body(sampler, 0, [], prompt_chunks=chunks))
    assert response.status_code in (400, 422) or is_user_error(wire.result(response.json()["request_id"]))
    still_works(wire, model, 2)


@pytest.mark.parametrize(
    "adam",
    [{"learning_rate": "fast"}, {"learning_rate": -1.0}, {"beta1": 1.0}, {"beta2": 1.5}, {"eps": -1e-8}, {"weight_decay": -1.0}, {"grad_clip_norm": -1.0}],
)
def test_impossible_optimizer_settings_are_refused(wire, model, adam):
    before = still_works(wire, model, 1)
    wire.forward_backward(fwdbwd(model, 2, [DATUM]))
    response = wire.post("optim_step", optim_step(model, 3, **adam))
    if response.status_code == 200:
        assert is_user_error(wire.result(response.json()["request_id"]))
        assert still_works(wire, model, 4) == before, "a refused step changes nothing"
    else:
        assert response.status_code in (400, 422) and response.content


def test_several_kinds_of_tensor_are_read(wire, model):
    tokens, inputs = DATUM
    flat = {name: pb.Tensor.FromString(value.SerializeToString()) for name, value in inputs.items()}
    for value in flat.values():
        value.ClearField("shape")
    sparse = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[len(tokens), 1])
    sparse.sparse_csr.values = np.asarray(TOKENS[1:], dtype=np.int64).tobytes()
    sparse.sparse_csr.crow_indices = np.arange(len(tokens) + 1, dtype=np.int64).tobytes()
    sparse.sparse_csr.col_indices = np.zeros(len(tokens), dtype=np.int64).tobytes()
    weights = tensor(np.ones((len(tokens), 1), dtype=np.float32))
    output = wire.forward_backward(fwdbwd(model, 1, [DATUM, (tokens, flat), (tokens, {"target_tokens": sparse, "weights": weights})]))
    a, b, c = floats(output)
    assert same_bits(a, b) and same_bits(a, c.reshape(-1)) and c.shape == (len(tokens), 1)


@pytest.mark.parametrize(
    ("crow", "col"),
    [
        ([0, 5, 3], [0, 0, 0]),
        ([0, 1], [0]),
        ([0] + [2**40] * (len(TOKENS) - 1), [0]),
        ([-1] + [1] * (len(TOKENS) - 1), [0]),
        (list(range(len(TOKENS))), [7] * (len(TOKENS) - 1)),
    ],
)
def test_broken_sparse_tensors_are_refused(wire, model, crow, col):
    tokens, inputs = DATUM
    sparse = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[len(tokens), 1])
    sparse.sparse_csr.values = np.asarray(TOKENS[1 : 1 + len(col)], dtype=np.int64).tobytes()
    sparse.sparse_csr.crow_indices = np.asarray(crow, dtype=np.int64).tobytes()
    sparse.sparse_csr.col_indices = np.asarray(col, dtype=np.int64).tobytes()
    refused(wire, wire.submit(fwdbwd(model, 1, [(tokens, {"target_tokens": sparse, "weights": inputs["weights"]})])))
    still_works(wire, model, 2)


def test_a_huge_sparse_shape_costs_nothing(wire, model):
    """Twelve bytes that claim to be a matrix of 2^40 numbers."""
    tokens, inputs = DATUM
    sparse = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[len(tokens), 2**36])
    sparse.sparse_csr.crow_indices = np.zeros(len(tokens) + 1, dtype=np.int64).tobytes()
    refused(wire, wire.submit(fwdbwd(model, 1, [(tokens, {"target_tokens": sparse, "weights": inputs["weights"]})])))
    still_works(wire, model, 2)


# ---- wrong bodies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x7f", b"\x1a\x05ab", b"{}"])
def test_broken_protobuf_is_refused(wire, body):
    response = wire.post_bytes("forward_backward", body)
    assert response.status_code in (400, 404, 422) and response.content


@pytest.mark.parametrize("path", ["create_session", "create_model", "asample", "optim_step", "retrieve_future", "save_weights", "load_weights"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"session_id": 5}'])
def test_broken_json_is_refused(wire, path, body):
    response = wire.post_bytes(path, body, "application/json")
    if path == "create_session" and body in (b"[]", b"null", b'{"session_id": 5}') and response.status_code == 200:
        return
    assert response.status_code in (400, 404, 415, 422), (response.status_code, response.text)
    assert response.content


def test_a_body_that_is_too_large_is_refused(wire, model):
    def endless():
        block = b"\x00" * (1 << 20)
        for _ in range(1024):
            yield block

    try:
        response = wire.http.post("/api/v1/forward_backward", content=endless(), headers={"content-type": PROTOBUF})
        assert response.status_code == 413 and response.content
    except Exception as error:  # the server may also hang up while the body is on its way
        assert "ssert" not in type(error).__name__, error
    still_works(wire, model, 1)


def test_zstd_bodies_are_read(wire, model):
    body = fwdbwd(model, 1, [DATUM] * 20).SerializeToString()
    response = wire.post_bytes("forward_backward", zstandard.compress(body), content_encoding="zstd")
    assert response.status_code == 200, response.text
    plain = wire.submit(fwdbwd(model, 2, [DATUM] * 20))
    a, b = (wire.result(r.json()["request_id"], pb.ForwardBackwardOutput) for r in (response, plain))
    assert all(same_bits(x, y) for x, y in zip(floats(a), floats(b), strict=True))


def test_a_zstd_bomb_is_refused(wire, model):
    bomb = zstandard.ZstdCompressor(level=19).compress(b"\x00" * (1 << 30))
    assert len(bomb) < 200_000
    started = time.monotonic()
    response = wire.post_bytes("forward_backward", bomb, content_encoding="zstd")
    assert response.status_code in (400, 413, 422) and response.content
    assert time.monotonic() - started < 20
    still_works(wire, model, 1)


@pytest.mark.parametrize(("encoding", "body"), [("zstd", b"not zstd"), ("zstd", zstandard.compress(b"x" * 1000)[:-4]), ("br", b"x"), ("gzip", b"x")])
def test_broken_and_unknown_encodings_are_refused(wire, encoding, body):
    response = wire.post_bytes("forward_backward", body, content_encoding=encoding)
    assert response.status_code in (400, 415, 422) and response.content


def test_responses_may_be_compressed(wire):
    response = wire.http.get("/api/v1/get_server_capabilities", headers={"accept-encoding": "gzip, deflate, zstd"})
    assert response.json()["supported_models"]


# ---- unknown names, wrong values -------------------------------------------------------------------------------------


def test_unknown_models_sessions_and_samplers_are_named(wire, base_model):
    unknown = "no-session:train:0"
    assert 400 <= wire.submit(fwdbwd(unknown, 1, [DATUM])).status_code < 500
    for path, body in {
        "optim_step": optim_step(unknown, 1),
        "save_weights": {"model_id": unknown, "path": "x", "seq_id": 1, "overwrite": False, "type": "save_weights"},
        "save_weights_for_sampler": {"model_id": unknown, "path": "x", "kind": "snapshot", "seq_id": 1, "type": "save_weights_for_sampler"},
        "get_info": {"model_id": unknown, "type": "get_info"},
        "create_model": create_model("no-session", base_model),
        "asample": sample_body("no-session:sample:0", 0, [1]),
        "weights_info": {"tinker_path": "tinker://nobody/weights/x"},
    }.items():
        response = wire.post(path, body)
        assert response.status_code in (400, 404, 410, 422), (path, response.status_code, response.text)
        assert response.content


@pytest.mark.parametrize("lora", [{"rank": 0}, {"rank": -1}, {"rank": 10**9}, {"train_attn": False, "train_mlp": False, "train_unembed": False}])
def test_impossible_adapters_are_refused(wire, base_model, lora):
    body = create_model(wire.session(), base_model)
    body["lora_config"] |= lora
    response = wire.post("create_model", body)
    assert response.status_code in (400, 422) or is_user_error(wire.result(response.json()["request_id"])), response.text


def test_an_unknown_optimizer_is_refused_at_creation(wire, base_model):
    body = create_model(wire.session(), base_model) | {"optimizer_config": {"type": "dimuon", "version": 1}}
    response = wire.post("create_model", body)
    assert response.status_code in (400, 422) and "dimuon" in response.text


@pytest.mark.parametrize("seq_id", [-1, -(2**31)])
def test_impossible_sequence_ids_are_refused(wire, model, seq_id):
    refused(wire, wire.submit(fwdbwd(model, seq_id, [DATUM])))
    still_works(wire, model, 1)


@pytest.mark.parametrize(
    "path",
    ["tinker://", "tinker://x", "http://example.com/x", "tinker://a/weights/../../../../etc", "tinker://../weights/x", "tinker://a/b/c/d", "/etc/passwd",
     "tinker://a:train:0/weights/%2e%2e", "x" * 100_000, "tinker://a\0/weights/x"],
)
def test_checkpoint_paths_that_lead_elsewhere_are_refused(wire, base_model, path):
    session = wire.session()
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False, "type": "load_weights"}
    response = wire.post("load_weights", load)
    assert response.status_code in (400, 404, 422) or is_user_error(wire.result(response.json()["request_id"])), response.text
    response = wire.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path, "type": "create_sampling_session"})
    assert response.status_code in (400, 404, 422) and response.content
    assert wire.post("weights_info", {"tinker_path": path}).status_code in (400, 404, 422)


# ---- sampling on the wire --------------------------------------------------------------------------------------------


def test_a_repeated_sample_is_one_sample(wire, base_model):
    sampler = wire.base_sampler(base_model)
    # So hot that tokens are drawn almost evenly: two draws of three sequences are not equal by chance.
    body = sample_body(sampler, 10**18, TOKENS, num_samples=3, max_tokens=6, temperature=100.0)
    del body["sampling_params"]["seed"]
    first, second = wire.ok("asample", body), wire.ok("asample", body)
    assert first == second
    assert len(first["sample_sequence_ids"]) == len(set(first["sample_sequence_ids"])) == 3
    response = wire.result(first["request_id"], pb.SampleResponse)
    assert len(response.sequences) == 3
    for sequence in response.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) > 0
    # Drawn without a seed: had it been computed again, these would be others.
    assert wire.ok("asample", body) == first
    other = wire.post("asample", body | {"prompt_alt_tokens_k": 2})
    assert other.status_code == 400 and "was sent before and asked for something else" in other.text, other.text
    assert wire.result(first["request_id"], pb.SampleResponse) == response
    assert wire.result(wire.ok("asample", body | {"seq_id": 10**18 + 1})["request_id"], pb.SampleResponse) != response


def test_prompt_logprobs_have_the_length_of_the_prompt(wire, base_model):
    sampler = wire.base_sampler(base_model)
    body = sample_body(sampler, 0, TOKENS) | {"prompt_logprobs": True, "topk_prompt_logprobs": 3}
    response = wire.result(wire.ok("asample", body)["request_id"], pb.SampleResponse)
    logprobs = np.frombuffer(response.prompt_logprobs, dtype=np.float32)
    assert len(logprobs) == len(TOKENS) and np.isnan(logprobs[0]) and np.isfinite(logprobs[1:]).all()
    topk = response.topk_prompt_logprobs
    assert (topk.k, topk.length) == (3, len(TOKENS)) and len(topk.token_ids) == len(topk.logprobs) == 4 * 3 * len(TOKENS)
    first = np.frombuffer(topk.logprobs, dtype=np.float32)[:3]
    assert (first == -99999.0).all() and np.frombuffer(topk.token_ids, dtype=np.int32)[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("extra", [{"num_samples": 0}, {"num_samples": -1}, {"num_samples": 10**9}, {"topk_prompt_logprobs": 10**9}, {"seq_id": "x"},
                                   {"prompt_alt_tokens_k": -1}, {"sampling_params": "hot"}, {"prompt": {"chunks": []}}, {"prompt": {"chunks": [{"type": "what"}]}}])
def test_impossible_sample_requests_are_refused(wire, base_model, extra):
    response = wire.post("asample", sample_body(wire.base_sampler(base_model), 0, TOKENS) | extra)
    assert response.status_code in (400, 413, 422) or is_user_error(wire.result(response.json()["request_id"], pb.SampleResponse)), response.text


def test_get_sampler_answers_for_every_way_to_make_one(wire, base_model, model):
    session = model.split(":train:")[0]
    ack = wire.ok("save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 7, "kind": "snapshot", "seq_id": 1, "type": "save_weights_for_sampler"})
    unnamed = wire.result(ack["request_id"])
    assert unnamed.get("path") is None and unnamed["sampling_session_id"] == f"{session}:sample:7"
    for sampler in (unnamed["sampling_session_id"], wire.base_sampler(base_model)):
        answer = wire.get(f"samplers/{sampler}").json()
        assert answer["sampler_id"] == sampler and answer["base_model"] == base_model
    assert wire.get("samplers/nobody:sample:0").status_code == 404


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_a_finished_session_is_gone(wire, base_model):
    session = wire.session()
    model_id = wire.model(base_model, session=session)
    assert wire.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"}).status_code == 200
    for _ in range(2):
        finish = wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        assert 200 <= finish.status_code < 300
    assert wire.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"}).status_code == 410
    assert 400 <= wire.submit(fwdbwd(model_id, 1, [DATUM])).status_code < 500


def test_sessions_are_listed(wire, base_model):
    session = wire.session()
    model_id = wire.model(base_model, session=session)
    assert session in wire.get("sessions", params={"limit": 1000}).json()["sessions"]
    assert wire.get(f"sessions/{session}").json()["training_run_ids"] == [model_id]


# ---- crowds ----------------------------------------------------------------------------------------------------------


def test_a_hundred_clients_at_once(wire, server, base_model):
    sampler = wire.base_sampler(base_model)

    def one(i):
        ack = wire.ok("asample", sample_body(sampler, i, TOKENS, max_tokens=3, seed=1))
        return wire.result(ack["request_id"], pb.SampleResponse).sequences[0].tokens

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        assert len(set(pool.map(one, range(200)))) == 1


def test_broken_connections_do_no_harm(server, wire, model):
    for payload in (b"", b"GET", b"POST /api/v1/asample HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{", b"\x00" * 1000, b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(payload)
    still_works(wire, model, 1)
