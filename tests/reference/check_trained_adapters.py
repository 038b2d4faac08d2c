"""Holds adapters that Strata has trained against stock PEFT, transformers and the merge of the Tinker cookbook.

    pip install torch transformers peft safetensors tinker tinker_cookbook
    cargo build --release && python tests/reference/check_trained_adapters.py target/release/strata [FIXTURE...]

Each fixture is served, and every adapter that the SDK's `LoraConfig` can ask for is trained for a few steps and saved. Its log-probabilities, as `strata trace --adapter` has them,
are those of
- stock PEFT on `strata export --format peft`, as it is (`peft`) and after `merge_and_unload` (`unloaded`);
- transformers on `strata export --format merged` (`merged`);
- transformers on what `tinker_cookbook.weights.build_hf_model` makes of the checkpoint itself, in both of its ways (`cookbook`, `cookbook_full`);
- stock PEFT on what `tinker_cookbook.weights.build_lora_adapter` makes of it (`cookbook_adapter`), of models without experts: of those it writes modules that transformers 5 does not have.

What PEFT's and the cookbook's merges do otherwise, or cannot, is in `others_differ`, with the reason, and is an error here once they do as we do.
"""

import contextlib
import itertools
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

import torch
from peft import PeftModel
from safetensors import safe_open
from tinker_cookbook import weights
from transformers import AutoModelForImageTextToText

import check_peft_forms as forms

sys.path.append(str(pathlib.Path(__file__).parents[1] / "blackbox"))

FIXTURES = ["tied_gqa3_f32", "bias_untied_sharded_f32", "mha_tied_f16", "qwen3_window_yarn_f32", "llama_llama3_bias_f32", "llama_linear_f32", "qwen2_longrope_f32",
            "mistral_window_f32", "qwen3_moe_f32", "qwen3_moe_fused_f32", "deepseek_moe_groups_f32", "deepseek_moe_direct_f32", "glm4_moe_lite_f32", "gpt_oss_f32",
            "qwen3_5_f32", "qwen3_5_bf16", "qwen3_5_composite_f32", "qwen3_5_moe_f32", "qwen3_5_moe_composite_f32", "qwen3_vl_f32", "qwen3_vl_plain_tied_f32", "qwen3_vl_moe_f32"]
PARTS = ["attn", "mlp", "unembed"]
# Rounding of the base's own dtype: the cookbook keeps it, and this merge was told to write f32.
NARROW_TOLERANCE = 0.1


def settings():
    """Every `train_*` that is not nothing."""
    for chosen in itertools.product([True, False], repeat=3):
        if any(chosen):
            yield dict(zip((f"train_{part}" for part in PARTS), chosen))


def trained(strata, fixture, directory):
    """Adapters that were trained through the SDK, by the parts that they train."""
    os.environ["STRATA_BINARY"] = str(strata)
    import harness  # reads the environment
    import tinker
    from tinker import types

    tokens = [[part for part in sequence if isinstance(part, int)] for sequence in json.loads((fixture / "tokens.json").read_text())]
    data = [harness.next_token(sequence) for sequence in tokens if len(sequence) > 2]
    with harness.Server(directory, str(fixture / "model"), "--memory", "1GiB") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=harness.API_KEY)
        base = server.base_model()
        for chosen in settings():
            client = service.create_lora_training_client(base_model=base, rank=4, seed=1, **chosen)
            for _ in range(3):
                client.forward_backward(data, "cross_entropy")
                client.optim_step(types.AdamParams(learning_rate=2e-2)).result()
            path = client.save_weights_for_sampler("trained").result().path
            parts = "+".join(part for part in PARTS if chosen[f"train_{part}"])
            yield parts, directory / "data/checkpoints" / path.removeprefix("tinker://")


def logprobs(logits):
    return [torch.log_softmax(values.float(), dim=-1) for values in logits]


