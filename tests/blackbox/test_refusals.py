"""Settings that nothing can be computed with: refused by name and value, in their place, with nothing changed."""

import json
import math

import numpy as np
import pytest
import tinker
from tinker.proto import tinker_public_pb2 as pb

from harness import encode, same_bits
from wire import create_model, floats, fwdbwd, is_user_error, next_token_datum, tensor

TOKENS = encode("the quick brown fox")
DATUM = next_token_datum(TOKENS)
N = len(TOKENS) - 1
STEP = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@pytest.fixture
def model(wire, base_model):
    return wire.model(base_model, seed=9)


def step(wire, model_id, seq_id, body=None, **params):
    body = body or {"adam_params": STEP | params}
    text = json.dumps(body | {"model_id": model_id, "seq_id": seq_id, "type": "optim_step"})
    response = wire.post_bytes("optim_step", text.encode(), content_type="application/json")
    assert response.status_code == 200, response.text
    return wire.result(response.json()["request_id"])


def loss(wire, model_id, seq_id, data=(DATUM,), name="cross_entropy", forward_only=True, config=None, v2=None):
    request = fwdbwd(model_id, seq_id, data, name, forward_only)
    for key, value in (config or {}).items():
        request.loss_fn_config[key] = value
    for key, value in (v2 or {}).items():
        if isinstance(value, str):
            request.loss_fn_config_v2[key].text = value
        else:
            request.loss_fn_config_v2[key].number = value
    return wire.forward_backward(request)


def refusal(answer, *words):
    assert is_user_error(answer), answer
    for word in words:
        assert word in answer["error"], answer["error"]
    return answer["error"]


# ---- steps -----------------------------------------------------------------------------------------------------------

WRONG_STEPS = [
    ("learning_rate", 1e30), ("learning_rate", 101.0), ("learning_rate", -1e-3), ("learning_rate", 1e300),
    ("beta1", 1.0), ("beta1", -0.1), ("beta1", 0.99999999999), ("beta2", 1.0), ("beta2", 2.0),
    ("eps", 0.0), ("eps", -1e-8), ("eps", 1e-60), ("eps", 1e60),
    ("weight_decay", -0.1), ("weight_decay", 1e30), ("weight_decay", 1001.0),
    ("grad_clip_norm", -1.0), ("grad_clip_norm", 1e300),
]


@pytest.mark.parametrize("name, value", WRONG_STEPS)
def test_a_hyperparameter_out_of_range_is_named_and_the_step_is_not_taken(wire, model, name, value):
    before = floats(loss(wire, model, 1, forward_only=False))[0]
    error = refusal(step(wire, model, 2, **{name: value}), name)
    shown = error.split(f"{name} is ")[1].split(",")[0]
    assert math.isclose(float(shown), value, rel_tol=1e-6)
    assert same_bits(floats(loss(wire, model, 3))[0], before)
    # The gradient of before is there still.
    clean = wire.model(next_base(wire), seed=9)
    loss(wire, clean, 1, forward_only=False)
    assert step(wire, model, 4)["metrics"] == step(wire, clean, 2)["metrics"]
    assert same_bits(floats(loss(wire, model, 5))[0], floats(loss(wire, clean, 3))[0])


def next_base(wire):
    return wire.get("get_server_capabilities").json()["supported_models"][0]["model_name"]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", '"0.1"', "1e999", "[]", "null"])
def test_a_hyperparameter_that_is_no_number_fails_in_its_place(wire, model, text):
    body = '{"model_id": "%s", "seq_id": 1, "adam_params": {"learning_rate": %s}, "type": "optim_step"}' % (model, text)
    response = wire.post_bytes("optim_step", body.encode(), content_type="application/json")
    if response.status_code == 200:
        refusal(wire.result(response.json()["request_id"]))
    else:
        assert 400 <= response.status_code < 500 and response.content
    assert loss(wire, model, 2).metrics["loss:sum"] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_sdk_makes_null_of_what_is_no_number_and_it_is_not_the_default(training, value):
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=f"{name} is null"):
            training.optim_step(tinker.AdamParams(**{name: value})).result()
    training.optim_step(tinker.AdamParams()).result()


