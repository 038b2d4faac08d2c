"""Training through the official SDK: losses, gradients, the optimizer."""

import time

import numpy as np
import pytest
import tinker
from tinker import types

from harness import answer_tokens, chat_prompt, decode, encode, logprobs_of, next_token, same_bits, supervised, train

SENTENCE = "the quick brown fox jumps over the lazy dog"


def test_an_overfitted_sentence_is_recited_greedily(training):
    prompt = chat_prompt("Say it")
    losses = train(training, [supervised(prompt, answer_tokens(SENTENCE))], steps=40, learning_rate=5e-3)
    assert losses[-1] < 0.5 < losses[0]
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=80, temperature=0.0)
    sequence = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
    assert decode(sequence.tokens) == SENTENCE
    assert sequence.stop_reason == "stop"
    assert sequence.tokens[-1] == answer_tokens("")[-1], "the stop token is part of the sample"


def test_forward_and_forward_backward_give_the_same_bits(training):
    data = [next_token(encode(text)) for text in ("a short one", SENTENCE, SENTENCE * 4)]
    forward = training.forward(data, "cross_entropy").result()
    backward = training.forward_backward(data, "cross_entropy").result()
    for i in range(len(data)):
        assert same_bits(logprobs_of(forward, i), logprobs_of(backward, i))


def test_completions_of_a_long_prompt_have_the_bits_that_each_has_alone(training):
    prompt = encode("what is computed once is not computed again; " * 40)[:1500]
    answers = [encode(f"completion {i}: {SENTENCE}"[: 20 + 9 * i]) for i in range(4)]
    data = [next_token(prompt + answer) for answer in answers]
    assert sum(datum.model_input.length for datum in data) > 2 * 2048, "more than a pass has otherwise"
    together = training.forward(data, "cross_entropy").result()
    trained = training.forward_backward(data, "cross_entropy").result()
    for i, datum in enumerate(data):
        alone = logprobs_of(training.forward([datum], "cross_entropy").result())
        assert same_bits(logprobs_of(together, i), alone)
        assert same_bits(logprobs_of(trained, i), alone)


def test_cross_entropy_reports_one_loss_per_token_and_their_sum(training):
    prompt, answer = chat_prompt("Reverse: planet"), answer_tokens("tenalp")
    data = [supervised(prompt, answer), next_token(encode(SENTENCE))]
    output = training.forward(data, "cross_entropy").result()
    total = 0.0
    for datum, fields in zip(data, output.loss_fn_outputs, strict=True):
        weights = np.asarray(datum.loss_fn_inputs["weights"].data, dtype=np.float32)
        logprobs = fields["logprobs"].to_numpy()
        losses = fields["elementwise_loss"].to_numpy()
        assert losses.shape == logprobs.shape == (len(weights),)
        assert (logprobs <= 0).all() and (losses >= 0).all()
        np.testing.assert_allclose(losses, -logprobs * weights, rtol=1e-6)
        total += losses.astype(np.float64).sum()
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_a_fresh_adapter_is_the_base_model(service, training, base_model):
    tokens = encode(SENTENCE)
    base = service.create_sampling_client(base_model=base_model)
    expected = base.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
    actual = logprobs_of(training.forward([next_token(tokens)], "cross_entropy").result())
    assert same_bits(expected, actual)


def test_the_same_seed_gives_the_same_training(service, base_model):
    data = [next_token(encode(SENTENCE))]
    runs = []
    for seed in (5, 5, 6):
        client = service.create_lora_training_client(base_model=base_model, rank=4, seed=seed).result()
        runs.append(train(client, data, steps=3))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_batch_cut_into_requests_adds_up_to_the_same_step(service, base_model):
    data = [next_token(encode(f"{SENTENCE} {i}")) for i in range(6)]
    after = []
    for cut in (6, 2):
        client = service.create_lora_training_client(base_model=base_model, rank=4, seed=5).result()
        pieces = [client.forward_backward(data[i : i + cut], "cross_entropy") for i in range(0, 6, cut)]
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        [piece.result() for piece in pieces]
        after.append(logprobs_of(client.forward(data[:1], "cross_entropy").result()))
    assert same_bits(*after)


def test_an_optimizer_step_without_gradients_changes_nothing(training):
    data = [next_token(encode(SENTENCE))]
    before = logprobs_of(training.forward(data, "cross_entropy").result())
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert same_bits(before, logprobs_of(training.forward(data, "cross_entropy").result()))


def test_gradients_are_cleared_by_a_step(service, base_model):
    data, other = [next_token(encode(SENTENCE))], [next_token(encode("something else entirely"))]
    clients = [service.create_lora_training_client(base_model=base_model, rank=4, seed=5).result() for _ in range(2)]
    clients[0].forward_backward(other, "cross_entropy").result()
    clients[0].optim_step(types.AdamParams(learning_rate=0.0)).result()
    for client in clients:
        client.forward_backward(data, "cross_entropy").result()
    norms = [client.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["optim/grad_norm"] for client in clients]
    assert norms[0] == norms[1] > 0


