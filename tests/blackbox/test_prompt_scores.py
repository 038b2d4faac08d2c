"""What a sample can have of its prompt beside its own log-probabilities, through the SDK: those of tokens that are named, and tokens drawn in the place of its own."""

import numpy as np
import pytest
import tinker
from tinker import types

from harness import answer_tokens, chat_prompt, encode, logprobs_of, same_bits, train, supervised
from tinker.proto import tinker_public_pb2 as pb
from wire import sample_body

PROMPT = encode("the quick brown fox jumps over the lazy dog, again. " * 3)
ROWS = len(PROMPT) - 1


@pytest.fixture
def base(service, base_model):
    return service.create_sampling_client(base_model=base_model).result()


@pytest.fixture
def tuned(training):
    train(training, [supervised(chat_prompt("Reverse: abc"), answer_tokens("cba"))], steps=2)
    return training.save_weights_and_get_sampling_client()


def dense(ids):
    return types.TensorData.from_numpy(np.asarray(ids, dtype=np.int64))


def sparse(ids):
    """The cells that are not -1, as `TensorData.from_torch_sparse(ids, pad_value=-1)` makes it."""
    ids = np.asarray(ids, dtype=np.int64)
    rows, columns = np.nonzero(ids != -1)
    crow = np.searchsorted(rows, np.arange(len(ids) + 1)).tolist()
    return types.TensorData(ids[rows, columns], "int64", list(ids.shape), crow, columns.tolist())


def score(client, prompt=PROMPT, max_tokens=1, seed=1, temperature=1.0, **asked):
    params = types.SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature, stop=[])
    return client.sample(types.ModelInput.from_ints(list(prompt)), 1, params, **asked).result()


def some_ids():
    """For every position its own token, another, and nothing or a third."""
    ids = np.stack([PROMPT[1:], np.roll(PROMPT, 7)[1:], np.arange(ROWS)], axis=1)
    ids[::2, 2] = -1
    return ids


def test_named_tokens_have_the_bits_of_prompt_logprobs_and_of_forward(training, tuned):
    ids = some_ids()
    response = score(tuned, include_prompt_logprobs=True, target_prompt_logprobs=dense(ids))
    found = response.target_prompt_logprobs
    assert found.dtype == "float32" and found.shape == [ROWS, 3] and found.sparse_crow_indices is None
    values = found.to_numpy()
    assert same_bits(values[:, 0], response.prompt_logprobs[1:])
    assert (values[::2, 2] == 0).all() and (values[1::2, 2] < 0).all()
    targets = np.maximum(ids, 0)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]),
        loss_fn_inputs={"target_tokens": dense(targets), "weights": types.TensorData.from_numpy(np.ones(targets.shape, np.float32))},
    )
    exact = logprobs_of(training.forward([datum], "cross_entropy").result()).reshape(ROWS, 3)
    assert same_bits(values[ids != -1], exact[ids != -1])