def test_a_step_that_would_overflow_changes_nothing_and_says_what(wire, model):
    """A first moment that outlives the second is divided by eps alone."""
    loss(wire, model, 1, [next_token_datum(TOKENS, 100.0)], forward_only=False)
    step(wire, model, 2, learning_rate=0.0, beta1=0.0)
    before = floats(loss(wire, model, 3))[0]
    for seq_id in (4, 5):
        error = refusal(step(wire, model, seq_id, learning_rate=100.0, eps=2e-38, beta2=0.0), "a weight", "eps 2e-38")
        assert "as they were" in error
    assert same_bits(floats(loss(wire, model, 6))[0], before)
    loss(wire, model, 7, forward_only=False)
    assert step(wire, model, 8)["metrics"]["optim/grad_norm"] > 0
    after = floats(loss(wire, model, 9))[0]
    assert np.isfinite(after).all() and not same_bits(after, before)


# ---- losses that are no numbers --------------------------------------------------------------------------------------


def test_a_loss_beyond_a_float_fails_the_request_and_the_step_begins_anew(wire, base_model, model):
    """A weight of 3e38 is a finite number; its loss is none."""
    loss(wire, model, 1, forward_only=False)
    huge = next_token_datum(TOKENS, 3e38)
    refusal(loss(wire, model, 2, [DATUM, huge], forward_only=False), "datum 1: the loss of target", "inf")
    refusal(loss(wire, model, 3, [huge]), "datum 0: the loss of target")
    refusal(step(wire, model, 4), "the gradient was lost", "datum 1: the loss of target")
    clean = wire.model(base_model, seed=9)
    for model_id, seq_id in ((model, 5), (clean, 1)):
        loss(wire, model_id, seq_id, forward_only=False)
    assert step(wire, model, 6)["metrics"] == step(wire, clean, 2)["metrics"]
    assert same_bits(floats(loss(wire, model, 7))[0], floats(loss(wire, clean, 3))[0])


def test_a_ratio_that_overflows_fails_by_name(wire, model):
    inputs = {"target_tokens": tensor(TOKENS[1:]), "logprobs": tensor([-200.0] * N), "advantages": tensor([1.0] * N)}
    refusal(loss(wire, model, 1, [(TOKENS[:-1], inputs)], "importance_sampling"), "datum 0: the loss of target 0 is -inf")
    assert loss(wire, model, 2, [(TOKENS[:-1], inputs)], "ppo").metrics["loss:sum"] == pytest.approx(-1.2 * N)


def test_a_gradient_beyond_a_float_fails_the_request(wire, model):
    """Its losses are finite, each; what they add up to in a weight is not."""
    huge = next_token_datum(TOKENS, 1e37)
    assert np.isfinite(loss(wire, model, 1, [huge]).metrics["loss:sum"])
    refusal(loss(wire, model, 2, [huge], forward_only=False), "the gradient is not finite")
    refusal(step(wire, model, 3), "the gradient was lost", "not finite")
    loss(wire, model, 4, forward_only=False)
    assert step(wire, model, 5)["metrics"]["optim/grad_norm"] < 1e4


def test_a_gradient_whose_square_is_beyond_a_float_is_not_stepped_over_unless_clipped(wire, model):
    loss(wire, model, 1, [next_token_datum(TOKENS, 1e25)], forward_only=False)
    refusal(step(wire, model, 2), "a second moment", "as they were")
    assert step(wire, model, 3, grad_clip_norm=1.0)["metrics"]["optim/grad_norm"] > 1e20, "it was there still"
    assert np.isfinite(floats(loss(wire, model, 4))[0]).all()


NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("name", ["advantages", "logprobs", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"])
def test_inputs_that_are_no_numbers_are_named_with_their_place(wire, model, name, value):
    values = {"advantages": 1.0, "logprobs": -1.0, "clip_low_threshold": 0.5, "clip_high_threshold": 2.0, "sequence_ratio_mask": 1.0}
    inputs = {key: [number] * N for key, number in values.items()}
    inputs[name][4] = value
    inputs = {key: tensor(list_, dtype="float32") for key, list_ in inputs.items()} | {"target_tokens": tensor(TOKENS[1:])}
    # What a loss does not read is passed over.
    readers = {"sequence_ratio_mask": ["gspo"], "clip_low_threshold": ["ppo", "cispo", "gspo"], "clip_high_threshold": ["ppo", "cispo", "gspo"]}
    for seq_id, loss_fn in enumerate(readers.get(name, ["ppo", "stable_reinforce", "gspo"]), start=1):
        refusal(loss(wire, model, seq_id, [DATUM_OF(loss_fn), (TOKENS[:-1], inputs)], loss_fn), f"datum 1: {name}[4] is ", "not a finite number")


def DATUM_OF(_loss):
    inputs = {"advantages": tensor([1.0] * N), "logprobs": tensor([-1.0] * N), "sequence_ratio_mask": tensor([1.0] * N)}
    return TOKENS[:-1], inputs | {"target_tokens": tensor(TOKENS[1:])}


# ---- names and settings of losses ------------------------------------------------------------------------------------

EVERY_LOSS = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]


def datum_for(name):
    return DATUM if name == "cross_entropy" else DATUM_OF(name)


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_every_loss_of_the_sdk_runs(wire, model, name):
    extra = {"mask": tensor([1.0] * N), "weights": tensor([1.0] * N), "anything": tensor([1, 2, 3])}
    tokens, inputs = datum_for(name)
    plain = loss(wire, model, 1, [(tokens, inputs)], name, forward_only=False)
    more = loss(wire, model, 2, [(tokens, extra | inputs)], name)
    assert plain.metrics["loss:sum"] == more.metrics["loss:sum"], "what it does not read is passed over"
    for key in plain.metrics:
        assert key.count(":") == 1 and key.split(":")[1] in {"mean", "sum", "min", "max", "slack", "hash2", "unique"}


@pytest.mark.parametrize("name", ["dppo", "ppo_critic", "custom", "", "Cross_Entropy", "x" * 200])
def test_a_loss_that_is_not_here_fails_in_its_place(wire, model, name):
    words = ["forward_backward_custom"] if name == "custom" else [name, "known are"]
    refusal(loss(wire, model, 1, [DATUM_OF(name)], name), *words)
    assert loss(wire, model, 2).metrics["loss:sum"] > 0


def test_settings_may_be_texts_that_are_numbers_and_the_newer_map_counts(wire, model):
    data = [DATUM_OF("ppo")]
    number = loss(wire, model, 1, data, "ppo", v2={"clip_high_threshold": 3.0}).metrics["loss:sum"]
    text = loss(wire, model, 2, data, "ppo", config={"clip_high_threshold": 1.0}, v2={"clip_high_threshold": "3.0"}).metrics["loss:sum"]
    old = loss(wire, model, 3, data, "ppo", config={"clip_high_threshold": 3.0}).metrics["loss:sum"]
    default = loss(wire, model, 4, data, "ppo").metrics["loss:sum"]
    assert number == text == old != default


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_settings_that_are_not_understood_are_named(wire, model, name):
    data = [datum_for(name)]
    refusal(loss(wire, model, 1, data, name, v2={"kl_kind": "k3"}), '"kl_kind"', '"k3"', name)
    answer = loss(wire, model, 2, data, name, v2={"kl_koeff": 0.1})
    if name == "stable_reinforce":
        assert answer.metrics["loss:sum"] == loss(wire, model, 3, data, name).metrics["loss:sum"], "its settings are not published"
    else:
        refusal(answer, '"kl_koeff"', name)
    refusal(loss(wire, model, 3 + (name == "stable_reinforce"), data, name, v2={"clip_high_threshold": "nan", "beta": "nan"}), name)


# ---- several targets -------------------------------------------------------------------------------------------------


def soft(targets, weights):
    return TOKENS[:-1], {"target_tokens": targets, "weights": weights}


def csr(array, is_int=False):
    array = np.asarray(array)
    rows = [np.flatnonzero(row) for row in array]
    message = pb.Tensor(dtype=pb.DTYPE_INT64 if is_int else pb.DTYPE_FLOAT32)
    message.sparse_csr.values = array[array != 0].astype(np.int64 if is_int else np.float32).tobytes()
    message.sparse_csr.crow_indices = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64).tobytes()
    message.sparse_csr.col_indices = np.concatenate(rows).astype(np.int64).tobytes()
    message.shape.extend(array.shape)
    return message


