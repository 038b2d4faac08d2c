"""llama.cpp on the shape of Qwen3-0.6B, beside `strata bench sample`.

    python3 -m venv peer && peer/bin/pip install llama-cpp-python gguf numpy
    peer/bin/python docs/compare_llama_cpp.py --threads 2

Random bf16 weights (speed does not depend on them) are written to a GGUF file once; then decode steps of several sequences and
prompts of several lengths are timed through llama.cpp's C interface, without sampling or tokenizer: the best of some rounds.
"""

import argparse
import ctypes
import json
import pathlib
import tempfile
import time

import gguf
import llama_cpp
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 28, 1024, 16, 8, 128, 3072, 151936


def write_model(path):
    """A Qwen3 of random weights, with tied embeddings."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(40960)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)

    def matrix(name, outputs, inputs):
        numbers = (rng.standard_normal((outputs, inputs), dtype=np.float32) * 0.02).view(np.uint32)
        writer.add_tensor(name, (numbers >> 16).astype(np.uint16).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name, width):
        writer.add_tensor(name, np.ones(width, dtype=np.float32))

    matrix("token_embd.weight", VOCABULARY, HIDDEN)
    norm("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for name, width in [("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", HEAD_DIM), ("attn_k_norm", HEAD_DIM)]:
            norm(f"{prefix}{name}.weight", width)
        for name, outputs, inputs in [
            ("attn_q", HEADS * HEAD_DIM, HIDDEN), ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN), ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD_DIM), ("ffn_gate", INTERMEDIATE, HIDDEN), ("ffn_up", INTERMEDIATE, HIDDEN),
            ("ffn_down", HIDDEN, INTERMEDIATE),
        ]:
            matrix(f"{prefix}{name}.weight", outputs, inputs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Session:
    """A context of its own for some sequences."""

    def __init__(self, model, threads, sequences, length):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * length
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = max(sequences, min(length, 512))
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp has no context of this size")
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.n_batch = params.n_batch
        self.rng = np.random.default_rng(1)

    def run(self, entries):
        """One pass: `(token, position, sequence, whether its logits are wanted)` of each row."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if (status := llama_cpp.llama_decode(self.context, batch)) != 0:
            raise SystemExit(f"llama_decode: {status}")
        # Computed when it is asked for.
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        assert np.isfinite(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))[0])

    def prompt(self, sequence, length):
        tokens = self.rng.integers(0, VOCABULARY, length).tolist()
        for first in range(0, length, self.n_batch):
            part = range(first, min(length, first + self.n_batch))
            self.run([(tokens[i], i, sequence, i == part[-1]) for i in part])

    def forget(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)


def prefill(model, threads, length, rounds):
    session = Session(model, threads, 1, length)
    best = float("inf")
    for _ in range(rounds):
        session.forget()
        start = time.perf_counter()
        session.prompt(0, length)
        best = min(best, time.perf_counter() - start)
    session.close()
    return length / best


def decode(model, threads, sequences, prompt, new, rounds):
    session = Session(model, threads, sequences, prompt + new)
    best = float("inf")
    for _ in range(rounds):
        session.forget()
        for sequence in range(sequences):
            session.prompt(sequence, prompt)
        start = time.perf_counter()
        for step in range(new):
            tokens = session.rng.integers(0, VOCABULARY, sequences).tolist()
            session.run([(token, prompt + step, sequence, True) for sequence, token in enumerate(tokens)])
        best = min(best, time.perf_counter() - start)
    session.close()
    return sequences * new / best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "qwen3-0.6b-random-bf16.gguf",
                        help="where the file is, or is written")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not args.model.exists():
        partial = args.model.with_suffix(".partial")
        write_model(partial)
        partial.rename(args.model)
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(args.model).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not read {args.model}")
    print(json.dumps({"llama_cpp_python": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode()}))
    for batch in args.batch:
        print(json.dumps({"decode_batch": batch, "tokens_per_s": round(decode(model, args.threads, batch, 64, args.new, args.rounds), 1)}), flush=True)
    for length in args.prompt:
        print(json.dumps({"prefill": length, "tokens_per_s": round(prefill(model, args.threads, length, args.rounds), 1)}), flush=True)


if __name__ == "__main__":
    main()
