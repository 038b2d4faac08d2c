"""Holds adapters in stock PEFT's form, read and written, against stock PEFT.

    pip install torch transformers peft safetensors
    cargo build && python tests/reference/check_peft_forms.py target/debug/strata [FIXTURE...]

Of each fixture, every adapter and those that PEFT writes here (`STOCK`, random A and B) are exported in PEFT's form by `strata export` and loaded by the
`PeftModel.from_pretrained` of an unmodified PEFT, which must neither miss a key nor find one it does not expect, and computes the logits that `strata trace --adapter` does. What PEFT wrote
is read by `strata trace` as it is, and again after `strata export --format tinker`. Adapters of composites are made on the composite too (`OF_COMPOSITE`), where modules have
other paths; those of models that see are made on nothing else, and have pictures among the tokens.

Each is merged too, by `strata export --format merged`, and transformers computes of what is written the logits that the adapter has on its base (`merged`). Those in PEFT's form that
PEFT wrote have their gradients compared under their own names (`gradients`, relative to the largest entry). What the Tinker tools name otherwise, PEFT refuses to load.
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
VISION_MODELS = ("qwen3_vl", "qwen3_vl_moe")
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
        some_layers=dict(target_modules=["q_proj", "up_proj", "lm_head"], layers_to_transform=[1], rank_pattern={"layers.1.self_attn.q_proj": 2}),
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
        some_layers=dict(target_modules=["k_proj"], layers_to_transform=[0, 2], target_parameters=["experts.down_proj"]),
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
    "qwen3_vl_f32": dict(
        everything=dict(target_modules=r".*language_model.*_proj"),
        tables=dict(target_modules=["embed_tokens", "lm_head", "v_proj"]),
        patterns=dict(target_modules=["q_proj", "up_proj", "lm_head"], rank_pattern={r"model\.language_model\.layers\.\d\.self_attn\.q_proj": 2, "lm_head": 3},
                      alpha_pattern={"up_proj": 5}, use_rslora=True),
    ),
    "qwen3_vl_plain_tied_f32": dict(
        tied_unembed=dict(target_modules=["q_proj", "down_proj", "lm_head"]),
        some_layers=dict(target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
    ),
    "qwen3_vl_moe_f32": dict(
        parameters=dict(target_modules=["v_proj", "lm_head"], target_parameters=[f"language_model.layers.{layer}.{name}" for layer in (0, 2) for name in FUSED],
                        rank_pattern={"mlp.experts.down_proj": 1}),
        modules=dict(target_modules=["q_proj", "o_proj"]),
    ),
    "qwen3_5_moe_composite_f32": dict(
        parameters=dict(target_modules=TEXT, rank_pattern={r"language_model.*gate_up_proj": 2}, target_parameters=SHARED_EXPERT[:1] + [
            f"model.language_model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)]),
    ),
}
# Beside them (but for flipped experts of Qwen3-VL-MoE, which transformers 5.23 does not turn): experts whose weights lie in one tensor, f16, and the other families.
EXPORTED = list(dict.fromkeys(list(STOCK) + list(OF_COMPOSITE))) + ["qwen3_vl_bf16", "gpt_oss_mxfp4_f32", "qwen3_fp8_f32", "embedding_tied_f32",
    "qwen3_5_bf16", "embedding_untied_bf16", "qwen3_moe_fused_f32", "deepseek_moe_direct_f32", "mha_tied_f16",
                          "llama_llama3_bias_f32", "qwen2_longrope_f32", "mistral_window_f32"]


def sees(fixture):
    return json.loads((fixture / "model/config.json").read_text())["model_type"] in VISION_MODELS


def load_model(fixture, of_class=None, directory=None):
    of_class = AutoModelForImageTextToText if sees(fixture) else of_class or AutoModelForCausalLM
    return of_class.from_pretrained(directory or fixture / "model", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()


def loaded_by_peft(fixture, directory, of_class=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(load_model(fixture, of_class), directory)
    # What the machinery around it leaves open is no matter of the adapter.
    said = [str(warning.message) for warning in caught if not issubclass(warning.category, ResourceWarning)]
    # PEFT looks for the keys of patterns among modules only, and finds those of parameters nowhere; it applies them.
    known = ("The following rank_pattern keys", "The following alpha_pattern keys", "Model has `tie_word_embeddings=True`",
             "`is_gradient_checkpointing` is deprecated")
    assert all(text.startswith(known) for text in said), said
    result = set_peft_model_state_dict(model, load_peft_weights(directory))
    missing = [name for name in result.missing_keys if "lora_" in name]
    assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)
    return model.eval()


def refused_by_peft(fixture, directory):
    try:
        loaded_by_peft(fixture, directory)
    except ValueError as error:
        return "strata export --format peft" in str(error)
    return False


def inputs_of(fixture, values):
    """What a model takes of each sequence of a fixture; `values` has the patches of its pictures."""
    config = json.loads((fixture / "model/config.json").read_text())
    for n, sequence in enumerate(json.loads((fixture / "tokens.json").read_text())):
        ids, kinds, pictures = [], [], []
        for part in sequence:
            if isinstance(part, int):
                ids, kinds = ids + [part], kinds + [0]
                continue
            name = f"s.{n}.image.{len(pictures)}"
            pictures.append((values[f"{name}.pixel_values"], values[f"{name}.grid_thw"]))
            tokens = int(pictures[-1][1].prod()) // config["vision_config"]["spatial_merge_size"] ** 2
            ids, kinds = ids + [config["image_token_id"]] * tokens, kinds + [1] * tokens
        inputs = dict(input_ids=torch.tensor([ids]))
        if sees(fixture):
            inputs |= dict(mm_token_type_ids=torch.tensor([kinds]))
        if pictures:
            inputs |= dict(pixel_values=torch.cat([pixels for pixels, _ in pictures]), image_grid_thw=torch.stack([grid for _, grid in pictures]))
        yield inputs


def logits_of(model, fixture, values):
    with torch.no_grad():
        return [model(**inputs).logits[0] for inputs in inputs_of(fixture, values)]


def traced(strata, fixture, adapter, out, *extra, model=None):
    subprocess.run([strata, "trace", model or fixture / "model", "--tokens", fixture / "tokens.json", "--dtype", "f32", "--out", out]
                   + (["--adapter", adapter] if adapter else []) + list(extra), check=True)
    return load_file(out)


def logits_in(values):
    return [values[f"s.{n}.logits"] for n in range(sum(name.endswith(".logits") for name in values))]


def gradient_error(model, fixture, values):
    """Of the summed next-token cross-entropy, under the names that PEFT saves the adapter by."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    # torch leaves out the gradient of the token that pads, which ours has.
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    for inputs in inputs_of(fixture, values):
        logprobs = torch.log_softmax(model(**inputs).logits[0, :-1], dim=-1)
        (-logprobs.gather(1, inputs["input_ids"][0, 1:, None]).sum()).backward()
    theirs = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
    ours = {name: value for name, value in values.items() if "lora_" in name}
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in ours)


