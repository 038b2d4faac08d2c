"""Every family behind the API: trained, sampled, saved and loaded through the official SDK, under a name of one's own."""

import json
import subprocess

import numpy as np
import pytest
import tinker
from tinker import types

from harness import API_KEY, Server, binary, encode, logprobs_of, next_token, same_bits, train

SIZES = dict(vocab_size=300, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
             intermediate_size=80, max_position_embeddings=512, initializer_range=0.2, eos_token_id=2, bos_token_id=0)
FAMILIES = {
    "llama": dict(
        attention_bias=True, mlp_bias=True,
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=64),
    ),
    "mistral": dict(sliding_window=20),
    "qwen2": dict(
        rope_parameters=dict(rope_type="longrope", short_factor=[1.0] * 6, long_factor=[3.0] * 6,
                             original_max_position_embeddings=100),
    ),
    "deepseek_v3": dict(
        num_key_value_heads=4, head_dim=None, q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=8,
        n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=2, moe_intermediate_size=20, first_k_dense_replace=1,
    ),
    "glm4_moe_lite": dict(
        num_key_value_heads=4, head_dim=None, q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=8,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=20,
    ),
    "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=9),
    "qwen3_5_text": dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=10, linear_value_head_dim=12, linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=16,
    ),
    "qwen3_5_moe_text": dict(
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=8, head_dim=16,
        full_attention_interval=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=24,
    ),
    "qwen3_moe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[1], norm_topk_prob=True),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def served(family, tmp_path):
    """A server of a random model of the family, as `org/family` with a tokenizer that is elsewhere."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(model_type=family) | SIZES | FAMILIES[family]))
    model = tmp_path / "model"
    subprocess.run([binary(), "init-model", str(model), "--config", str(config), "--dtype", "f32"], check=True, capture_output=True)
    with Server(tmp_path, str(model), "--name", f"org/{family}", "--tokenizer", "org/words") as running:
        yield running


def test_a_family_is_trained_and_sampled_and_its_saves_come_back(served, family):
    with tinker.ServiceClient(base_url=served.url, api_key=API_KEY) as service:
        assert [m.model_name for m in service.get_server_capabilities().supported_models] == [f"org/{family}"]
        training = service.create_lora_training_client(base_model=f"org/{family}", rank=6, seed=5)
        assert training.get_info().model_data.tokenizer_id == "org/words"
        data = [next_token(encode("the quick brown fox jumps over the lazy dog")), next_token(encode("pack my box"))]
        losses = train(training, data, steps=4, learning_rate=1e-2)
        assert losses[-1] < losses[0]

        sampler = training.save_weights_and_get_sampling_client()
        # Short, and past a page of the cache and the limit of longrope.
        for prompt in (encode("the quick"), encode("the quick brown fox " * 5)[:90]):
            sampled = sampler.sample(types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=30, seed=1, stop=[]))
            sequences = sampled.result().sequences
            whole = training.forward([next_token(prompt + s.tokens) for s in sequences], "cross_entropy").result()
            for i, sequence in enumerate(sequences):
                assert same_bits(sequence.logprobs, logprobs_of(whole, i)[len(prompt) - 1 :])

        path = training.save_state("saved").result().path
        expected = logprobs_of(training.forward(data, "cross_entropy").result())
        again = service.create_training_client_from_state_with_optimizer(path)
        assert same_bits(logprobs_of(again.forward(data, "cross_entropy").result()), expected)
        assert np.isclose(train(again, data, steps=1)[0], train(training, data, steps=1)[0], rtol=0, atol=0)


def test_inspect_says_what_a_family_has(served, family):
    model = served.directory / "model"
    said = subprocess.run([binary(), "inspect", str(model)], check=True, capture_output=True, text=True).stdout
    assert family in said and "3 of width 48" in said
    (model / "model.safetensors").unlink()
    refused = subprocess.run([binary(), "inspect", str(model)], capture_output=True, text=True)
    assert refused.returncode == 1 and "model.safetensors" in refused.stderr
