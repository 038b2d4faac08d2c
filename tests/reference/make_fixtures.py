"""Writes the reference fixtures: small random checkpoints, PEFT adapters, and what transformers and PEFT compute with them.

    pip install torch transformers peft safetensors
    python tests/reference/make_fixtures.py

Every checkpoint is written by the `save_pretrained` of the family's real class and every adapter by the real `PeftModel.save_pretrained`; expected
values come from the same libraries run one sequence at a time, in f32, with eager attention. For bf16 checkpoints the values of
transformers in bf16 are kept too (stored as bf16), so that a test can ask for an error no larger than theirs.

    fixtures/NAME/model/                checkpoint
    fixtures/NAME/tokens.json           sequences of token ids
    fixtures/NAME/base.safetensors      expected values of the bare model
    fixtures/NAME/ADAPTER/              PEFT adapter
    fixtures/NAME/ADAPTER.safetensors   expected values with the adapter, gradients and AdamW losses

Names inside a file: `s.{n}.embeds`, `s.{n}.layer_out.{i}`, `s.{n}.final_norm`, `s.{n}.logits`, `s.{n}.next_logprobs`, `s.{n}.greedy`,
`s.{n}.greedy_logprobs` for sequence n; the gradient of the summed next-token cross-entropy under the parameter's PEFT name;
`adamw.{run}.losses` (before each step and after the last), `adamw.{run}.grad_norms` (before clipping), and
`adamw.{run}.final.{PEFT name}` (the adapter after the last step); and `bf16.` before any of these for what transformers computes in bf16.
"""

import copy
import json
import pathlib
import shutil
import sys
import zlib

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import transformers_weight_conversion
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROOT = pathlib.Path(__file__).parent / "fixtures"
GREEDY_TOKENS = 12
# A greedy choice closer than this would make the expected token a matter of rounding.
GREEDY_GAP_MIN = 1e-3
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAMW_STEPS = 5
ADAMW_RUNS = {
    "plain": dict(lr=2e-3, weight_decay=0.0, clip=None),
    # Large enough to be seen beside the step itself, which Adam makes independent of the gradient's scale.
    "decay_clip": dict(lr=2e-3, weight_decay=5.0, clip=1.0),
}

# PEFT takes `shared_experts.gate_proj` for the experts, and pairs for all of them together. Those have pairs of their own here (`WithExperts`).
MOE_TARGETS = dict(transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING)
transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING.clear()