@pytest.mark.parametrize("k", [1, 2, 20])
def test_outputs_have_the_shape_of_the_targets_dense_or_sparse(wire, model, k):
    """Targets and weights list other cells: token 0 and weight 0 are left out of each."""
    rng = np.random.default_rng(k)
    targets = rng.integers(0, 40, (N, k)) * (rng.random((N, k)) < 0.5)
    weights = (rng.normal(0, 1, (N, k)) * (rng.random((N, k)) < 0.5)).astype(np.float32)
    dense = soft(tensor(targets), tensor(weights))
    forms = [dense, soft(csr(targets, True), csr(weights)), soft(csr(targets, True), tensor(weights)), soft(tensor(targets), csr(weights))]
    output = loss(wire, model, 1, [*forms, DATUM])
    logprobs, losses = floats(output), floats(output, "elementwise_loss")
    assert [a.shape for a in logprobs] == [(N, k)] * 4 + [(N,)]
    for i in range(1, 4):
        assert same_bits(logprobs[i], logprobs[0]) and same_bits(losses[i], losses[0])
    np.testing.assert_allclose(losses[0], -logprobs[0] * weights, rtol=1e-6)
    columns = [loss(wire, model, 2 + j, [soft(tensor(targets[:, j]), tensor(weights[:, j]))]) for j in range(k)]
    for j, column in enumerate(columns):
        assert same_bits(floats(column)[0], logprobs[0][:, j]), "each target is scored as it is alone"


def test_many_targets_of_a_long_sequence(wire, base_model):
    model_id = wire.model(base_model)
    tokens = (encode("the quick brown fox jumps over the lazy dog ") * 60)[:500]
    targets = np.random.default_rng(1).integers(0, 270, (500, 20))
    weights = np.full((500, 20), 1 / 20, dtype=np.float32)
    output = loss(wire, model_id, 1, [(tokens, {"target_tokens": tensor(targets), "weights": tensor(weights)})], forward_only=False)
    assert floats(output)[0].shape == (500, 20)
    assert output.metrics["loss:sum"] == pytest.approx(float(-(floats(output)[0].astype(np.float64) / 20).sum()), rel=1e-5)
    assert step(wire, model_id, 2)["metrics"]["optim/grad_norm"] > 0


@pytest.mark.parametrize("target, word", [(-1, "is -1"), (70000, "is 70000"), (2**40, f"is {2**40}")])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_target_outside_the_vocabulary_is_named_whatever_its_weight(wire, model, target, word, weight):
    for seq_id, k in enumerate((None, 3), start=1):
        shape = (N,) if k is None else (N, k)
        targets, weights = np.ones(shape, dtype=np.int64), np.full(shape, 0.5, dtype=np.float32)
        targets.flat[5], weights.flat[5] = target, weight
        refusal(loss(wire, model, seq_id, [DATUM, soft(tensor(targets), tensor(weights))]), "datum 1: target_tokens[5]", word)


def test_what_has_no_tokens_or_no_targets_is_refused(wire, model):
    empty = ([], {"target_tokens": tensor([], "int64"), "weights": tensor([], "float32")})
    refusal(loss(wire, model, 1, [DATUM, empty]), "datum 1: it has no tokens")
    none = soft(tensor(np.zeros((N, 0)), "int64"), tensor(np.zeros((N, 0)), "float32"))
    refusal(loss(wire, model, 2, [DATUM, none]), "datum 1: 0 targets per token")
    refusal(loss(wire, model, 3, [soft(tensor(np.ones((N, 2)), "int64"), tensor([1.0] * N))]), "weights has shape")
    refusal(loss(wire, model, 4, [soft(tensor(np.ones((N, 1025)), "int64"), tensor(np.ones((N, 1025)), "float32"))]), "1025", "1024")


def test_thresholds_for_each_token_take_the_place_of_the_setting(wire, model):
    rng = np.random.default_rng(0)
    q, a = rng.normal(-3, 1.5, N).astype(np.float32), rng.normal(0, 1, N).astype(np.float32)
    low, high = rng.uniform(0.2, 0.9, N).astype(np.float32), rng.uniform(1.1, 3, N).astype(np.float32)
    inputs = {"target_tokens": tensor(TOKENS[1:]), "logprobs": tensor(q), "advantages": tensor(a)}
    both = inputs | {"clip_low_threshold": tensor(low), "clip_high_threshold": tensor(high)}
    output = loss(wire, model, 1, [(TOKENS[:-1], both)], "ppo", config={"clip_low_threshold": 0.99, "clip_high_threshold": 1.01})
    r = np.exp(floats(output)[0].astype(np.float64) - q)
    np.testing.assert_allclose(floats(output, "elementwise_loss")[0], -np.minimum(r * a, np.clip(r, low, high) * a), rtol=1e-4, atol=1e-5)
    del both["clip_low_threshold"]
    refusal(loss(wire, model, 2, [(TOKENS[:-1], both)], "ppo"), "clip_low_threshold", "only one")