def others_differ(fixture, config, adapter, parts):
    """By comparison, why what is compared with is another model, or refuses: each of these has to."""
    text, whole = config.get("text_config") or config, {}
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if tied and "unembed" in parts:
        reason = "adds the unembedding's product to the table that embedding and unembedding share"
        whole |= dict.fromkeys(("unloaded", "cookbook", "cookbook_full", "cookbook_adapter"), reason)
    if config["model_type"] == "deepseek_v3":
        whole["cookbook_adapter"] = "does not support LoRA adapter serving"
        if has_experts(adapter):
            # Transformers has all experts in one tensor once they are loaded, and some fixtures have them so in their files.
            whole["cookbook_full"] = "does not exist in the model state dict"
            if any(name.endswith(".experts.gate_up_proj") for name in safe_open(fixture / "model/model.safetensors", "pt").keys()):
                whole["cookbook"] = whole["cookbook_full"]
    if (text.get("moe_intermediate_size") or 0) * 2 == text["hidden_size"] and config["model_type"] == "qwen3_vl_moe" and has_experts(adapter):
        whole |= dict.fromkeys(("cookbook", "cookbook_full"), "guesses which way round a square gate_up_proj lies")
    return whole


def has_experts(directory):
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        return any(".experts." in name for name in file.keys())


def check(strata, fixture, parts, adapter, scratch):
    config = json.loads((fixture / "model/config.json").read_text())
    values = forms.traced(strata, fixture, adapter, scratch / "trace.safetensors")
    ours = logprobs(forms.logits_in(values))
    base = logprobs(forms.logits_in(forms.traced(strata, fixture, None, scratch / "base.safetensors")))
    moved = forms.difference(ours, base)
    assert moved > 1e-2, f"training moved log-probabilities by {moved} only"
    of = lambda model: forms.difference(ours, logprobs(forms.logits_of(model.eval(), fixture, values)))
    errors, narrow = {}, {}
    merged = forms.exported(strata, fixture, adapter, scratch / f"{parts}_merged", "merged", "--dtype", "f32")
    errors["merged"] = of(forms.load_model(fixture, None, merged))
    peft = forms.exported(strata, fixture, adapter, scratch / f"{parts}_peft", "peft")
    model = forms.loaded_by_peft(fixture, peft)
    errors["peft"] = of(model)
    errors["unloaded"] = of(model.merge_and_unload())
    for name, strategy in (("cookbook", "shard"), ("cookbook_full", "full")):
        out = scratch / f"{parts}_{name}"
        try:
            with contextlib.redirect_stdout(None):
                weights.build_hf_model(base_model=str(fixture / "model"), adapter_path=str(adapter), output_path=str(out), dtype="float32", merge_strategy=strategy)
            error = of(forms.load_model(fixture, None, out))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        (errors if strategy == "full" or "f32" in fixture.name else narrow)[name] = error
    if not has_experts(adapter):
        out = scratch / f"{parts}_adapter"
        try:
            weights.build_lora_adapter(base_model=str(fixture / "model"), adapter_path=str(adapter), output_path=str(out))
            # Of a composite it has the names of the composite.
            names = safe_open(out / "adapter_model.safetensors", "pt").keys()
            of_class = AutoModelForImageTextToText if any(".language_model." in name for name in names) else None
            errors["cookbook_adapter"] = of(forms.loaded_by_peft(fixture, out, of_class))
        except Exception as failure:
            errors["cookbook_adapter"] = f"{type(failure).__name__}: {failure}"
    return moved, errors, narrow, others_differ(fixture, config, adapter, parts)


def main():
    strata, only = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    failed = []
    for fixture in [forms.ROOT / name for name in FIXTURES if not only or name in only]:
        tolerance = forms.DELTA_TOLERANCE if "qwen3_5" in fixture.name else forms.TOLERANCE
        with tempfile.TemporaryDirectory() as scratch:
            scratch = pathlib.Path(scratch)
            adapters = list(trained(strata, fixture, scratch))
            for parts, adapter in adapters:
                moved, errors, narrow, others = check(strata, fixture, parts, adapter, scratch)
                of_all = errors | narrow
                shown = ", ".join(f"{name} {error:.1e}" if isinstance(error, float) else f"{name} {error[:80]}" for name, error in of_all.items() if name not in others)
                print(f"{fixture.name} {parts} (moved {moved:.2f}): {shown}", flush=True)
                for name, error in of_all.items():
                    is_same = isinstance(error, float) and error <= (tolerance if name in errors else NARROW_TOLERANCE)
                    # An error that says something else than what is expected is no less one.
                    is_other = error > 0.1 if isinstance(error, float) else others.get(name, "") in error or "tie_word_embeddings" in error
                    if not (is_other if name in others else is_same):
                        failed.append((fixture.name, parts, name, error))
    for line in failed:
        print("DIFFERS", *line)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