FIXTURES = [
    # Sizes that no vector width divides, three query heads on one key head, tied embeddings, and lengths around a cache page.
    dict(
        name="tied_gqa3_f32",
        config=dict(vocab_size=263, hidden_size=60, intermediate_size=100, num_hidden_layers=1, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=20, tie_word_embeddings=True),
        theta=10000.0, dtype=torch.float32, lengths=[1, 2, 63, 64, 65, 130],
        adapters=dict(r7=dict(rank=7, targets=ATTENTION + MLP)),
    ),
    # Biases, heads wider than hidden / heads, an untied unembedding, three layers, several files, the older config layout.
    dict(
        name="bias_untied_sharded_f32",
        config=dict(vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, attention_bias=True, rms_norm_eps=1e-5),
        theta=1e6, legacy_config=True, shard_size="24KB", dtype=torch.float32, lengths=[17, 2, 64, 5],
        adapters=dict(
            r3=dict(rank=3, targets=ATTENTION + MLP),
            attention_r1=dict(rank=1, targets=ATTENTION),
            mlp_r16=dict(rank=16, targets=MLP),
            unembed_r5=dict(rank=5, targets=ATTENTION + MLP + ["lm_head"]),
        ),
    ),
    # One key head per query head, f16 storage, the older config layout without head_dim at its default.
    dict(
        name="mha_tied_f16",
        config=dict(vocab_size=71, hidden_size=40, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=26, tie_word_embeddings=True),
        theta=500000.0, legacy_config=True, dtype=torch.float16, lengths=[1, 1, 33, 7, 100],
        adapters=dict(r4=dict(rank=4, targets=ATTENTION + MLP)),
    ),
    # Five query heads on one key head, three layers, bf16.
    dict(
        name="gqa5_tied_bf16",
        config=dict(vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=5,
                    num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
        theta=1e6, dtype=torch.bfloat16, lengths=[2, 65, 1, 130, 63, 64],
        adapters=dict(r8=dict(rank=8, targets=ATTENTION + MLP)),
    ),
    # Two query heads per key head, a wide head, untied, biases, bf16.
    dict(
        name="bias_untied_bf16",
        config=dict(vocab_size=150, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, attention_bias=True),
        theta=10000.0, dtype=torch.bfloat16, lengths=[40, 3, 20],
        adapters=dict(r3=dict(rank=3, targets=ATTENTION + MLP)),
    ),
]


# The other dense families, each in shapes that its configuration turns on. Values of the first adapter and no AdamW: the ops are those of above.
DENSE = [
    # Windows in one layer, yarn, biases.
    dict(
        name="qwen3_window_yarn_f32",
        config=dict(vocab_size=83, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=10, tie_word_embeddings=True, attention_bias=True, use_sliding_window=True,
                    sliding_window=9, layer_types=["full_attention", "sliding_attention", "sliding_attention"]),
        theta=10000.0, rope=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
        lengths=[1, 75, 9, 10, 130],
    ),
    # A head width of its own, all biases, llama3's rope, tied.
    dict(
        name="llama_llama3_bias_f32", family="llama",
        config=dict(vocab_size=101, hidden_size=48, intermediate_size=60, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=1, head_dim=18, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
                    rms_norm_eps=1e-5),
        theta=500.0, rope=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                               original_max_position_embeddings=64),
        lengths=[66, 2, 100],
    ),
    # Multi-head, linear rope, untied, no head width in the file.
    dict(
        name="llama_linear_f32", family="llama",
        config=dict(vocab_size=67, hidden_size=40, intermediate_size=28, num_hidden_layers=2, num_attention_heads=5,
                    tie_word_embeddings=False),
        theta=10000.0, rope=dict(rope_type="linear", factor=2.5), lengths=[30, 5],
    ),
    # Biases on queries, keys and values, windows from the second layer on, longrope with sequences on both sides of its limit.
    dict(
        name="qwen2_longrope_f32", family="qwen2",
        config=dict(vocab_size=89, hidden_size=42, intermediate_size=64, num_hidden_layers=3, num_attention_heads=3,
                    num_key_value_heads=1, tie_word_embeddings=True, use_sliding_window=True, sliding_window=33,
                    max_window_layers=1),
        theta=10000.0, rope=dict(rope_type="longrope", short_factor=[1.0, 1.1, 1.3, 1.5, 1.7, 2.0, 2.5],
                                 long_factor=[1.2, 1.9, 3.0, 5.0, 8.0, 13.0, 21.0], original_max_position_embeddings=48),
        lengths=[20, 80, 30, 49],
    ),
    # A window in every layer, dynamic rope.
    dict(
        name="mistral_window_f32", family="mistral",
        config=dict(vocab_size=79, hidden_size=56, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, sliding_window=17),
        theta=10000.0, rope=dict(rope_type="dynamic", factor=2.0), lengths=[90, 16, 17, 18],
    ),
]
# Mixtures of experts. An adapter with `experts` has pairs for each expert too, in the files' form of the Tinker tools; what it computes is what the model
# with merged weights does. Those of `stock` are as PEFT makes and loads them, experts too, of which the logits are kept.
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MOE = [
    # Weights divided by their sum, a dense layer between, experts with tensors of their own.
    dict(
        name="qwen3_moe_f32", family="qwen3_moe",
        config=dict(vocab_size=83, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=10, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
                    mlp_only_layers=[1], norm_topk_prob=True, tie_word_embeddings=False),
        theta=10000.0, lengths=[1, 70, 33],
        adapters=dict(experts_r4=dict(rank=4, targets=ATTENTION, experts=2)),
        stock=dict(stock_modules=dict(target_modules=["q_proj"] + MLP),
                   stock_parameters=dict(target_modules=["v_proj", "lm_head"], target_parameters=FUSED + ["mlp.down_proj.weight"],
                                         rank_pattern={"experts.down_proj": 1, "lm_head": 6},
                                         alpha_pattern={"mlp.down_proj.weight": 5, "v_.*": 3})),
    ),
    # Weights as they are, every second layer, all experts of a layer in one tensor.
    dict(
        name="qwen3_moe_fused_f32", family="qwen3_moe",
        config=dict(vocab_size=61, hidden_size=28, intermediate_size=30, num_hidden_layers=4, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=14, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=18,
                    decoder_sparse_step=2, norm_topk_prob=False, tie_word_embeddings=True),
        theta=10000.0, lengths=[40, 3], layout="fused",
        adapters=dict(experts_r3=dict(rank=3, targets=ATTENTION, experts=1)),
    ),
    # One tensor, the other way round.
    dict(
        name="qwen3_moe_flipped_f32", family="qwen3_moe",
        config=dict(vocab_size=61, hidden_size=26, intermediate_size=30, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=14, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=22,
                    norm_topk_prob=True, tie_word_embeddings=True, use_sliding_window=True, sliding_window=11),
        theta=10000.0, lengths=[30, 3], layout="flipped", adapters=dict(r2=dict(rank=2, targets=ATTENTION)),
    ),
]
# Attention over latents, experts chosen by sigmoids. MLPs are named by their paths, which those of experts do not end with.
LATENT = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DIRECT_QUERIES, LATENT_QUERIES = ["q_proj"] + LATENT, ["q_a_proj", "q_b_proj"] + LATENT
DENSE_MLP, SHARED = [f"mlp.{name}" for name in MLP], [f"shared_experts.{name}" for name in MLP]
DEEPSEEK = [
    # Queries of a latent, biases, yarn with both of its factors, groups, two shared experts, a layer that is not computed.
    dict(
        name="deepseek_moe_groups_f32", family="deepseek_v3",
        config=dict(vocab_size=83, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=3,
                    num_key_value_heads=3, q_lora_rank=14, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=6,
                    v_head_dim=10, attention_bias=True, n_routed_experts=9, n_group=3, topk_group=2, num_experts_per_tok=3,
                    moe_intermediate_size=11, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True,
                    routed_scaling_factor=2.5, tie_word_embeddings=False),
        theta=10000.0, rope=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1,
                                 mscale=1.3, mscale_all_dim=0.7),
        lengths=[1, 70, 64, 33], further_layer=True,
        adapters=dict(experts_r4=dict(rank=4, targets=LATENT_QUERIES + DENSE_MLP + SHARED, experts=2)),
        stock=dict(stock_parameters=dict(target_modules=LATENT, target_parameters=FUSED + ["shared_experts.up_proj.weight"],
                                         use_rslora=True, rank_pattern={"gate_up_proj": 2, "kv_b_proj": 1})),
    ),
    # Queries of the residual stream, halves that turn, weights as they are, one shared expert, all experts of a layer in one tensor.
    dict(
        name="deepseek_moe_direct_f32", family="deepseek_v3",
        config=dict(vocab_size=61, hidden_size=28, intermediate_size=30, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=18, qk_nope_head_dim=6, qk_rope_head_dim=8,
                    v_head_dim=14, rope_interleave=False, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
                    moe_intermediate_size=18, n_shared_experts=1, first_k_dense_replace=0, norm_topk_prob=False,
                    routed_scaling_factor=1.0, rms_norm_eps=1e-3, tie_word_embeddings=True),
        theta=500.0, rope=dict(rope_type="linear", factor=2.5), lengths=[130, 3, 65], layout="fused",
        adapters=dict(experts_r3=dict(rank=3, targets=DIRECT_QUERIES + SHARED, experts=1)),
    ),
    # A schedule of its own, one head, values wider than keys, yarn with one of its factors.
    dict(
        name="glm4_moe_lite_f32", family="glm4_moe_lite",
        config=dict(vocab_size=71, hidden_size=34, intermediate_size=26, num_hidden_layers=3, num_attention_heads=1,
                    num_key_value_heads=1, q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=4,
                    v_head_dim=22, n_routed_experts=6, n_group=1, topk_group=1, num_experts_per_tok=2,
                    moe_intermediate_size=12, n_shared_experts=1, mlp_layer_types=["sparse", "dense", "sparse"],
                    tie_word_embeddings=False),
        theta=10000.0, rope=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale_all_dim=1.0),
        lengths=[66, 2, 40],
        adapters=dict(experts_r4=dict(rank=4, targets=LATENT_QUERIES + DENSE_MLP + SHARED, experts=2)),
        stock=dict(stock_modules=dict(target_modules=["q_b_proj"] + MLP)),
    ),
    # No experts, bf16.
    dict(
        name="deepseek_latent_bf16", family="deepseek_v3", dtype=torch.bfloat16,
        config=dict(vocab_size=97, hidden_size=40, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
                    v_head_dim=16, first_k_dense_replace=2, tie_word_embeddings=True),
        theta=10000.0, lengths=[65, 130, 2, 64], adapters=dict(r4=dict(rank=4, targets=LATENT_QUERIES + DENSE_MLP)),
    ),
]
# gpt-oss, with windows that sequences are longer than and a limit that activations reach.
GPT_OSS = [
    # Yarn whose ramp is not of whole pairs, the alternation of windows that is the default, heads wider than hidden / heads.
    dict(
        name="gpt_oss_f32", family="gpt_oss",
        config=dict(vocab_size=83, hidden_size=36, intermediate_size=22, num_hidden_layers=3, num_attention_heads=6,
                    num_key_value_heads=2, head_dim=10, num_local_experts=5, num_experts_per_tok=2, sliding_window=9,
                    swiglu_alpha=1.3, swiglu_limit=0.4),
        theta=500.0, rope=dict(rope_type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                               original_max_position_embeddings=400),
        lengths=[1, 70, 33, 64],
        adapters=dict(experts_r4=dict(rank=4, targets=ATTENTION, experts=2), attention_r3=dict(rank=3, targets=ATTENTION)),
        stock=dict(stock_parameters=dict(target_modules=["q_proj"], target_parameters=FUSED)),
    ),
    # Experts in blocks of four bits, one key head, no biases of attention, tied, full attention first.
    dict(
        name="gpt_oss_mxfp4_f32", family="gpt_oss",
        config=dict(vocab_size=61, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=14, num_local_experts=4, num_experts_per_tok=3, sliding_window=17,
                    layer_types=["full_attention", "sliding_attention"], attention_bias=False, tie_word_embeddings=True,
                    swiglu_limit=1.5),
        theta=10000.0, lengths=[40, 3, 65], layout="mxfp4",
        adapters=dict(experts_r3=dict(rank=3, targets=ATTENTION, experts=1)),
    ),
]
# Gated delta nets in some layers, attention with gated heads of which a part turns in the others, norms that are stored less one; sequences that end before, at and behind a
# chunk of 64.
COMPOSITES = ["qwen3_5", "qwen3_5_moe"]
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
QWEN3_5 = [
    # One key and value head, widths that are no powers of two, three value heads on a key head, biases, a schedule of its own.
    dict(
        name="qwen3_5_f32", family="qwen3_5_text",
        config=dict(vocab_size=67, hidden_size=28, intermediate_size=38, num_hidden_layers=3, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=20, linear_conv_kernel_dim=4, linear_key_head_dim=6,
                    linear_value_head_dim=10, linear_num_key_heads=1, linear_num_value_heads=3, attention_bias=True,
                    layer_types=["linear_attention", "full_attention", "linear_attention"], tie_word_embeddings=False),
        theta=10000.0, rope=dict(partial_rotary_factor=0.3, mrope_interleaved=True, mrope_section=[1, 1, 1]),
        lengths=[1, 130, 64, 3, 65], adapters=dict(r4=dict(rank=4, targets=ATTENTION + DELTA + MLP)),
    ),
    # A part of a composite that also sees, with layers that predict further tokens; another convolution, yarn, tied, the default schedule.
    dict(
        name="qwen3_5_composite_f32", family="qwen3_5",
        config=dict(vocab_size=59, hidden_size=24, intermediate_size=30, num_hidden_layers=5, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, linear_conv_kernel_dim=2, linear_key_head_dim=12,
                    linear_value_head_dim=9, linear_num_key_heads=2, linear_num_value_heads=4, tie_word_embeddings=True),
        theta=500.0, rope=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, partial_rotary_factor=0.5),
        lengths=[63, 2, 128], adapters=dict(r3=dict(rank=3, targets=ATTENTION + DELTA + MLP)),
    ),
    # Experts, and one beside them that has a gate.
    dict(
        name="qwen3_5_moe_f32", family="qwen3_5_moe_text",
        config=dict(vocab_size=53, hidden_size=26, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
                    head_dim=12, linear_conv_kernel_dim=3, linear_key_head_dim=8, linear_value_head_dim=14,
                    linear_num_key_heads=2, linear_num_value_heads=2, num_experts=5, num_experts_per_tok=2,
                    moe_intermediate_size=14, shared_expert_intermediate_size=18, layer_types=["linear_attention"] * 2 +
                    ["full_attention"], tie_word_embeddings=False),
        theta=10000.0, rope=dict(partial_rotary_factor=1.0), lengths=[66, 1, 100],
        adapters=dict(experts_r4=dict(rank=4, targets=ATTENTION + DELTA + [f"shared_expert.{name}" for name in MLP],
                                      experts=2)),
    ),
    # The same as a part of a composite, which has all experts of a layer in one tensor.
    dict(
        name="qwen3_5_moe_composite_f32", family="qwen3_5_moe",
        config=dict(vocab_size=41, hidden_size=22, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                    head_dim=10, linear_conv_kernel_dim=4, linear_key_head_dim=5, linear_value_head_dim=7,
                    linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=3,
                    moe_intermediate_size=10, shared_expert_intermediate_size=8,
                    layer_types=["full_attention", "linear_attention"], tie_word_embeddings=False),
        theta=10000.0, rope=dict(partial_rotary_factor=0.4), lengths=[70, 2],
        adapters=dict(experts_r2=dict(rank=2, targets=ATTENTION + DELTA, experts=1)),
    ),
    # bf16.
    dict(
        name="qwen3_5_bf16", family="qwen3_5_text", dtype=torch.bfloat16,
        config=dict(vocab_size=47, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=16, linear_conv_kernel_dim=4, linear_key_head_dim=16,
                    linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                    layer_types=["linear_attention", "full_attention"], tie_word_embeddings=True),
        theta=10000.0, lengths=[65, 130, 2, 64], adapters=dict(r4=dict(rank=4, targets=ATTENTION + DELTA + MLP)),
    ),
]
# Linear layers but the unembedding in bytes with a scale for each block of 128 x 128, sizes that no block divides.
BYTES = [
    dict(
        name="qwen3_fp8_f32",
        config=dict(vocab_size=67, hidden_size=130, intermediate_size=270, num_hidden_layers=1, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=44, tie_word_embeddings=True),
        theta=10000.0, lengths=[20, 3], bytes=True,
    ),
]
for spec in DENSE + MOE + DEEPSEEK + GPT_OSS + BYTES + QWEN3_5:
    FIXTURES.append(dict(dtype=torch.float32, adapters=dict(r4=dict(rank=4, targets=ATTENTION + MLP)), adamw=False) | spec)

# Adapters of the token embedding, beside others. A padding token would have no gradient in torch. With `table` an adapter's file is what PEFT writes if it is told
# nothing: the base's tables are in it too.
FIXTURES += [
    # Tied, and the embedding beside the unembedding: modules of their own.
    dict(
        name="embedding_tied_f32",
        config=dict(vocab_size=87, hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=12, tie_word_embeddings=True, pad_token_id=None),
        theta=10000.0, dtype=torch.float32, lengths=[1, 65, 2, 40],
        adapters=dict(
            embedding_r5=dict(rank=5, targets=ATTENTION + ["embed_tokens"]),
            both_r2=dict(rank=2, targets=["embed_tokens", "lm_head"], table=True),
        ),
    ),
    # Untied, bf16.
    dict(
        name="embedding_untied_bf16",
        config=dict(vocab_size=61, hidden_size=40, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, pad_token_id=None),
        theta=10000.0, dtype=torch.bfloat16, lengths=[40, 3, 64], adamw=False,
        adapters=dict(embedding_r3=dict(rank=3, targets=ATTENTION + MLP + ["embed_tokens"], table=True)),
    ),
]


# Linear layers but the unembedding in four bits, in the layouts that checkpoints have. `group` -1 is one scale for all inputs of an output; `plain` are the names that stay as they are.
FIXTURES += [dict(dtype=torch.float32, adapters=dict(r4=dict(rank=4, targets=ATTENTION + MLP)), adamw=False) | spec for spec in [
    # Biases of its own, and others that are zeros, as AutoGPTQ writes them.
    dict(
        name="qwen2_gptq_f32", family="qwen2",
        config=dict(vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, tie_word_embeddings=True),
        theta=10000.0, lengths=[20, 3], int4=dict(layout="gptq", group=32),
    ),
    # Groups that kernels do not have, and a layer that is not quantized.
    dict(
        name="llama_gptq_v2_f32", family="llama",
        config=dict(vocab_size=67, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=16, tie_word_embeddings=False),
        theta=10000.0, lengths=[20, 3], int4=dict(layout="gptq_v2", group=16, plain="layers.1.mlp.down_proj"),
    ),
    dict(
        name="qwen3_awq_f32",
        config=dict(vocab_size=67, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=64, tie_word_embeddings=True),
        theta=10000.0, lengths=[20, 3], int4=dict(layout="awq", group=64),
    ),
    # Rows that no word divides.
    dict(
        name="qwen3_compressed_channel_f32",
        config=dict(vocab_size=67, hidden_size=130, intermediate_size=83, num_hidden_layers=1, num_attention_heads=3,
                    num_key_value_heads=1, head_dim=22, tie_word_embeddings=True),
        theta=10000.0, lengths=[20, 3], int4=dict(layout="compressed", group=-1),
    ),
    dict(
        name="qwen3_moe_compressed_f32", family="qwen3_moe",
        config=dict(vocab_size=83, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                    norm_topk_prob=True, tie_word_embeddings=False),
        theta=10000.0, lengths=[33, 5], int4=dict(layout="compressed_zeros", group=32),
        adapters=dict(experts_r4=dict(rank=4, targets=ATTENTION, experts=2)),
    ),
]]


def random_model(spec, seed):
    """A checkpoint of `spec` with weights large enough that logits differ, and norms and biases that are not ones and zeros."""
    torch.manual_seed(seed)
    rope = dict(rope_type="default", rope_theta=spec["theta"]) | spec.get("rope", {})
    settings = dict(max_position_embeddings=512, initializer_range=0.15, bos_token_id=0, eos_token_id=2, pad_token_id=0,
                    rope_parameters=rope) | spec["config"]
    family = spec.get("family", "qwen3")
    if family in COMPOSITES:
        vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=settings["hidden_size"],
                      patch_size=2, num_position_embeddings=4)
        tied = settings["tie_word_embeddings"]
        config = AutoConfig.for_model(family, text_config=settings, vision_config=vision, tie_word_embeddings=tied)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        config = AutoConfig.for_model(family, **settings)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and family.startswith("qwen3_5") and "linear_attn" not in name:
                parameter.copy_(0.5 * (torch.rand_like(parameter) - 0.5))
            elif name.endswith("A_log"):
                # Of what a token leaves, 60 to 99 % are there for the next.
                parameter.copy_(-4.0 + 3.0 * torch.rand_like(parameter))
            elif name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif "norm" in name:
                parameter.copy_(0.5 + torch.rand_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
            elif spec.get("layout") == "mxfp4" and ".experts." in name:
                parameter.copy_(convert_moe_packed_tensors(*mxfp4_tensors(name, parameter.shape).values(), dtype=torch.float32))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model.to(spec["dtype"])


def mxfp4_tensors(name, shape):
    """Blocks and scales of random numbers of four bits for the experts of a parameter of this name and shape, `[experts, in, out]`."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    experts, width, rows = shape
    blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8, generator=generator)
    # Numbers up to 6 times 1/64 to 1/8.
    scales = torch.randint(121, 125, (experts, rows, width // 32), dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def quantize_experts(directory):
    """Rewrites a checkpoint so that its experts are the blocks and scales that they were made of."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors |= mxfp4_tensors(name, tensors.pop(name).shape)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_model(model, spec, directory):
    model.save_pretrained(directory, max_shard_size=spec.get("shard_size", "5GB"))
    if spec.get("legacy_config"):
        path = directory / "config.json"
        config = json.loads(path.read_text())
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = None
        config["torch_dtype"] = config.pop("dtype")
        config.pop("layer_types", None)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def fuse_experts(path, layout):
    """Rewrites a checkpoint so that all experts of a layer are one tensor: `[experts, out, in]`, or flipped `[experts, in, out]`."""
    tensors, experts = load_file(path), {}
    for name in [name for name in tensors if ".mlp.experts." in name]:
        prefix, rest = name.split(".experts.")
        expert, projection, _ = rest.split(".")
        experts.setdefault(prefix, {}).setdefault(int(expert), {})[projection] = tensors.pop(name)
    for prefix, of_layer in experts.items():
        each = [of_layer[expert] for expert in sorted(of_layer)]
        fused = dict(gate_up_proj=torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in each]),
                     down_proj=torch.stack([e["down_proj"] for e in each]))
        for name, tensor in fused.items():
            tensors[f"{prefix}.experts.{name}"] = (tensor.transpose(1, 2) if layout == "flipped" else tensor).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def add_further_layer(path, number):
    """Adds to a checkpoint some of what DeepSeek's has behind the layers, which transformers leaves aside."""
    tensors = load_file(path)
    for name in ("embed_tokens", "eh_proj", "enorm", "mlp.experts.0.gate_proj", "shared_head.head"):
        tensors[f"model.layers.{number}.{name}.weight"] = torch.randn(3, 2)
    save_file(tensors, path, metadata={"format": "pt"})