def test_weights_are_fractional_zero_or_negative(training):
    tokens = encode(SENTENCE)
    n = len(tokens) - 1
    weights = [(-0.5, 0.0, 0.25, 1.0)[i % 4] for i in range(n)]
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})
    output = training.forward_backward([datum], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(float(-(logprobs_of(output) * np.float32(weights)).sum()), rel=1e-4)


def test_several_targets_for_each_token_dense_and_sparse(training):
    tokens = encode(SENTENCE)
    n, k = len(tokens) - 1, 3
    targets = np.zeros((n, k), dtype=np.int64)
    weights = np.zeros((n, k), dtype=np.float32)
    targets[:, 0] = tokens[1:]
    targets[::5, 1] = 7
    weights[:, 0] = 0.75
    weights[::5, 1] = 0.25

    def csr(array, dtype):
        rows = [np.flatnonzero(row) for row in array]
        crow = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        values = array[array != 0]
        return types.TensorData(data=values, dtype=dtype, shape=list(array.shape), sparse_crow_indices=crow.tolist(),
                                sparse_col_indices=np.concatenate(rows).tolist())

    dense = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": targets, "weights": weights})
    sparse_inputs = {"target_tokens": csr(targets, "int64"), "weights": csr(weights, "float32")}
    sparse = types.Datum(types.ModelInput.from_ints(tokens[:-1]), sparse_inputs)
    output = training.forward([dense, sparse, next_token(tokens)], "cross_entropy").result()
    assert logprobs_of(output, 0).shape == (n, k)
    assert same_bits(logprobs_of(output, 0), logprobs_of(output, 1))
    assert same_bits(logprobs_of(output, 0)[:, 0], logprobs_of(output, 2)), "one target of several is scored as it is alone"
    losses = output.loss_fn_outputs[0]["elementwise_loss"].to_numpy()
    np.testing.assert_allclose(losses, -logprobs_of(output, 0) * weights, rtol=1e-6)


class Differentiable:
    """The little that the SDK asks of torch to differentiate a custom loss: an array with a gradient."""

    def __init__(self, values):
        self.values, self.grad = np.asarray(values, dtype=np.float32), None

    def reshape(self, shape):
        return Differentiable(self.values.reshape(shape))

    clone = detach = lambda self: self

    def requires_grad_(self, _on):
        return self


class SquaredError:
    """sum((logprobs - target)^2) over a list of arrays."""

    def __init__(self, arrays, target):
        self.arrays, self.target = arrays, target

    detach = sum = lambda self: self

    def item(self):
        return float(sum(((a.values - self.target) ** 2).sum() for a in self.arrays))

    def backward(self):
        for a in self.arrays:
            a.grad = 2 * (a.values - self.target)


def test_a_custom_loss_is_differentiated_by_the_client_and_descends(training, monkeypatch):
    class Torch:
        tensor = staticmethod(Differentiable)

    monkeypatch.setattr("tinker.lib.public_interfaces.training_client.torch", Torch)
    # A negated torch gradient is an array here; both are accepted as loss inputs.
    data = [next_token(encode(SENTENCE)), next_token(encode("another one"))]

    def loss(_data, logprobs):
        return SquaredError(logprobs, target=-1.0), {"seen:sum": float(len(logprobs))}

    values = []
    for _ in range(6):
        backward = training.forward_backward_custom(data, loss)
        training.optim_step(types.AdamParams(learning_rate=2e-3))
        output = backward.result()
        assert output.metrics["seen:sum"] == 2 and "surrogate_loss:sum" in output.metrics
        values.append(output.metrics["loss:sum"])
    assert values[-1] < values[0]


def test_what_an_adapter_does_not_train_stays_untouched(service, base_model):
    data = [next_token(encode(SENTENCE))]
    for parts in ({"train_attn": False}, {"train_mlp": False}, {"train_attn": False, "train_mlp": False}):
        try:
            client = service.create_lora_training_client(base_model=base_model, rank=4, seed=1, **parts).result()
        except (tinker.APIStatusError, tinker.RequestFailedError):
            pytest.fail(f"an adapter with {parts} was refused")
        losses = train(client, data, steps=4, learning_rate=5e-3)
        assert losses[-1] < losses[0], parts


@pytest.mark.parametrize("rank", [1, 3, 32, 100])
def test_adapters_of_any_rank_learn(service, base_model, rank):
    client = service.create_lora_training_client(base_model=base_model, rank=rank, seed=1).result()
    losses = train(client, [next_token(encode(SENTENCE))], steps=4, learning_rate=2e-3)
    assert losses[-1] < losses[0]


def test_gradient_clipping_and_weight_decay_are_per_step(service, base_model):
    data = [next_token(encode(SENTENCE))]
    adams = ({}, {"weight_decay": 10.0}, {"grad_clip_norm": 1e-3})
    results = []
    for adam in adams:
        client = service.create_lora_training_client(base_model=base_model, rank=4, seed=5).result()
        results.append(train(client, data, steps=4, learning_rate=5e-3, **adam))
    assert results[0][0] == results[1][0] == results[2][0]
    assert results[0][1:] != results[1][1:] and results[0][1:] != results[2][1:]


def test_the_round_trip_of_an_optimizer_step_is_short(training):
    data = [next_token(encode(SENTENCE))]
    training.forward_backward(data, "cross_entropy").result()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        times.append(time.perf_counter() - start)
    print(f"optim_step round trip through the SDK: median {1e3 * np.median(times):.2f} ms")


def test_get_info_and_the_tokenizer(training, base_model):
    info = training.get_info()
    assert info.model_data.model_name == base_model
    assert info.is_lora and info.lora_rank == 8
    tokenizer = training.get_tokenizer()
    assert tokenizer.encode("hello") == encode("hello")
