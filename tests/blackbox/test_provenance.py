"""`stable_reinforce` with what the server has recorded of samples."""

import numpy as np
import pytest
import tinker
from tinker import types

from harness import API_KEY, chat_prompt, encode, logprobs_of, same_bits

PROMPT = chat_prompt("Say anything")
REFUSED = (tinker.RequestFailedError, tinker.APIStatusError)


def sampler_of(training, record=True):
    return training.save_weights_and_get_sampling_client(record_stability_info=record)


def samples(sampler, num_samples=2, max_tokens=6, seed=4):
    params = types.SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
    return sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples, params).result().sequences


def datum_of(sequence, logprobs=None, advantage=1.0, sequence_id=None, tokens=None, of_prompt=0.0):
    """An example as `rl_loop.py` of the cookbook makes it: its targets are zeros in the prompt."""
    tokens, zeros = tokens or sequence.tokens, [0.0] * (len(PROMPT) - 1)
    advantages = [*zeros[1:], of_prompt] + [advantage] * len(tokens)
    inputs = {"target_tokens": [0] * (len(PROMPT) - 1) + tokens, "advantages": advantages}
    if logprobs is not None:
        inputs["logprobs"] = zeros + list(logprobs)
    datum = types.Datum(types.ModelInput.from_ints(PROMPT + tokens[:-1]), inputs)
    sequence_id = sequence_id or sequence.sequence_id
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=sequence_id, length=len(PROMPT)),
            types.SampledProvenanceSpan(sequence_id=sequence_id, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=sequence_id, offset=1, length=len(PROMPT) - 1),
            types.SampledProvenanceSpan(sequence_id=sequence_id, length=len(tokens)),
        ],
    )


def run(training, data, loss="stable_reinforce", **config):
    return training.forward_backward(data, loss, config or None).result()


def losses_of(output, index=0):
    return np.asarray(output.loss_fn_outputs[index]["elementwise_loss"].to_numpy(), dtype=np.float32)


def test_the_policy_is_what_was_recorded_whatever_the_weights_are_now(training):
    """After a step the ratio is no longer one: the losses are those of the formula with the sampler's log-probabilities."""
    sequences = samples(sampler_of(training))
    on_policy = run(training, [datum_of(s, advantage=0.5) for s in sequences])
    assert on_policy.metrics["recorded_logprobs:sum"] == sum(len(s.tokens) for s in sequences)
    assert on_policy.metrics["passed_logprobs:sum"] == 0
    for i, sequence in enumerate(sequences):
        own = slice(len(PROMPT) - 1, None)
        assert same_bits(logprobs_of(on_policy, i)[own], sequence.logprobs)
        assert same_bits(losses_of(on_policy, i)[own], -np.float32(0.5) * np.float32(sequence.logprobs)), "a ratio of one"
    training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    output = run(training, [datum_of(s, advantage=0.5) for s in sequences], kl_coeff=0.1, clip_high_threshold=1.1)
    moved = False
    for i, sequence in enumerate(sequences):
        lp, q = logprobs_of(output, i)[len(PROMPT) - 1 :].astype(np.float64), np.float64(sequence.logprobs)
        moved |= bool((lp != q).any())
        expected = -np.minimum(np.exp(lp - q), 1.1) * lp * 0.5 + 0.05 * (lp - q) ** 2
        np.testing.assert_allclose(losses_of(output, i)[len(PROMPT) - 1 :], expected, rtol=1e-5, atol=1e-6)
        assert (losses_of(output, i)[: len(PROMPT) - 1] == 0).all()
    assert moved


def test_recorded_and_passed_are_the_same_bits_and_the_recorded_win(training):
    sequences = samples(sampler_of(training))
    training.forward_backward([datum_of(s) for s in sequences], "stable_reinforce").result()
    training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    recorded = run(training, [datum_of(s) for s in sequences])
    passed = run(training, [datum_of(s, s.logprobs, sequence_id="nobody:0") for s in sequences])
    assert same_bits(losses_of(recorded), losses_of(passed))
    assert passed.metrics["recorded_logprobs:sum"] == 0 and passed.metrics["passed_logprobs:sum"] > 0
    false = datum_of(sequences[0], [-20.0] * len(sequences[0].tokens))
    assert same_bits(losses_of(run(training, [false])), losses_of(recorded))


