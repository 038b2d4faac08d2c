"""Sampling through the official SDK: log-probabilities, seeds, stops, prompt scores."""

import pickle

import numpy as np
import pytest
import tinker
from tinker import types

from harness import API_KEY, chat_prompt, decode, encode, logprobs_of, next_token, same_bits, supervised, train

QUESTION = "Reverse: planet"


@pytest.fixture
def base(service, base_model):
    return service.create_sampling_client(base_model=base_model)


def sample(client, prompt, num_samples=1, **params):
    return client.sample(types.ModelInput.from_ints(prompt), num_samples, types.SamplingParams(**params)).result().sequences


def test_the_base_model_answers(base):
    (sequence,) = sample(base, chat_prompt(QUESTION), max_tokens=20, temperature=0.0)
    assert decode(sequence.tokens) == "tenalp"
    assert sequence.stop_reason == "stop"


@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.7])
def test_sampled_logprobs_are_the_bits_that_forward_computes(training, temperature):
    train(training, [supervised(chat_prompt(QUESTION), encode("abc"))], steps=2)
    sampler = training.save_weights_and_get_sampling_client()
    for prompt in (chat_prompt(QUESTION), encode("x"), encode("a longer prompt, past a page of the cache. " * 3)):
        sequences = sample(sampler, prompt, num_samples=4, max_tokens=24, temperature=temperature, seed=11, stop=[])
        data = [next_token(prompt + sequence.tokens) for sequence in sequences]
        output = training.forward(data, "cross_entropy").result()
        for i, sequence in enumerate(sequences):
            assert len(sequence.tokens) == 24 and sequence.stop_reason == "length"
            assert same_bits(sequence.logprobs, logprobs_of(output, i)[len(prompt) - 1 :])
            assert np.isfinite(sequence.logprobs).all() and max(sequence.logprobs) <= 0


def test_compute_logprobs_are_the_bits_that_forward_computes(training):
    tokens = encode("the quick brown fox jumps over the lazy dog. " * 3)
    train(training, [next_token(tokens)], steps=2)
    sampler = training.save_weights_and_get_sampling_client()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scores[0] is None and len(scores) == len(tokens)
    assert same_bits(scores[1:], logprobs_of(training.forward([next_token(tokens)], "cross_entropy").result()))


def test_a_sample_in_company_is_the_sample_alone(base):
    prompts = [chat_prompt(f"Reverse: {word}") for word in ("planet", "a", "wonderful", "tree", "umbrella")]
    alone = [sample(base, prompt, num_samples=2, max_tokens=16, seed=i) for i, prompt in enumerate(prompts)]
    params = [types.SamplingParams(max_tokens=16, seed=i) for i in range(len(prompts))]
    futures = [base.sample(types.ModelInput.from_ints(p), 2, s) for p, s in zip(prompts, params, strict=True)]
    for expected, future in zip(alone, futures, strict=True):
        for a, b in zip(expected, future.result().sequences, strict=True):
            assert a.tokens == b.tokens
            assert same_bits(a.logprobs, b.logprobs)


def test_seeds_make_samples_repeatable_and_different(base):
    prompt = encode("hello")
    first, again, other = (
        [s.tokens for s in sample(base, prompt, num_samples=4, max_tokens=12, seed=seed, stop=[])] for seed in (2**63 + 5, 2**63 + 5, 6)
    )
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) > 1, "samples of one request differ"
    unseeded = [sample(base, prompt, max_tokens=12, stop=[], temperature=100.0)[0].tokens for _ in range(3)]
    assert any(tokens != unseeded[0] for tokens in unseeded), "without a seed each request draws its own"


def test_stop_rules(base):
    prompt = chat_prompt(QUESTION)
    greedy = dict(max_tokens=12, temperature=0.0)
    letters = encode("tenalp")
    (at_token,) = sample(base, prompt, stop=[letters[2]], **greedy)
    assert at_token.tokens == letters[:3] and at_token.stop_reason == "stop"
    (at_text,) = sample(base, prompt, stop=["nal"], **greedy)
    assert at_text.tokens == letters[:5] and at_text.stop_reason == "stop"
    (single,) = sample(base, prompt, stop="en", **greedy)
    assert single.tokens == letters[:3] and single.stop_reason == "stop"
    (never,) = sample(base, prompt, stop=[], **greedy)
    assert len(never.tokens) == 12 and never.stop_reason == "length"
    (short,) = sample(base, prompt, max_tokens=2, temperature=0.0)
    assert short.tokens == letters[:2] and short.stop_reason == "length"
    # The token that stops is there once, and one that stops nothing is not the last.
    (end,) = encode("<|im_end|>")
    (ended,) = sample(base, prompt, **greedy)
    assert ended.tokens == [*letters, end] and len(ended.logprobs) == len(ended.tokens) and ended.stop_reason == "stop"
    assert end in never.tokens[:-1]


def test_without_max_tokens_a_sample_ends_at_the_end_of_the_answer(base):
    (sequence,) = sample(base, chat_prompt(QUESTION), temperature=0.0)
    assert decode(sequence.tokens) == "tenalp"


