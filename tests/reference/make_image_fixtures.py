"""Writes the reference fixtures of models that see: as `make_fixtures.py` does, with pictures among the tokens.

    pip install torch torchvision transformers peft safetensors pillow
    python tests/reference/make_image_fixtures.py

Beside what is described there a fixture has its pictures, which `tokens.json` names ({"image": "photo.jpg"}), and its model the `preprocessor_config.json` of the real image
processor. Further names inside a file of expected values, for sequence n: `s.{n}.position_ids` (time, height and width of each token), and for its picture k
`s.{n}.image.{k}.pixel_values` (patches, as the processor has them), `.grid_thw` (patches along time, height and width), `.features` (what the tower makes of it, a row for each
token) and `.deepstack.{j}` (the same for decoder layer j).
"""

import json
import shutil
import sys

import numpy
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from make_fixtures import ATTENTION, GREEDY_GAP_MIN, GREEDY_TOKENS, MLP, ROOT, next_logprobs

VOCAB, START, END, IMAGE, VIDEO = 83, 79, 80, 81, 82
# Of the values of a pass these are kept with an adapter; hidden states are compared without one.
KEPT_WITH_ADAPTER = ("next_logprobs", "greedy", "greedy_logprobs")

TEXT = dict(vocab_size=VOCAB, hidden_size=28, intermediate_size=36, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
            max_position_embeddings=512)
VISION = dict(depth=3, hidden_size=24, intermediate_size=36, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
              num_position_embeddings=9, deepstack_visual_indexes=[0, 2])
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14)

FIXTURES = [
    # Fewer places that have embeddings than patches, uneven sections of axes, an unembedding of its own.
    dict(name="qwen3_vl_f32", family="qwen3_vl", text=TEXT, vision=VISION, sections=[3, 2, 1], tied=False, rank=4),
    # More places than patches, nothing for the decoder's layers, biases, another activation, three patches along a side of a token, the older config layout.
    dict(name="qwen3_vl_plain_tied_f32", family="qwen3_vl",
         text=TEXT | dict(attention_bias=True, num_hidden_layers=2, head_dim=10, num_key_value_heads=1),
         vision=VISION | dict(num_position_embeddings=400, deepstack_visual_indexes=[], hidden_act="gelu", spatial_merge_size=3, patch_size=3, num_heads=3,
                              temporal_patch_size=1),
         sections=[1, 2, 2], tied=True, rank=3, legacy_config=True),
    # Experts as transformers writes them, a dense layer between. One of the two tensors is as wide as high.
    dict(name="qwen3_vl_moe_f32", family="qwen3_vl_moe", text=TEXT | EXPERTS | dict(mlp_only_layers=[1]),
         vision=VISION | dict(deepstack_visual_indexes=[0, 1, 2]), sections=[2, 2, 2], tied=False, rank=4),
    # The other way round, as they were published.
    dict(name="qwen3_vl_moe_flipped_f32", family="qwen3_vl_moe", text=TEXT | EXPERTS | dict(num_hidden_layers=2),
         vision=VISION | dict(num_position_embeddings=64, deepstack_visual_indexes=[1], depth=2), sections=[2, 3, 1], tied=True, rank=2, targets=ATTENTION, layout="flipped"),
    dict(name="qwen3_vl_bf16", family="qwen3_vl", text=TEXT | dict(hidden_size=32, head_dim=16), vision=VISION | dict(hidden_size=32),
         sections=[4, 2, 2], tied=False, rank=4, dtype=torch.bfloat16),
]

# Between 16 and 40 tokens of text, a picture alone, one at the end, two beside each other, and none.
SEQUENCES = [
    [3, 9, START, "photo.jpg", END, 5, 6, START, "alpha.png", END, 7],
    ["strip.png", 11, 12],
    [4, 8, 15, 16, 23, 42],
    [1, START, "grey.png", END, START, "palette.png", END, 70, START, "exact.png"],
]


def draw_pictures(directory):
    """Pictures of all that files can hold, in sizes that patches do not divide."""
    rng = numpy.random.default_rng(5)

    def noisy(height, width):
        y, x = numpy.mgrid[0:height, 0:width]
        waves = numpy.stack([127 + 100 * numpy.sin(x / 3 + y / 5), 127 + 90 * numpy.cos(x / 4 - y / 3), (x * 9 + y * 5) % 256], -1)
        return numpy.clip(waves + rng.normal(0, 12, waves.shape), 0, 255).astype(numpy.uint8)

    Image.fromarray(noisy(33, 50)).save(directory / "photo.jpg", quality=85)
    Image.fromarray(numpy.dstack([noisy(13, 31), rng.integers(0, 256, (13, 31), dtype=numpy.uint8)])).save(directory / "alpha.png")
    Image.fromarray(noisy(200, 1)).save(directory / "strip.png")
    Image.fromarray(noisy(9, 40)[..., 0]).save(directory / "grey.png")
    Image.fromarray(noisy(21, 10)).convert("P", palette=Image.Palette.ADAPTIVE, colors=17).save(directory / "palette.png")
    Image.fromarray(noisy(16, 16)).save(directory / "exact.png")