def add_predicting_layer(path):
    """As `add_further_layer`, of Qwen3.5's, which are called otherwise."""
    tensors = load_file(path)
    for name in ("fc", "pre_fc_norm_embedding", "layers.0.mlp.down_proj"):
        tensors[f"mtp.{name}.weight"] = torch.randn(3, 2)
    save_file(tensors, path, metadata={"format": "pt"})


def in_blocks(scales, weight):
    """Each scale as often as its block has elements."""
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]


def round_to_bytes(model):
    """Rounds linear layers to what bytes and scales of blocks can say; the bytes and scales."""
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        weight = module.weight.data
        blocks = [-(-size // 128) for size in weight.shape]
        scales = 0.001 * (0.5 + torch.rand(blocks))
        narrow = (weight / in_blocks(scales, weight)).clamp(-448, 448).to(torch.float8_e4m3fn)
        module.weight.data = narrow.float() * in_blocks(scales, weight)
        tensors |= {f"{name}.weight": narrow, f"{name}.weight_scale_inv": scales}
    return tensors


def write_bytes(directory, of_layers):
    """Puts bytes and scales in the place of the weights of a checkpoint."""
    path, config_path = directory / "model.safetensors", directory / "config.json"
    save_file(load_file(path) | of_layers, path, metadata={"format": "pt"})
    config = json.loads(config_path.read_text())
    config["quantization_config"] = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic",
                                         weight_block_size=[128, 128])
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def words(values, axis, order=range(8)):
    """Eight numbers of four bits to a word of 32, along an axis: place `k` of a word has number `order[k]`."""
    values = values.to(torch.int64).movedim(axis, -1)
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % 8)).unflatten(-1, (-1, 8))[..., list(order)]
    packed = (values << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed < 1 << 31, packed, packed - (1 << 32)).to(torch.int32).movedim(-1, axis).contiguous()


def in_four_bits(name, weight, layout, group):
    """The tensors of a matrix `[out, in]` that is rounded to four bits, and what they stand for."""
    rows, columns = weight.shape
    group = columns if group == -1 else group
    groups = weight.reshape(rows, -1, group)
    if layout == "compressed":
        scales, zeros = groups.abs().amax(-1) / 7.5, torch.full(groups.shape[:2], 8)
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (most - least) / 15
        zeros = (-least / scales).round().to(torch.int64)
    less = 1 if layout == "gptq" else 0
    # Numbers as files have them.
    scales, zeros = scales.to(torch.float16), zeros.clamp(less, 15)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15).to(torch.int64)
    dense = ((codes - zeros[..., None]).float() * scales.float()[..., None]).reshape(rows, columns)
    codes, stem = codes.reshape(rows, columns), name.removesuffix("weight")
    if layout in ("gptq", "gptq_v2"):
        tensors = dict(qweight=words(codes.T, 0), qzeros=words(zeros.T - less, 1), scales=scales.T.contiguous(),
                       g_idx=(torch.arange(columns) // group).to(torch.int32))
    elif layout == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = dict(qweight=words(codes.T, 1, order), qzeros=words(zeros.T, 1, order), scales=scales.T.contiguous())
    else:
        tensors = dict(weight_packed=words(codes, 1), weight_scale=scales, weight_shape=torch.tensor([rows, columns]))
        if layout == "compressed_zeros":
            tensors["weight_zero_point"] = words(zeros, 0)
    return {stem + last: tensor for last, tensor in tensors.items()}, dense


def int4_config(layout, group, plain=None):
    """What the tools that write such checkpoints say of them."""
    exceptions = ["lm_head"] + ([plain] if plain else [])
    if layout in ("gptq", "gptq_v2"):
        return dict(quant_method="gptq", bits=4, group_size=group, desc_act=False, sym=False, lm_head=False, checkpoint_format=layout,
                    pack_dtype="int32", meta=dict(quantizer=["gptqmodel:2.2.0"], damp_percent=0.05, true_sequential=True))
    if layout == "awq":
        return dict(quant_method="awq", bits=4, group_size=group, version="gemm", zero_point=True, modules_to_not_convert=None)
    weights = dict(num_bits=4, type="int", symmetric=layout == "compressed", strategy="channel" if group == -1 else "group",
                   group_size=None if group == -1 else group, actorder=None, block_structure=None, dynamic=False,
                   observer="minmax", observer_kwargs={})
    return dict(quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed", kv_cache_scheme=None,
                global_compression_ratio=None, ignore=exceptions,
                config_groups=dict(group_0=dict(weights=weights, targets=["Linear"], input_activations=None, output_activations=None)))


def round_to_four_bits(directory, layout, group, plain=None):
    """Rounds the linear layers of a checkpoint to what four bits can say; those bits, by the names of the tensors that they stand for."""
    path, rounded = directory / "model.safetensors", {}
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("_proj.weight") and not (plain and plain in name):
            rounded[name], tensors[name] = in_four_bits(name, tensors[name], layout, group)
    save_file(tensors, path, metadata={"format": "pt"})
    return rounded


def write_four_bits(directory, rounded, layout, **settings):
    """Puts them in the place of the weights of a checkpoint."""
    path, config_path = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(path)
    for name, of_layer in rounded.items():
        rows = tensors.pop(name).shape[0]
        bias = name.removesuffix("weight") + "bias"
        if layout == "gptq" and bias not in tensors:
            tensors[bias] = torch.zeros(rows, dtype=torch.float16)
        tensors |= of_layer
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads(config_path.read_text())
    config["quantization_config"] = int4_config(layout, **settings)
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_model(directory, dtype):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager",
                                                experts_implementation="eager").eval()


def token_lists(spec, seed):
    generator = torch.Generator().manual_seed(seed)
    vocab = spec["config"]["vocab_size"]
    lists = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in spec["lengths"]]
    lists[0][0], lists[-1][-1] = vocab - 1, 0
    return lists


def next_logprobs(logits, tokens):
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:]).reshape(-1, 1)).reshape(-1)


def observe(model, tokens):
    """Runs one sequence alone and returns everything worth comparing."""
    base = model.get_base_model() if isinstance(model, (PeftModel, WithExperts)) else model
    seen, hooks = {}, []

    def keep(name):
        def hook(_module, _inputs, output):
            value = output[0] if isinstance(output, tuple) else output
            seen[name] = value.detach().reshape(len(tokens), -1).clone()
        return hook

    hooks.append(base.model.embed_tokens.register_forward_hook(keep("embeds")))
    for i, layer in enumerate(base.model.layers):
        hooks.append(layer.register_forward_hook(keep(f"layer_out.{i}")))
    hooks.append(base.model.norm.register_forward_hook(keep("final_norm")))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    for hook in hooks:
        hook.remove()
    seen["logits"] = logits.clone()
    seen["next_logprobs"] = next_logprobs(logits, tokens)
    return seen