def test_top_k_and_top_p_keep_to_the_probable(base):
    prompt = encode("q")
    (greedy,) = sample(base, prompt, max_tokens=6, temperature=0.0, stop=[])
    for limit in ({"top_k": 1}, {"top_p": 1e-6}):
        (limited,) = sample(base, prompt, max_tokens=6, temperature=1.0, seed=3, stop=[], **limit)
        assert limited.tokens == greedy.tokens, limit
        assert same_bits(limited.logprobs, greedy.logprobs), "reported log-probabilities are never renormalised"


def test_prompt_logprobs_and_their_top_k(base):
    tokens = chat_prompt(QUESTION)
    response = base.sample(types.ModelInput.from_ints(tokens), 2, types.SamplingParams(max_tokens=3, seed=1), include_prompt_logprobs=True,
                           topk_prompt_logprobs=5, topk_sample_logprobs=4).result()
    assert response.prompt_logprobs[0] is None and len(response.prompt_logprobs) == len(tokens)
    assert response.topk_prompt_logprobs[0] is None and len(response.topk_prompt_logprobs) == len(tokens)
    for position in range(1, len(tokens)):
        best = response.topk_prompt_logprobs[position]
        values = [logprob for _, logprob in best]
        assert len(best) == 5 and values == sorted(values, reverse=True)
        assert response.prompt_logprobs[position] == dict(best).get(tokens[position], response.prompt_logprobs[position])
    for sequence in response.sequences:
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
        for token, logprob, best in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert len(best) == 4
            assert dict(best).get(token, logprob) == logprob


def test_only_the_last_prompt_positions_are_scored_if_asked(base):
    tokens = chat_prompt(QUESTION)
    prompt = types.ModelInput.from_ints(tokens)
    everything = base.compute_logprobs(prompt).result()
    response = base.sample(prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, prompt_logprobs_last_n=4).result()
    assert response.prompt_logprobs[:-4] == [None] * (len(tokens) - 4)
    assert same_bits(response.prompt_logprobs[-4:], everything[-4:])


def test_greedy_takes_the_most_probable_token(base):
    response = base.sample(types.ModelInput.from_ints(encode("ab")), 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=[]),
                           topk_sample_logprobs=1).result()
    for token, best in zip(response.sequences[0].tokens, response.sequences[0].topk_logprobs, strict=True):
        assert token == best[0][0]


def test_sampled_frequencies_follow_the_probabilities(base):
    """A draw of 400 single tokens against the model's own probabilities, by a chi-squared bound."""
    prompt = encode("s")
    count = 400
    response = base.sample(types.ModelInput.from_ints(prompt), count, types.SamplingParams(max_tokens=1, stop=[], seed=8), topk_sample_logprobs=12)
    sequences = response.result().sequences
    best = sequences[0].topk_logprobs[0]
    drawn = [s.tokens[0] for s in sequences]
    probabilities = np.exp([logprob for _, logprob in best])
    observed = np.array([drawn.count(token) for token, _ in best], dtype=np.float64)
    expected = np.append(probabilities, 1 - probabilities.sum()) * count
    observed = np.append(observed, count - observed.sum())
    likely = expected > 5
    expected = np.append(expected[likely], expected[~likely].sum() + 1e-9)
    observed = np.append(observed[likely], observed[~likely].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1)).sum()
    assert statistic < 45, (statistic, observed, expected)


def test_a_pickled_sampler_samples_the_same(base):
    prompt = chat_prompt(QUESTION)
    revived = pickle.loads(pickle.dumps(base))
    assert [s.tokens for s in sample(revived, prompt, 2, max_tokens=8, seed=5)] == [s.tokens for s in sample(base, prompt, 2, max_tokens=8, seed=5)]


def test_many_samples_at_once(base):
    prompt = chat_prompt("Copy: hello")
    futures = [base.sample(types.ModelInput.from_ints(prompt), 4, types.SamplingParams(max_tokens=12, seed=i)) for i in range(32)]
    assert all(len(future.result().sequences) == 4 for future in futures)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "prompt"),
        ([5, 99999], {}, "99999"),
        ([-1], {}, "-1"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5] * 5000, {}, "5000"),
    ],
)
def test_impossible_samples_are_refused_with_the_value_at_fault(base, prompt, params, words):
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=words):
        sample(base, prompt, **({"max_tokens": 4} | params))


def test_an_unknown_base_model_is_refused_with_those_there_are(server, service, base_model):
    with pytest.raises(tinker.BadRequestError, match=base_model.split("/")[-1]):
        service.create_sampling_client(base_model="nobody/nothing").result()
    with pytest.raises(tinker.BadRequestError, match=base_model.split("/")[-1]):
        service.create_lora_training_client(base_model="nobody/nothing").result()
    # The name of a context variant is the name before the colon.
    tinker.ServiceClient(base_url=server.url, api_key=API_KEY).create_sampling_client(base_model=f"{base_model}:peft:262144").result()