def random_model(spec, seed):
    torch.manual_seed(seed)
    rope = dict(rope_type="default", rope_theta=500.0, mrope_section=spec["sections"], mrope_interleaved=True)
    text = spec["text"] | dict(rope_parameters=rope, tie_word_embeddings=spec["tied"], bos_token_id=0, eos_token_id=2, pad_token_id=None)
    vision = spec["vision"] | dict(out_hidden_size=spec["text"]["hidden_size"])
    config = AutoConfig.for_model(spec["family"], text_config=text, vision_config=vision, tie_word_embeddings=spec["tied"], image_token_id=IMAGE,
                                  video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(0.5 + torch.rand_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif "pos_embed" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model.to(spec.get("dtype", torch.float32))


def processor_of(spec):
    vision = spec["vision"]
    factor = vision["patch_size"] * vision["spatial_merge_size"]
    return Qwen2VLImageProcessor(patch_size=vision["patch_size"], temporal_patch_size=vision["temporal_patch_size"],
                                 merge_size=vision["spatial_merge_size"], size=dict(shortest_edge=2 * factor**2, longest_edge=9 * factor**2),
                                 image_mean=[0.5, 0.4, 0.45], image_std=[0.5, 0.3, 0.25])


def flip_experts(path):
    """Rewrites a checkpoint so that experts are `[experts, in, out]`."""
    tensors = load_file(path)
    for name in tensors:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def age_config(path):
    """Rewrites a configuration as it was written before transformers 5."""
    config = json.loads(path.read_text())
    text = config["text_config"]
    text["rope_scaling"] = text.pop("rope_parameters")
    text["rope_theta"] = text["rope_scaling"].pop("rope_theta")
    text["torch_dtype"] = text.pop("dtype", "float32")
    config["vision_config"]["model_type"] = config["model_type"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def inputs_of(sequence, directory, processor, dtype):
    """What a model takes of a sequence, and what the processor made of each of its pictures."""
    ids, kinds, pictures = [], [], []
    for part in sequence:
        if isinstance(part, int):
            ids.append(part)
            kinds.append(0)
            continue
        picture = processor(Image.open(directory / part), return_tensors="pt")
        pictures.append((picture["pixel_values"], picture["image_grid_thw"]))
        tokens = int(picture["image_grid_thw"].prod()) // processor.merge_size**2
        ids += [IMAGE] * tokens
        kinds += [1] * tokens
    inputs = dict(input_ids=torch.tensor([ids]), mm_token_type_ids=torch.tensor([kinds]))
    if pictures:
        inputs |= dict(pixel_values=torch.cat([pixels for pixels, _ in pictures]).to(dtype), image_grid_thw=torch.cat([grid for _, grid in pictures]))
    return inputs, pictures


def load_model(directory, dtype):
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager").eval()


def longer(inputs, token):
    more = dict(input_ids=token, mm_token_type_ids=0)
    return inputs | {name: torch.cat([inputs[name], torch.tensor([[value]])], dim=1) for name, value in more.items()}


def greedy(model, inputs):
    """Continues a sequence greedily without a cache; None if a choice is too close to call, or stands for a picture."""
    chosen, logprobs = [], []
    for _ in range(GREEDY_TOKENS):
        with torch.no_grad():
            row = model(**inputs, use_cache=False).logits[0, -1]
        best = row.topk(2)
        if best.values[0] - best.values[1] < GREEDY_GAP_MIN or best.indices[0] in (IMAGE, VIDEO):
            return None
        chosen.append(best.indices[0].item())
        logprobs.append(torch.log_softmax(row.float(), dim=-1)[chosen[-1]].item())
        inputs = longer(inputs, chosen[-1])
    return dict(greedy=torch.tensor(chosen, dtype=torch.int64), greedy_logprobs=torch.tensor(logprobs))


def observe(model, inputs, pictures):
    """Runs one sequence alone and returns everything worth comparing."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    text, visual, seen, hooks = base.model.language_model, base.model.visual, {}, []
    length = inputs["input_ids"].shape[1]

    def keep(name):
        def hook(_module, _inputs, output):
            value = output[0] if isinstance(output, tuple) else output
            seen[name] = value.detach().reshape(length, -1).clone()
        return hook

    hooks += [layer.register_forward_hook(keep(f"layer_out.{i}")) for i, layer in enumerate(text.layers)]
    hooks.append(text.norm.register_forward_hook(keep("final_norm")))
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    for hook in hooks:
        hook.remove()
    seen["logits"] = logits.clone()
    seen["next_logprobs"] = next_logprobs(logits, inputs["input_ids"][0].tolist())
    grids = inputs.get("image_grid_thw")
    seen["position_ids"] = base.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], grids)[0][:, 0].clone()
    for k, (pixels, grid) in enumerate(pictures):
        with torch.no_grad():
            found = visual(pixels.to(logits.dtype), grid_thw=grid)
        of_picture = dict(features=found.pooler_output)
        of_picture |= {f"deepstack.{j}": features for j, features in enumerate(found.deepstack_features)}
        if logits.dtype == torch.float32:
            of_picture |= dict(pixel_values=pixels, grid_thw=grid[0])
        seen |= {f"image.{k}.{name}": value.contiguous() for name, value in of_picture.items()}
    return seen


def outputs(model, sequences, prefix="", with_greedy=True):
    values = {}
    for n, (inputs, pictures) in enumerate(sequences):
        seen = observe(model, inputs, pictures)
        if with_greedy:
            continuation = greedy(model, inputs)
            if continuation is None:
                return None
            seen |= continuation
        else:
            seen.pop("position_ids")
        values |= {f"{prefix}s.{n}.{name}": value.contiguous() for name, value in seen.items()}
    return values


def gradients(model, sequences, prefix=""):
    """Of the sum over all sequences of the next-token cross-entropy, under the names that PEFT saves parameters by."""
    model.zero_grad()
    total = 0.0
    for inputs, _ in sequences:
        total = total - next_logprobs(model(**inputs).logits[0], inputs["input_ids"][0].tolist()).sum()
    total.backward()
    named = {name.replace(".default", ""): p.grad.float().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert set(get_peft_model_state_dict(model)) == set(named)
    return {prefix + name: grad for name, grad in named.items()}


def make_adapter(model, spec, seed, directory):
    """Writes a PEFT adapter whose A and B are both random and not zero."""
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(r=spec["rank"], lora_alpha=32, target_modules=spec.get("targets", ATTENTION + MLP), lora_dropout=0.0,
                                            bias="none", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * (0.1 if "_A.default" in name else 0.1 * spec["rank"] / 32))
    peft.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    config_path = directory / "adapter_config.json"
    written = json.loads(config_path.read_text()) | dict(base_model_name_or_path="reference")
    written["target_modules"] = sorted(written["target_modules"])
    config_path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def make_fixture(spec, seed):
    """Writes one fixture; False if a greedy choice was too close for this seed."""
    directory = ROOT / spec["name"]
    shutil.rmtree(directory, ignore_errors=True)
    model_directory, adapter = directory / "model", f"r{spec['rank']}"
    random_model(spec, seed).save_pretrained(model_directory)
    processor = processor_of(spec)
    processor.save_pretrained(model_directory)
    draw_pictures(directory)
    tokens = [[part if isinstance(part, int) else dict(image=part) for part in sequence] for sequence in SEQUENCES]
    (directory / "tokens.json").write_text(json.dumps(tokens) + "\n")
    sequences = [inputs_of(sequence, directory, processor, torch.float32) for sequence in SEQUENCES]
    half = [inputs_of(sequence, directory, processor, torch.bfloat16) for sequence in SEQUENCES]

    is_bf16 = spec.get("dtype") == torch.bfloat16
    values = outputs(load_model(model_directory, torch.float32), sequences)
    if values is None:
        return False
    if is_bf16:
        values |= outputs(load_model(model_directory, torch.bfloat16), half, "bf16.", with_greedy=False)
    save_file(values, directory / "base.safetensors")

    make_adapter(load_model(model_directory, torch.float32), spec, seed + 10, directory / adapter)
    load = lambda dtype: PeftModel.from_pretrained(load_model(model_directory, dtype), directory / adapter, is_trainable=True).eval()
    values = outputs(load(torch.float32), sequences)
    if values is None:
        return False
    values = {name: value for name, value in values.items() if name.split(".")[2] in KEPT_WITH_ADAPTER}
    values |= gradients(load(torch.float32), sequences)
    if is_bf16:
        values |= gradients(load(torch.bfloat16), half, "bf16.")
    save_file(values, directory / f"{adapter}.safetensors")
    if spec.get("layout") == "flipped":
        flip_experts(model_directory / "model.safetensors")
    if spec.get("legacy_config"):
        age_config(model_directory / "config.json")
    return True


def main():
    torch.set_num_threads(1)
    only = sys.argv[1:]
    for place, spec in enumerate(FIXTURES):
        if only and spec["name"] not in only:
            continue
        seed = 1000 * (place + 100)
        while not make_fixture(spec, seed):
            seed += 100
        size = sum(path.stat().st_size for path in (ROOT / spec["name"]).rglob("*") if path.is_file())
        print(f"{spec['name']}: seed {seed}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
