"""Holds adapters in stock PEFT's form, read and written, against stock PEFT.

    pip install torch transformers peft safetensors
    cargo build && python tests/reference/check_peft_forms.py target/debug/strata [FIXTURE...]

Of each fixture, every adapter and those that PEFT writes here (`STOCK`, random A and B) are exported in PEFT's form by `strata export` and loaded by the
`PeftModel.from_pretrained` of an unmodified PEFT, which must neither miss a key nor find one it does not expect, and computes the logits that `strata trace --adapter` does. What PEFT wrote
is read by `strata trace` as it is, and again after `strata export --format tinker`. Adapters of composites are made on the composite too (`OF_COMPOSITE`), where modules have
other paths.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

ROOT = pathlib.Path(__file__).parent / "fixtures"
TOLERANCE = 1e-4
# Of gated delta nets, whose chunks the reference computes in another order.
DELTA_TOLERANCE = 5e-4
MLP = ["gate_proj", "up_proj", "down_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHARED = [f"mlp.shared_experts.{name}.weight" for name in MLP]
LATENT = dict(target_modules=["kv_b_proj", "o_proj"])
SHARED_EXPERT = [f"mlp.shared_expert.{name}.weight" for name in MLP]
TEXT = r".*language_model.*\.(q_proj|o_proj|in_proj_qkv|in_proj_a|out_proj)"

# Adapters as people make them with stock PEFT.
STOCK = {
    "tied_gqa3_f32": dict(
        tied_unembed=dict(target_modules=["q_proj", "down_proj", "lm_head"]),
        patterns=dict(target_modules="all-linear", rank_pattern={r".*v_proj": 2, "mlp.up_proj": 5},
                      alpha_pattern={"self_attn.*": 3, "up_proj": 7.5}, use_rslora=True),
    ),
    "bias_untied_sharded_f32": dict(
        patterns=dict(target_modules=["q_proj", "k_proj", "up_proj", "lm_head"], exclude_modules=["k_proj"],
                      layers_to_transform=[0, 1, 2], rank_pattern={"q_proj": 1}, alpha_pattern={"lm_head|up_proj": 9}),
    ),
    "qwen3_moe_f32": dict(
        # PEFT takes these for the experts, as pairs of twice the rank for gate and up.
        converted=dict(target_modules=["q_proj"] + MLP),
        parameters=dict(target_modules=["v_proj", "lm_head"], target_parameters=FUSED + ["mlp.down_proj.weight"],
                        rank_pattern={"mlp.experts.down_proj": 1, "lm_head": 6}, alpha_pattern={"mlp.down_proj.weight": 5}),
        gate_up_alone=dict(target_modules=[], target_parameters=["gate_up_proj"], use_rslora=True),
        down_alone=dict(target_modules=["k_proj"], target_parameters=["experts.down_proj"]),
    ),
    "deepseek_moe_groups_f32": dict(
        converted=dict(target_modules=["q_a_proj", "up_proj", "gate_proj", "down_proj"]),
        parameters=LATENT | dict(target_parameters=FUSED + SHARED + ["mlp.gate_proj.weight"],
                                 rank_pattern={"shared_experts.up_proj.weight": 2}),
    ),
    "glm4_moe_lite_f32": dict(
        converted=dict(target_modules=["q_b_proj"] + MLP),
        parameters=LATENT | dict(target_parameters=FUSED[:1] + SHARED),
    ),
    "gpt_oss_f32": dict(
        parameters=dict(target_modules=["q_proj", "o_proj"], target_parameters=FUSED, rank_pattern={"gate_up_proj": 2}),
        down_alone=dict(target_modules=[], target_parameters=["mlp.experts.down_proj"]),
    ),
    "qwen3_5_f32": dict(
        patterns=dict(target_modules="all-linear", rank_pattern={"in_proj_qkv": 2, r"linear_attn\.out_proj": 5, ".*q_proj": 3},
                      alpha_pattern={"in_proj_[ab]": 3, "up_proj": 7.5}, use_rslora=True),
        tables=dict(target_modules=["embed_tokens", "lm_head", "in_proj_z"]),
        parameters=dict(target_modules=["in_proj_b"], target_parameters=["linear_attn.in_proj_qkv.weight", "mlp.up_proj.weight"]),
    ),
    "qwen3_5_composite_f32": dict(
        everything=dict(target_modules="all-linear"),
        tied_unembed=dict(target_modules=["in_proj_qkv", "q_proj", "out_proj", "lm_head"], rank_pattern={"in_proj_qkv": 2}),
    ),
    "qwen3_5_moe_f32": dict(
        # Those of experts are no modules, and PEFT has no conversion here: the shared expert's.
        modules=dict(target_modules=["q_proj"] + MLP),
        shared_expert=dict(target_modules=[f"shared_expert.{name}" for name in MLP]),
        parameters=dict(target_modules=["in_proj_qkv", "lm_head"], target_parameters=FUSED + SHARED_EXPERT,
                        rank_pattern={"mlp.experts.down_proj": 1}),
        gate_up_alone=dict(target_modules=["in_proj_z"], target_parameters=["gate_up_proj"]),
    ),
    "qwen3_5_moe_composite_f32": dict(
        parameters=dict(target_modules=["in_proj_a", "lm_head"], target_parameters=FUSED + SHARED_EXPERT),
    ),
}
# The same on the composite, of which the part that sees carries nothing.
OF_COMPOSITE = {
    "qwen3_5_composite_f32": dict(
        patterns=dict(target_modules=TEXT, rank_pattern={r"model\.language_model\.layers\.\d\.self_attn\.q_proj": 2},
                      alpha_pattern={r"^model\.language_model\.layers\.\d\.linear_attn\.in_proj_a": 77}),
        tables=dict(target_modules=["embed_tokens", "lm_head", "in_proj_z"]),
    ),
    "qwen3_5_moe_composite_f32": dict(
        parameters=dict(target_modules=TEXT, rank_pattern={r"language_model.*gate_up_proj": 2}, target_parameters=SHARED_EXPERT[:1] + [
            f"model.language_model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)]),
    ),
}
# Beside them: experts whose weights lie in one tensor, f16, and the other families.
EXPORTED = list(STOCK) + ["qwen3_moe_fused_f32", "deepseek_moe_direct_f32", "mha_tied_f16",
                          "llama_llama3_bias_f32", "qwen2_longrope_f32", "mistral_window_f32"]


def load_model(fixture, of_class=AutoModelForCausalLM):
    return of_class.from_pretrained(fixture / "model", dtype=torch.float32, attn_implementation="eager",
                                    experts_implementation="eager").eval()


def loaded_by_peft(fixture, directory, of_class=AutoModelForCausalLM):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(load_model(fixture, of_class), directory)
    said = [str(warning.message) for warning in caught]
    # PEFT looks for the keys of patterns among modules only, and finds those of parameters nowhere; it applies them.
    known = ("The following rank_pattern keys", "The following alpha_pattern keys", "Model has `tie_word_embeddings=True`",
             "`is_gradient_checkpointing` is deprecated")
    assert all(text.startswith(known) for text in said), said
    result = set_peft_model_state_dict(model, load_peft_weights(directory))
    missing = [name for name in result.missing_keys if "lora_" in name]
    assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)
    return model.eval()


def logits_of_peft(model, fixture):
    with torch.no_grad():
        return [model(input_ids=torch.tensor([tokens])).logits[0] for tokens in json.loads((fixture / "tokens.json").read_text())]


def traced(strata, fixture, adapter, out):
    subprocess.run([strata, "trace", fixture / "model", "--tokens", fixture / "tokens.json", "--adapter", adapter, "--dtype", "f32",
                    "--out", out], check=True)
    values = load_file(out)
    return [values[f"s.{n}.logits"] for n in range(sum(name.endswith(".logits") for name in values))]


def exported(strata, fixture, adapter, out, form):
    subprocess.run([strata, "export", adapter, out, "--base", fixture / "model", "--format", form], check=True,
                   stdout=subprocess.DEVNULL)
    return out


def difference(ours, theirs):
    assert len(ours) == len(theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs))


def make_stock(fixture, settings, directory, of_class):
    torch.manual_seed(1)
    model = get_peft_model(load_model(fixture, of_class), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory, save_embedding_layers=False)
    assert difference(logits_of_peft(model.eval(), fixture), logits_of_peft(load_model(fixture), fixture)) > 0.01


def main():
    strata, only = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    warnings.simplefilter("ignore")
    for fixture in [ROOT / name for name in EXPORTED if not only or name in only]:
        with tempfile.TemporaryDirectory() as scratch:
            scratch = pathlib.Path(scratch)
            stock = {}
            for kind, of_class, all_settings in (("made", AutoModelForCausalLM, STOCK),
                                                 ("composite", AutoModelForImageTextToText, OF_COMPOSITE)):
                for name, settings in all_settings.get(fixture.name, {}).items():
                    directory = scratch / f"{kind}_{name}"
                    make_stock(fixture, settings, directory, of_class)
                    stock[directory] = (of_class, settings)
            own = [path.parent for path in sorted(fixture.glob("*/adapter_config.json"))]
            for adapter in own + list(stock):
                # Those of the fixtures have patterns where the ones of the same name have them here.
                of_class, settings = stock.get(adapter, (None, STOCK.get(fixture.name, {}).get(adapter.name[6:], {})))
                ours = traced(strata, fixture, adapter, scratch / "out.safetensors")
                peft = exported(strata, fixture, adapter, scratch / f"{adapter.name}_peft", "peft")
                errors = dict(written=difference(ours, logits_of_peft(loaded_by_peft(fixture, peft), fixture)))
                errors |= dict(read_again=difference(ours, traced(strata, fixture, peft, scratch / "out.safetensors")))
                if adapter in stock:
                    errors |= dict(read=difference(ours, logits_of_peft(loaded_by_peft(fixture, adapter, of_class), fixture)))
                if "alpha_pattern" not in settings and "rank_pattern" not in settings:
                    tinker = exported(strata, fixture, peft, scratch / f"{adapter.name}_tinker", "tinker")
                    errors |= dict(tinker=difference(ours, traced(strata, fixture, tinker, scratch / "out.safetensors")))
                shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
                print(f"{fixture.name} {adapter.name}: {shown}")
                assert max(errors.values()) <= (DELTA_TOLERANCE if "qwen3_5" in fixture.name else TOLERANCE), errors


if __name__ == "__main__":
    main()