def test_without_spans_the_passed_count_and_without_either_the_example_is_refused(training):
    sequence = samples(sampler_of(training))[0]
    spanned = datum_of(sequence, sequence.logprobs)
    plain = types.Datum(spanned.model_input, spanned.loss_fn_inputs)
    assert same_bits(losses_of(run(training, [plain])), losses_of(run(training, [spanned])))
    bare = types.Datum(plain.model_input, {k: v for k, v in plain.loss_fn_inputs.items() if k != "logprobs"})
    with pytest.raises(REFUSED, match="datum 1.*logprobs, or provenance spans"):
        run(training, [plain, bare])


def test_what_is_not_recorded_is_named_unless_the_logprobs_are_there(service, training, server, base_model):
    silent = samples(sampler_of(training, record=False))[0]
    with tinker.ServiceClient(base_url=server.url, api_key="tml-somebody-else") as other:
        theirs = samples(sampler_of(other.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()))[0]
    for sequence in (silent, theirs):
        with pytest.raises(REFUSED, match=f"nothing is recorded of sequence .{sequence.sequence_id}"):
            run(training, [datum_of(sequence)])
        assert run(training, [datum_of(sequence, sequence.logprobs)]).metrics["passed_logprobs:sum"] == len(sequence.tokens)


def test_another_session_of_the_same_owner_finds_them_until_the_session_that_sampled_ends(server, training, base_model):
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as other:
        client = other.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()
        sequence = samples(sampler_of(client))[0]
        assert run(training, [datum_of(sequence)]).metrics["recorded_logprobs:sum"] == len(sequence.tokens)
    with pytest.raises(REFUSED, match="nothing is recorded"):
        run(training, [datum_of(sequence)])


def test_spans_that_contradict_the_example_are_refused_by_their_place(training):
    sequence = samples(sampler_of(training))[0]
    wrong = list(sequence.tokens)
    wrong[2] = (wrong[2] + 1) % 100
    with pytest.raises(REFUSED, match=r"model_input_spans\[1\] says that it is sampled token 2"):
        run(training, [datum_of(sequence, sequence.logprobs, tokens=wrong)])
    longer = list(sequence.tokens) + [7]
    datum = datum_of(sequence, tokens=longer)
    with pytest.raises(REFUSED, match=r"loss_fn_input_spans\[1\] has tokens 0 to 7 of sequence .*, which has sampled 6"):
        run(training, [datum])
    with pytest.raises(REFUSED, match=rf"advantages\[{len(PROMPT) - 2}\] is 0.5, at a token that"):
        run(training, [datum_of(sequence, of_prompt=0.5)])
    # It is usable, and nothing of all that is in its gradient.
    run(training, [datum_of(sequence)])
    training.optim_step(types.AdamParams()).result()


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_other_losses_pass_over_spans_whatever_they_say(training, loss):
    sequence = samples(sampler_of(training))[0]
    tokens = [5] * len(sequence.tokens)
    spanned = datum_of(sequence, sequence.logprobs, tokens=tokens, sequence_id="unknown:17")
    plain = types.Datum(spanned.model_input, spanned.loss_fn_inputs)
    with_spans, without = run(training, [spanned], loss), run(training, [plain], loss)
    assert same_bits(losses_of(with_spans), losses_of(without))
    assert set(with_spans.metrics) == {"loss:sum"}


def test_a_sample_of_one_token_has_a_run_of_none(training):
    sequence = samples(sampler_of(training), num_samples=1, max_tokens=1)[0]
    assert run(training, [datum_of(sequence)]).metrics["recorded_logprobs:sum"] == 1


def test_counts_add_up_over_requests(training):
    sequences = samples(sampler_of(training), num_samples=5)
    output = run(training, [datum_of(sequences[i % 5]) for i in range(1300)])
    assert len(output.loss_fn_outputs) == 1300, "more than one request"
    assert output.metrics["recorded_logprobs:sum"] == 1300 * 6
    each = [float(losses_of(output, i).astype(np.float64).sum()) for i in range(1300)]
    assert output.metrics["loss:sum"] == pytest.approx(sum(each), rel=1e-6)


def test_a_reinforcement_learning_loop_without_logprobs_finds_the_rewarded_answer(service, base_model):
    client = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
    vowels = {token for letter in "aeiou" for token in encode(letter)}
    rewards = []
    for step in range(15):
        sequences = samples(sampler_of(client), num_samples=48, max_tokens=1, seed=step)
        reward = np.array([s.tokens[0] in vowels for s in sequences], dtype=np.float32)
        rewards.append(reward.mean())
        data = [datum_of(s, advantage=float(a) / len(sequences)) for s, a in zip(sequences, reward - reward.mean(), strict=True)]
        run(client, data)
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards
