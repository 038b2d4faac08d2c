"""Policy losses against their formulas, and a policy that improves."""

import numpy as np
import pytest
import tinker
from tinker import types

from harness import chat_prompt, encode, logprobs_of, same_bits

TOKENS = encode("Reverse: planet is tenalp")
N = len(TOKENS) - 1


def rl_inputs(seed=0):
    """Behaviour log-probabilities and advantages that put ratios on both sides of every threshold."""
    rng = np.random.default_rng(seed)
    return rng.normal(-3, 1.5, N).astype(np.float32), rng.normal(0, 1, N).astype(np.float32)


def rl_datum(q, advantages, **extra):
    inputs = {"target_tokens": TOKENS[1:], "logprobs": q.tolist(), "advantages": advantages.tolist()} | extra
    return types.Datum(types.ModelInput.from_ints(TOKENS[:-1]), inputs)


def clipped(lp, q, a, lo, hi):
    r = np.exp(lp - q)
    return -np.minimum(r * a, np.clip(r, lo, hi) * a)


FORMULAS = {
    "importance_sampling": (lambda lp, q, a: -np.exp(lp - q) * a, {}),
    "ppo": (lambda lp, q, a: clipped(lp, q, a, 0.8, 1.2), {}),
    "ppo wide": (lambda lp, q, a: clipped(lp, q, a, 0.5, 3.0), {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    "cispo": (lambda lp, q, a: -np.clip(np.exp(lp - q), 0.0, 4.0) * lp * a, {}),
    "cispo narrow": (lambda lp, q, a: -np.clip(np.exp(lp - q), 0.9, 1.1) * lp * a,
                     {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    "dro": (lambda lp, q, a: -(lp * a - 0.5 * 0.05 * (lp - q) ** 2), {"beta": 0.05}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_policy_losses_are_the_sum_that_the_formula_says(training, name):
    formula, config = FORMULAS[name]
    q, advantages = rl_inputs()
    output = training.forward_backward([rl_datum(q, advantages)], name.split()[0], config or None).result()
    lp = logprobs_of(output).astype(np.float64)
    expected = formula(lp, q.astype(np.float64), advantages.astype(np.float64))
    np.testing.assert_allclose(output.loss_fn_outputs[0]["elementwise_loss"].to_numpy(), expected, rtol=1e-4, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(expected.sum(), rel=1e-4, abs=1e-4)


def test_log_probabilities_of_weight_zero_can_be_done_without(service, base_model):
    """What is trained is the same to the bit, also where the tokens that count are far apart."""
    rng = np.random.default_rng(0)
    tokens = [int(t) for t in rng.integers(0, 250, 301)]
    weights = [1.0 if i in (170, 171) or i >= 280 else 0.0 for i in range(300)]
    data = [
        types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}),
        types.Datum(types.ModelInput.from_ints(tokens[:40]), {"target_tokens": tokens[1:41], "weights": [0.0] * 40}),
    ]
    trained = {}
    for name, config in {"with": None, "without": {"weightless_logprobs": 0}}.items():
        client = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
        passes = [client.forward_backward(data, "cross_entropy", config), client.forward(data, "cross_entropy", config)]
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        passes.append(client.forward(data, "cross_entropy"))
        trained[name] = [p.result() for p in passes]
    counts = np.asarray(weights) != 0
    for with_all, without in zip(trained["with"], trained["without"]):
        assert with_all.metrics["loss:sum"] == without.metrics["loss:sum"]
        assert same_bits(logprobs_of(with_all)[counts], logprobs_of(without)[counts])
    for output in trained["without"][:2]:
        assert not logprobs_of(output)[~counts].any() and not logprobs_of(output, 1).any()
    before, _, after = trained["without"]
    assert logprobs_of(after)[~counts].all() and not same_bits(logprobs_of(after)[counts], logprobs_of(before)[counts])
    assert same_bits(logprobs_of(after), logprobs_of(trained["with"][2]))


def test_gspo_uses_one_ratio_for_a_sequence(training):
    q, advantages = rl_inputs()
    mask = [0.0] * 9 + [1.0] * (N - 9)
    output = training.forward_backward([rl_datum(q, advantages, sequence_ratio_mask=mask)], "gspo").result()
    lp = logprobs_of(output).astype(np.float64)
    ratio = np.exp(((lp - q) * mask).sum() / sum(mask))
    expected = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    assert output.metrics["loss:sum"] == pytest.approx(expected.sum(), rel=1e-4, abs=1e-4)


def test_on_policy_ratios_are_exactly_one(training):
    """The sampler's log-probabilities are the trainer's bits, so that importance sampling has nothing to correct."""
    prompt = chat_prompt("Add: 37 45")
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=8, seed=4)
    data = []
    for sequence in sampler.sample(types.ModelInput.from_ints(prompt), 8, params).result().sequences:
        tokens = prompt + sequence.tokens
        q = [0.0] * (len(prompt) - 1) + sequence.logprobs
        advantages = [0.0] * (len(prompt) - 1) + [1.0] * len(sequence.tokens)
        inputs = {"target_tokens": tokens[1:], "logprobs": q, "advantages": advantages}
        data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
    output = training.forward_backward(data, "importance_sampling").result()
    for datum, fields in zip(data, output.loss_fn_outputs, strict=True):
        own = np.asarray(datum.loss_fn_inputs["advantages"].data) > 0
        assert (fields["elementwise_loss"].to_numpy()[own] == -1.0).all()


def test_reinforcement_learning_finds_the_rewarded_answer(service, base_model):
    """A bandit: the reward is 1 if the first letter of the answer is a vowel."""
    client = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
    prompt = chat_prompt("Say anything")
    vowels = {token for letter in "aeiou" for token in encode(letter)}
    params = types.SamplingParams(max_tokens=1, temperature=1.0, stop=[])
    rewards = []
    for step in range(15):
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=1, stop=[], seed=step)
        sequences = sampler.sample(types.ModelInput.from_ints(prompt), 48, params).result().sequences
        reward = np.array([sequence.tokens[0] in vowels for sequence in sequences], dtype=np.float32)
        rewards.append(reward.mean())
        data = []
        for sequence, advantage in zip(sequences, reward - reward.mean(), strict=True):
            zeros = [0.0] * (len(prompt) - 1)
            inputs = {"target_tokens": prompt[1:] + sequence.tokens, "logprobs": zeros + sequence.logprobs,
                      "advantages": zeros + [float(advantage) / len(sequences)]}
            data.append(types.Datum(types.ModelInput.from_ints(prompt), inputs))
        client.forward_backward(data, "importance_sampling").result()
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards


def test_provenance_spans_are_accepted(training):
    q, advantages = rl_inputs()
    datum = rl_datum(q, advantages)
    plain = training.forward([datum], "importance_sampling").result()
    span = types.PromptProvenanceSpan(sequence_id="unknown:0", offset=0, length=N)
    spanned = training.forward([datum.with_provenance([span], [span])], "importance_sampling").result()
    assert same_bits(logprobs_of(plain), logprobs_of(spanned))


def test_stable_reinforce_runs(training):
    q, advantages = rl_inputs()
    output = training.forward_backward([rl_datum(q, advantages)], "stable_reinforce").result()
    assert np.isfinite(output.metrics["loss:sum"])


@pytest.mark.parametrize("missing", ["logprobs", "advantages", "target_tokens"])
def test_a_missing_input_is_named(training, missing):
    q, advantages = rl_inputs()
    datum = rl_datum(q, advantages)
    inputs = {name: value for name, value in datum.loss_fn_inputs.items() if name != missing}
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=missing):
        training.forward_backward([types.Datum(datum.model_input, inputs)], "ppo").result()


def test_an_unknown_loss_is_named_and_the_client_goes_on(training):
    datum = rl_datum(*rl_inputs())
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match="no_such_loss"):
        training.forward_backward([datum], "no_such_loss").result()
    training.forward_backward([datum], "ppo").result()
    training.optim_step(types.AdamParams()).result()