def greedy(model, tokens):
    """Continues a sequence greedily without a cache; None if a choice is too close to call."""
    tokens, chosen, logprobs = list(tokens), [], []
    for _ in range(GREEDY_TOKENS):
        with torch.no_grad():
            row = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        best = row.topk(2)
        if best.values[0] - best.values[1] < GREEDY_GAP_MIN:
            return None
        chosen.append(best.indices[0].item())
        logprobs.append(torch.log_softmax(row.float(), dim=-1)[chosen[-1]].item())
        tokens.append(chosen[-1])
    return dict(greedy=torch.tensor(chosen, dtype=torch.int64), greedy_logprobs=torch.tensor(logprobs))


def outputs(model, sequences, prefix="", with_greedy=True):
    values = {}
    for n, tokens in enumerate(sequences):
        seen = observe(model, tokens)
        if with_greedy:
            continuation = greedy(model, tokens)
            if continuation is None:
                return None
            seen |= continuation
        values |= {f"{prefix}s.{n}.{name}": value.contiguous() for name, value in seen.items()}
    return values


def cross_entropy(model, sequences):
    """Sum over all sequences of the next-token cross-entropy."""
    total = 0.0
    for tokens in sequences:
        if len(tokens) > 1:
            total = total - next_logprobs(model(input_ids=torch.tensor([tokens])).logits[0], tokens).sum()
    return total


def peft_named(model, tensor_of):
    """`tensor_of(parameter)` of every LoRA parameter under the name that PEFT saves it by."""
    if isinstance(model, WithExperts):
        of_experts = {name: tensor_of(pair).detach().float().clone() for name, pair in model.pairs.items()}
        return of_experts | peft_named(model.peft, tensor_of)
    named = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            named[name.replace(".default", "")] = tensor_of(parameter).detach().float().clone()
    saved = {name for name in get_peft_model_state_dict(model, save_embedding_layers=False)}
    assert saved == set(named), saved ^ set(named)
    return named


def gradients(model, sequences, prefix=""):
    model.zero_grad()
    cross_entropy(model, sequences).backward()
    return {prefix + name: grad for name, grad in peft_named(model, lambda p: p.grad).items()}


def adamw(model, sequences, run, lr, weight_decay, clip):
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), eps=1e-12, weight_decay=weight_decay)
    losses, norms = [], []
    for _ in range(ADAMW_STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model, sequences)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip).item())
        optimizer.step()
    with torch.no_grad():
        losses.append(cross_entropy(model, sequences).item())
    values = {"losses": torch.tensor(losses), "grad_norms": torch.tensor(norms)}
    values |= {f"final.{name}": value for name, value in peft_named(model, lambda p: p).items()}
    return {f"adamw.{run}.{name}": value for name, value in values.items()}


def make_adapter(model, spec, seed, directory):
    """Writes a PEFT adapter whose A and B are both random and not zero."""
    write_random(model, dict(r=spec["rank"], lora_alpha=32, target_modules=spec["targets"]), seed, directory)


def make_stock(model_directory, settings, seed, directory):
    """Writes a PEFT adapter of an unmodified PEFT, and loads it there."""
    transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING.update(MOE_TARGETS)
    write_random(load_model(model_directory, torch.float32), dict(r=4, lora_alpha=32) | settings, seed, directory)
    model = PeftModel.from_pretrained(load_model(model_directory, torch.float32), directory).eval()
    transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING.clear()
    return model


def write_random(model, settings, seed, directory):
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
                                            base_model_name_or_path="reference", **settings))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * (0.1 if "_A.default" in name else 0.1 * settings["r"] / 32))
    peft.save_pretrained(directory, save_embedding_layers="auto" if settings.get("table") else False)
    (directory / "README.md").unlink(missing_ok=True)
    config_path = directory / "adapter_config.json"
    written = json.loads(config_path.read_text())
    written["base_model_name_or_path"] = "reference"
    for key in ("target_modules", "target_parameters"):
        if isinstance(written[key], list):
            written[key] = sorted(written[key])
    config_path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def is_of_experts(name):
    return ".experts." in name and not name.endswith("bias")


class WithExperts:
    """A PEFT model whose experts have pairs too: their weights are made of the pairs before each pass, so that gradients reach them."""

    NAMES = dict(w1="gate", w3="up", w2="down")

    def __init__(self, peft, tensors, scale):
        self.peft, self.scale = peft, scale
        self.pairs = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items() if ".experts." in name}
        self.plain = {name: parameter.detach().clone() for name, parameter in peft.named_parameters() if is_of_experts(name)}
        self.is_gpt_oss = peft.get_base_model().config.model_type == "gpt_oss"

    def weights(self):
        merged = {}
        for name, plain in self.plain.items():
            layer = name.split(".experts.")[0]
            delta = lambda w: torch.einsum("eor,eri->eoi", self.pairs[f"{layer}.experts.{w}.lora_B.weight"],
                                           self.pairs[f"{layer}.experts.{w}.lora_A.weight"]) * self.scale
            if name.endswith("down_proj"):
                rows = delta("w2")
            elif self.is_gpt_oss:
                # A row of gate, one of up, and so on.
                rows = torch.stack([delta("w1"), delta("w3")], dim=2).flatten(1, 2)
            else:
                rows = torch.cat([delta("w1"), delta("w3")], dim=1)
            merged[name] = plain + (rows.transpose(1, 2) if self.is_gpt_oss else rows)
        return merged

    def __call__(self, **inputs):
        return torch.func.functional_call(self.peft, self.weights(), kwargs=inputs)

    def get_base_model(self):
        return self.peft.get_base_model()

    def zero_grad(self):
        self.peft.zero_grad()
        for pair in self.pairs.values():
            pair.grad = None