def exported(strata, fixture, adapter, out, form, *extra):
    subprocess.run([strata, "export", adapter, out, "--base", fixture / "model", "--format", form, *extra], check=True,
                   stdout=subprocess.DEVNULL)
    return out


def difference(ours, theirs):
    assert len(ours) == len(theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs))


def make_stock(fixture, settings, directory, of_class, values):
    torch.manual_seed(1)
    model = get_peft_model(load_model(fixture, of_class), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory, save_embedding_layers=False)
    assert difference(logits_of(model.eval(), fixture, values), logits_in(values)) > 0.01


def main():
    strata, only = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    warnings.simplefilter("ignore")
    for fixture in [ROOT / name for name in EXPORTED if not only or name in only]:
        with tempfile.TemporaryDirectory() as scratch:
            scratch = pathlib.Path(scratch)
            trace = scratch / "out.safetensors"
            base = traced(strata, fixture, None, trace)
            stock = {}
            for kind, of_class, all_settings in (("made", AutoModelForCausalLM, STOCK),
                                                 ("composite", AutoModelForImageTextToText, OF_COMPOSITE)):
                for name, settings in all_settings.get(fixture.name, {}).items():
                    directory = scratch / f"{kind}_{name}"
                    make_stock(fixture, settings, directory, of_class, base)
                    stock[directory] = (of_class, settings)
            own = [path.parent for path in sorted(fixture.glob("*/adapter_config.json"))]
            quantized = "quantization_config" in json.loads((fixture / "model/config.json").read_text())
            for adapter in own + list(stock):
                # Those of the fixtures have patterns where the ones of the same name have them here.
                of_class, settings = stock.get(adapter, (None, STOCK.get(fixture.name, {}).get(adapter.name[6:], {})))
                values = traced(strata, fixture, adapter, trace, "--grads")
                ours = logits_in(values)
                errors = {}
                merged = exported(strata, fixture, adapter, scratch / f"{adapter.name}_merged", "merged", "--dtype", "f32")
                errors["merged"] = difference(ours, logits_of(load_model(fixture, of_class, merged), fixture, values))
                errors["merged_again"] = difference(ours, logits_in(traced(strata, fixture, None, trace, model=merged)))
                peft = exported(strata, fixture, adapter, scratch / f"{adapter.name}_peft", "peft")
                errors["read_again"] = difference(ours, logits_in(traced(strata, fixture, peft, trace)))
                if not quantized:
                    errors["written"] = difference(ours, logits_of(loaded_by_peft(fixture, peft), fixture, values))
                gradients = 0.0
                if adapter in stock:
                    model = loaded_by_peft(fixture, adapter, of_class)
                    errors["read"] = difference(ours, logits_of(model, fixture, values))
                    gradients = gradient_error(model, fixture, values)
                if not {"alpha_pattern", "rank_pattern"} & set(settings) and not any("lora_embedding" in name for name in values):
                    tinker = exported(strata, fixture, peft, scratch / f"{adapter.name}_tinker", "tinker")
                    errors["tinker"] = difference(ours, logits_in(traced(strata, fixture, tinker, trace)))
                    foreign = sees(fixture) or any("unembed_tokens" in name or ".experts.w" in name for name in load_file(tinker / "adapter_model.safetensors"))
                    assert quantized or foreign == refused_by_peft(fixture, tinker), "PEFT loads it, or says why not"
                shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
                print(f"{fixture.name} {adapter.name}: {shown}, gradients {gradients:.1e}", flush=True)
                assert max(errors.values()) <= (DELTA_TOLERANCE if "qwen3_5" in fixture.name else TOLERANCE), errors
                assert gradients <= 1e-3, gradients


if __name__ == "__main__":
    main()