def test_a_sparse_request_has_a_sparse_answer_of_the_same_layout(base):
    ids = some_ids()
    ids[: ROWS // 2] = -1
    whole = score(base, target_prompt_logprobs=dense(ids)).target_prompt_logprobs.to_numpy()
    asked = sparse(ids)
    found = score(base, target_prompt_logprobs=asked).target_prompt_logprobs
    assert found.shape == asked.shape
    assert found.sparse_crow_indices == asked.sparse_crow_indices and found.sparse_col_indices == asked.sparse_col_indices
    assert same_bits(found.data, whole[ids != -1])


def test_one_candidate_at_the_last_position_as_the_documentation_shows(base):
    ids = np.full((ROWS, 1), -1)
    ids[-1, 0] = PROMPT[-1]
    first = score(base, include_prompt_logprobs=True, target_prompt_logprobs=sparse(ids))
    assert same_bits(first.target_prompt_logprobs.data, first.prompt_logprobs[-1:])
    # The prompt is in the prefix cache now; only what is before the row that is named may come from it.
    again = score(base, target_prompt_logprobs=sparse(ids))
    assert again.prompt_cache_hit_tokens == len(PROMPT) - 2 > 0
    assert same_bits(again.target_prompt_logprobs.data, first.target_prompt_logprobs.data)


def test_alternatives_are_drawn_by_seed_and_scored_as_named_tokens_are(base):
    first = score(base, seed=2**63 + 9, prompt_alt_tokens_k=3).prompt_alt_tokens
    assert (first.tokens.dtype, first.logprobs.dtype) == ("int64", "float32")
    assert first.tokens.shape == first.logprobs.shape == [ROWS, 3]
    named = score(base, target_prompt_logprobs=first.tokens).target_prompt_logprobs
    assert same_bits(named.to_numpy(), first.logprobs.to_numpy())
    again = score(base, seed=2**63 + 9, prompt_alt_tokens_k=3, include_prompt_logprobs=True).prompt_alt_tokens
    assert again.tokens.data == first.tokens.data and same_bits(again.logprobs.data, first.logprobs.data)
    other = score(base, seed=9, prompt_alt_tokens_k=3).prompt_alt_tokens
    assert other.tokens.data != first.tokens.data
    greedy = score(base, temperature=0.0, prompt_alt_tokens_k=2, topk_prompt_logprobs=1)
    best = [row[0][0] for row in greedy.topk_prompt_logprobs[1:]]
    assert greedy.prompt_alt_tokens.tokens.to_numpy().tolist() == [[token, token] for token in best]


def test_the_last_positions_alone_have_scores_and_all_have_what_is_named_and_drawn(base):
    asked = dict(include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=2, target_prompt_logprobs=dense(some_ids()))
    everything = score(base, **asked)
    for n in (1, 5, ROWS):
        last = score(base, prompt_logprobs_last_n=n, **asked)
        assert last.prompt_logprobs[:-n] == [None] * (len(PROMPT) - n) and last.topk_prompt_logprobs[:-n] == [None] * (len(PROMPT) - n)
        assert same_bits(last.prompt_logprobs[-n:], everything.prompt_logprobs[-n:])
        assert last.topk_prompt_logprobs[-n:] == everything.topk_prompt_logprobs[-n:]
        assert same_bits(last.target_prompt_logprobs.data, everything.target_prompt_logprobs.data)
        assert last.prompt_alt_tokens.tokens.data == everything.prompt_alt_tokens.tokens.data


def test_a_prompt_of_one_token_has_no_alternatives(base):
    response = score(base, prompt=[5], prompt_alt_tokens_k=2, include_prompt_logprobs=True)
    assert response.prompt_alt_tokens.tokens.shape == [0, 2] and response.prompt_alt_tokens.logprobs.data == []
    assert response.prompt_logprobs == [None]


def test_a_prompt_that_fills_the_context_is_scored(base, rest):
    context = rest.get_server_capabilities().result().supported_models[0].max_context_length
    prompt = (PROMPT * (context // len(PROMPT) + 1))[: context + 1]
    full = base.compute_logprobs(types.ModelInput.from_ints(prompt[:context])).result()
    assert len(full) == context and full[0] is None and None not in full[1:]
    shorter = base.compute_logprobs(types.ModelInput.from_ints(prompt[: context - 1])).result()
    assert same_bits(full[1:-1], shorter[1:])
    # Without max_tokens, too, one token follows, because there is room for no other.
    params = types.SamplingParams(stop=[])
    (sequence,) = base.sample(types.ModelInput.from_ints(prompt[:context]), 1, params).result().sequences
    assert len(sequence.tokens) == 1 and sequence.stop_reason == "length"
    with pytest.raises(tinker.RequestFailedError, match=f"{context + 1} tokens"):
        base.compute_logprobs(types.ModelInput.from_ints(prompt)).result()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"target_prompt_logprobs": dense(np.ones((ROWS + 1, 1)))}, rf"target_prompt_logprobs has shape \[{ROWS + 1}, 1\]"),
        ({"target_prompt_logprobs": dense(np.ones((ROWS, 1025)))}, "between 1 and 1024"),
        ({"target_prompt_logprobs": dense(np.full((ROWS, 1), 99999))}, r"target_prompt_logprobs\[0, 0\] is 99999"),
        ({"target_prompt_logprobs": dense(np.full((ROWS, 1), -1))}, "names no token"),
        ({"target_prompt_logprobs": types.TensorData([5], "int64", [ROWS, 1], [0, 1], [0])}, "sparse_crow_indices"),
        ({"prompt_alt_tokens_k": 129}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": ROWS + 1, "include_prompt_logprobs": True}, "prompt_logprobs_last_n"),
    ],
)
def test_what_cannot_be_had_of_a_prompt_is_refused_with_the_value_at_fault(base, asked, words):
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=words):
        score(base, **asked)
    assert score(base, prompt_alt_tokens_k=1).prompt_alt_tokens is not None


def test_the_answer_is_the_same_without_protobuf(wire, base_model):
    sampler = wire.base_sampler(base_model)
    tensor = {"data": [5, -1], "dtype": "int64", "shape": [2, 4], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [3, 0]}
    body = sample_body(sampler, 0, [7, 8, 9], max_tokens=1) | {"target_prompt_logprobs": tensor, "prompt_alt_tokens_k": 2}
    request = wire.ok("asample", body)["request_id"]
    binary = wire.result(request, pb.SampleResponse)
    text = wire.poll(request).json()
    targets, drawn = text["target_prompt_logprobs"], text["prompt_alt_tokens"]
    assert targets | {"data": []} == {"data": [], "dtype": "float32", "shape": [2, 4], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [3, 0]}
    assert np.asarray(targets["data"], np.float32).tobytes() == binary.target_prompt_logprobs.sparse_csr.values
    assert targets["data"][0] < 0 and targets["data"][1] == 0
    assert np.asarray(drawn["tokens"]["data"], np.int64).tobytes() == binary.prompt_alt_tokens.tokens.dense
    assert np.asarray(drawn["logprobs"]["data"], np.float32).tobytes() == binary.prompt_alt_tokens.logprobs.dense
    assert drawn["tokens"]["shape"] == drawn["logprobs"]["shape"] == [2, 2]
