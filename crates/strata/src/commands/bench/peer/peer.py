"""The peer of `strata bench --compare`: the same work with PEFT, transformers and torch.

Reads one JSON object a line from stdin, the setup first, and answers each with one line on stdout. Ends when stdin does.
"""

import importlib.util
import itertools
import json
import os
import resource
import sys
import time

# Like the adapters of Strata: attention, MLP and unembedding.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def main():
    # Nothing but answers goes to stdout, whatever libraries print.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    missing = [name for name in setup["modules"] if importlib.util.find_spec(name) is None]
    if missing:
        print(json.dumps({"missing": missing}), file=answers)
        return
    os.environ["OMP_NUM_THREADS"] = str(setup["threads"])
    versions = {name: importlib.import_module(name).__version__ for name in setup["modules"]}
    peer = Peer(setup)
    print(json.dumps({"ok": versions}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"ok": getattr(peer, request.pop("op"))(**request)}), file=answers)


def peak_memory_bytes():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fastest(op, seconds):
    """Seconds of the fastest call in about so many seconds."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        op()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


class Peer:
    def __init__(self, setup):
        import torch

        torch.set_num_threads(setup["threads"])
        torch.manual_seed(0)
        self.torch = torch
        self.dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[setup["dtype"]]
        self.operands = (None, None)
        if "peft" in setup["modules"]:
            self.make_model(setup["config"], setup["ranks"])

    def make_model(self, config, ranks):
        import peft
        import transformers

        config = transformers.AutoConfig.for_model(**config)
        self.vocab_size = config.vocab_size
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        self.adapters = [f"adapter-{i}" for i in range(len(ranks))]
        for name, rank in zip(self.adapters, ranks):
            lora = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
            if isinstance(self.model, peft.PeftModel):
                self.model.add_adapter(name, lora)
            else:
                self.model = peft.get_peft_model(self.model, lora, adapter_name=name)
        self.optimizers = {}

    def tokens(self, batch, length):
        return self.torch.randint(0, self.vocab_size, (batch, length))

    def train(self, batch, seq_len, checkpointing):
        """A forward and backward of each adapter in turn, then a step of each optimizer."""
        self.model.train()
        if checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        seconds = optimizer_seconds = 0
        for name in self.adapters:
            if len(self.adapters) > 1:
                self.model.set_adapter(name)
            if name not in self.optimizers:
                trained = [p for p in self.model.parameters() if p.requires_grad]
                self.optimizers[name] = self.torch.optim.AdamW(trained, lr=1e-4)
            ids = self.tokens(batch, seq_len)
            start = time.perf_counter()
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            middle = time.perf_counter()
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()
            seconds += middle - start
            optimizer_seconds += time.perf_counter() - middle
        return {"seconds": seconds, "optimizer_seconds": optimizer_seconds, "peak_memory_bytes": peak_memory_bytes()}

    def sample(self, batch, prompt, new):
        """Prefill with the first token of each sequence, then decode the others."""
        self.model.eval()
        rows = {}
        if len(self.adapters) > 1:
            rows = {"adapter_names": [self.adapters[i % len(self.adapters)] for i in range(batch)]}
        with self.torch.inference_mode():
            ids = self.tokens(batch, prompt)
            start = time.perf_counter()
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **rows)
            ids = self.draw(out)
            prefilled = time.perf_counter()
            for _ in range(new - 1):
                out = self.model(input_ids=ids, past_key_values=out.past_key_values, use_cache=True, **rows)
                ids = self.draw(out)
            end = time.perf_counter()
        return {
            "prefill_seconds": prefilled - start,
            "decode_step_seconds": (end - prefilled) / (new - 1),
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def draw(self, out):
        return self.torch.multinomial(self.torch.softmax(out.logits[:, -1].float(), dim=-1), 1)

    def matmul(self, matrices, tokens, in_features, out_features, seconds):
        """The fastest product in about so many seconds, with so many matrices in turn."""
        torch, shape = self.torch, (matrices, tokens, in_features, out_features)
        if self.operands[0] != shape:
            self.operands = (None, None)

            def rand(*size):
                return torch.rand(size, dtype=torch.float32).to(self.dtype)

            weights = itertools.cycle([rand(out_features, in_features) for _ in range(matrices)])
            self.operands = (shape, [rand(tokens, in_features), weights, rand(tokens, out_features)])
        x, weights, y = self.operands[1]
        return {"seconds": fastest(lambda: torch.matmul(x, next(weights).t(), out=y), seconds)}

    def delta(self, tokens, k_heads, v_heads, k_dim, v_dim, kernel, seconds):
        """The fastest gated delta net between its projections in about so many seconds, and the fastest rule alone in as many more."""
        shape = (tokens, k_heads, v_heads, k_dim, v_dim, kernel)
        if self.operands[0] != shape:
            self.operands = (None, None)
            self.operands = (shape, self.delta_net(*shape))
        net, rule = self.operands[1]
        with self.torch.inference_mode():
            return {"net_seconds": fastest(net, seconds), "rule_seconds": fastest(rule, seconds)}

    def delta_net(self, tokens, k_heads, v_heads, k_dim, v_dim, kernel):
        """The layer of transformers, whose projections hand out what was made before, and the function that it calls for the rule."""
        # With these packages transformers would take their kernels in the place of its own functions.
        for package in ["fla", "causal_conv1d"]:
            sys.modules[package] = None
        from transformers.models.qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

        torch, values = self.torch, v_heads * v_dim
        config = Qwen3_5TextConfig(
            hidden_size=1,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=k_heads,
            linear_num_value_heads=v_heads,
            linear_key_head_dim=k_dim,
            linear_value_head_dim=v_dim,
            linear_conv_kernel_dim=kernel,
        )

        def uniform(*size, dtype=self.dtype):
            return torch.rand(size).mul(2).sub(1).to(dtype)

        layer = modeling.Qwen3_5GatedDeltaNet(config, layer_idx=0).to(self.dtype)
        with torch.no_grad():
            # Decays as Strata has them: a state outlives a chunk, and nothing becomes so small that a processor slows down.
            layer.A_log.copy_(uniform(v_heads) - 3)
            layer.dt_bias.copy_(uniform(v_heads))
        widths = {"in_proj_qkv": 2 * k_heads * k_dim + values, "in_proj_z": values, "in_proj_b": v_heads, "in_proj_a": v_heads}
        for name, width in widths.items():
            getattr(layer, name).forward = lambda _, projected=uniform(1, tokens, width): projected
        layer.out_proj.forward = lambda y: y
        hidden = torch.zeros(1, tokens, 1, dtype=self.dtype)

        def unit():
            return modeling.l2norm(uniform(1, tokens, k_heads, k_dim))

        q, k, v, beta = unit(), unit(), uniform(1, tokens, v_heads, v_dim), uniform(1, tokens, v_heads).sigmoid()
        g = -(uniform(v_heads, dtype=torch.float32) - 3).exp() * uniform(1, tokens, v_heads, dtype=torch.float32).add(1)
        rule = modeling.torch_chunk_gated_delta_rule
        return lambda: layer(hidden), lambda: rule(q, k, v, g=g, beta=beta)


main()