def add_experts(model, spec, seed, directory):
    """Adds pairs of experts to an adapter that was written."""
    torch.manual_seed(seed)
    path, rank = directory / "adapter_model.safetensors", spec["experts"]
    tensors = load_file(path)
    for name, parameter in model.named_parameters():
        if not is_of_experts(name):
            continue
        layer = "base_model.model." + name.split(".experts.")[0]
        count, out, width = parameter.shape
        if model.config.model_type == "gpt_oss":
            out, width = width, out
        for w, rows in (("w2", out),) if name.endswith("down_proj") else (("w1", out // 2), ("w3", out // 2)):
            tensors[f"{layer}.experts.{w}.lora_A.weight"] = 0.1 * torch.randn(count, rank, width)
            tensors[f"{layer}.experts.{w}.lora_B.weight"] = 0.1 * spec["rank"] / 32 * torch.randn(count, rows, rank)
    save_file(tensors, path, metadata={"format": "pt"})
    config_path = directory / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["target_modules"] = sorted(config["target_modules"] + ["w1", "w2", "w3"])
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_adapter(base_directory, adapter_directory, dtype):
    tensors = load_file(adapter_directory / "adapter_model.safetensors")
    if not any(".experts." in name for name in tensors):
        return PeftModel.from_pretrained(load_model(base_directory, dtype), adapter_directory, is_trainable=True).eval()
    config = LoraConfig.from_pretrained(adapter_directory)
    config.inference_mode = False
    config.target_modules = {name for name in config.target_modules if name not in WithExperts.NAMES}
    peft = get_peft_model(load_model(base_directory, dtype), config)
    set_peft_model_state_dict(peft, {name: tensor for name, tensor in tensors.items() if ".experts." not in name})
    return WithExperts(peft.eval(), tensors, config.lora_alpha / config.r)


def make_fixture(spec, seed):
    """Writes one fixture; False if a greedy choice was too close for this seed."""
    directory = ROOT / spec["name"]
    shutil.rmtree(directory, ignore_errors=True)
    model_directory = directory / "model"
    model = random_model(spec, seed)
    of_layers = round_to_bytes(model) if "bytes" in spec else None
    save_model(model, spec, model_directory)
    rounded = round_to_four_bits(model_directory, **spec["int4"]) if "int4" in spec else None
    sequences = token_lists(spec, seed + 1)
    (directory / "tokens.json").write_text(json.dumps(sequences) + "\n")

    is_bf16 = spec["dtype"] == torch.bfloat16
    values = outputs(load_model(model_directory, torch.float32), sequences)
    if values is None:
        return False
    if is_bf16:
        values |= outputs(load_model(model_directory, torch.bfloat16), sequences, "bf16.", with_greedy=False)
    save_file(values, directory / "base.safetensors")

    for index, (name, adapter) in enumerate(spec["adapters"].items()):
        make_adapter(load_model(model_directory, torch.float32), adapter, seed + 10 + index, directory / name)
        if "experts" in adapter:
            add_experts(load_model(model_directory, torch.float32), adapter, seed + 10 + index, directory / name)
        model = load_adapter(model_directory, directory / name, torch.float32)
        # The first adapter of a fixture has every value, the others what depends on the modules they touch.
        values = outputs(model, sequences)
        if values is None:
            return False
        if index > 0:
            values = {key: value for key, value in values.items() if key.split(".")[2] in ("logits", "next_logprobs")}
        values |= gradients(model, sequences)
        if index == 0 and spec.get("adamw", True):
            for run, settings in ADAMW_RUNS.items():
                values |= adamw(model, sequences, run, **settings)
        if is_bf16:
            half = load_adapter(model_directory, directory / name, torch.bfloat16)
            values |= outputs(half, sequences, "bf16.", with_greedy=False)
            values |= gradients(half, sequences, "bf16.")
        if "embed_tokens" not in adapter["targets"]:
            values = {key: value for key, value in values.items() if not key.endswith("embeds")}
        save_file(values, directory / f"{name}.safetensors")
    for index, (name, settings) in enumerate(spec.get("stock", {}).items()):
        model = make_stock(model_directory, settings, seed + 50 + index, directory / name)
        values = outputs(model, sequences, with_greedy=False)
        values = {key: value for key, value in values.items() if key.split(".")[2] in ("logits", "next_logprobs")}
        save_file(values, directory / f"{name}.safetensors")
    if spec.get("layout") == "mxfp4":
        quantize_experts(model_directory)
    elif "layout" in spec:
        fuse_experts(model_directory / "model.safetensors", spec["layout"])
    if of_layers is not None:
        write_bytes(model_directory, of_layers)
    if rounded is not None:
        write_four_bits(model_directory, rounded, **spec["int4"])
    if "further_layer" in spec:
        add_further_layer(model_directory / "model.safetensors", spec["config"]["num_hidden_layers"])
    if spec.get("family") in COMPOSITES:
        add_predicting_layer(model_directory / "model.safetensors")
    return True


def main():
    torch.set_num_threads(1)
    only = sys.argv[1:]
    for place, spec in enumerate(FIXTURES):
        if only and spec["name"] not in only:
            continue
        seed = 1000 * (place + 1)
        while not make_fixture(spec, seed):
            seed += 100
        size = sum(path.stat().st_size for path in (ROOT / spec["name"]).rglob("*") if path.is_file())
        print(f"{spec['name']}: seed {seed}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