# ---- adapters and optimizers -----------------------------------------------------------------------------------------


def created(wire, base_model, optimizer=None, **lora):
    body = create_model(wire.session(), base_model)
    body["lora_config"] |= lora
    if optimizer is not None:
        body["optimizer_config"] = optimizer
    response = wire.post_bytes("create_model", json.dumps(body).encode(), content_type="application/json")
    if response.status_code != 200:
        assert 400 <= response.status_code < 500 and response.status_code not in (408, 409, 425, 429)
        return response.text
    answer = wire.result(response.json()["request_id"])
    assert "model_id" in answer or is_user_error(answer), answer
    return answer.get("error")


@pytest.mark.parametrize("rank", [0, 1025, 2**40, 2**63])
def test_a_rank_that_there_is_no_room_for_is_refused_with_the_limit(wire, base_model, rank):
    error = created(wire, base_model, rank=rank)
    assert str(rank) in error and "1024" in error


@pytest.mark.parametrize("rank", [-1, 1.5, "8", None, 2**64])
def test_a_rank_that_is_none_is_refused_by_name(wire, base_model, rank):
    assert "rank" in created(wire, base_model, rank=rank)


@pytest.mark.parametrize("rank", [1, 1024])
def test_the_least_and_the_largest_rank_are_taken(wire, base_model, rank):
    assert created(wire, base_model, rank=rank) is None


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63), None])
def test_any_seed_of_64_bits_is_taken(wire, base_model, seed):
    assert created(wire, base_model, seed=seed) is None


@pytest.mark.parametrize("seed", [2**64, 1.5, "7"])
def test_a_seed_that_is_none_is_refused_by_name(wire, base_model, seed):
    assert "seed" in created(wire, base_model, seed=seed)


def test_an_adapter_of_nothing_is_refused(wire, base_model):
    assert "all three are off" in created(wire, base_model, train_attn=False, train_mlp=False, train_unembed=False)


def test_optimizers_are_adamw_or_refused_by_name(wire, base_model, model):
    assert "dimuon" in created(wire, base_model, optimizer={"type": "dimuon", "version": 1})
    assert created(wire, base_model, optimizer={"type": "adamw"}) is None
    loss(wire, model, 1, forward_only=False)
    refusal(step(wire, model, 2, {"optimizer_params": {"type": "dimuon", "learning_rate": 1e-3, "beta1": 0.9}}), "dimuon", "adamw")
    by_type = step(wire, model, 3, {"optimizer_params": {"type": "adamw"} | STEP})
    clean = wire.model(base_model, seed=9)
    loss(wire, clean, 1, forward_only=False)
    assert by_type["metrics"] == step(wire, clean, 2)["metrics"]
    assert same_bits(floats(loss(wire, model, 4))[0], floats(loss(wire, clean, 3))[0])
    refusal(step(wire, model, 5, {"optimizer_params": {"type": "sgd"}}), "sgd")


def test_a_pass_as_json_takes_settings_as_numbers_or_texts(wire, model):
    def dense(values, dtype):
        return {"data": list(values), "dtype": dtype, "shape": [len(values)]}

    inputs = {"target_tokens": dense(TOKENS[1:], "int64"), "logprobs": dense([-1.0] * N, "float32"), "advantages": dense([1.0] * N, "float32")}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]}, "loss_fn_inputs": inputs}

    def run(seq_id, **config):
        asked = {"data": [datum], "loss_fn": "ppo", "loss_fn_config": config}
        ack = wire.ok("forward_backward", {"model_id": model, "seq_id": seq_id, "forward_backward_input": asked})
        return wire.result(ack["request_id"])

    assert run(1, clip_high_threshold=3.0)["metrics"] == run(2, clip_high_threshold="3.0")["metrics"]
    refusal(run(3, clip_high_threshold="wide"), "clip_high_threshold", "wide")
    refusal(run(4, beta=1), "beta")
