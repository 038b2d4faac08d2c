"""Teaches a model that sees to name the colour of a square, through the Tinker API, and plots how that went.

Without --base-url it makes a small Qwen3-VL with random weights and serves it on this machine: nothing is downloaded, and all that is
known afterwards is in the adapter.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

# Set before they are imported: nothing is reported, and transformers does not say that it has no PyTorch, which is not needed.
os.environ.update(TINKER_TELEMETRY="0", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")

import httpx
import numpy as np
import tinker
from tinker import types

from pictures import COLOURS, draw, png, token_side, tokens_of
from plot import plot

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = HERE / "model"
START_TIMEOUT_S = 60
# Unseen pictures: those that the curve is of, and others for the end.
WATCHED = 64
UNSEEN = 256


class Task:
    """Pictures as prompts and examples of a model with this tokenizer and image processor."""

    def __init__(self, tokenizer, processor):
        def encode(text):
            return tokenizer.encode(text, add_special_tokens=False)

        self.processor = processor
        self.before = encode("<|im_start|>user\n<|vision_start|>")
        self.after = encode("<|vision_end|>What colour is the square?<|im_end|>\n<|im_start|>assistant\n")
        self.end = encode("<|im_end|>")
        self.answers = {name: encode(name) + self.end for name in COLOURS}
        self.decode = tokenizer.decode

    def pictures(self, random, count):
        return [draw(random, token_side(self.processor)) for _ in range(count)]

    def chunks(self, pixels):
        height, width, _ = pixels.shape
        seen = types.ImageChunk(data=png(pixels), format="png", expected_tokens=tokens_of(height, width, self.processor))
        return [types.EncodedTextChunk(tokens=self.before), seen, types.EncodedTextChunk(tokens=self.after)]

    def prompt(self, pixels):
        return types.ModelInput(chunks=self.chunks(pixels))

    def example(self, pixels, name):
        """A cross-entropy example: the answer is learned, what comes before it is not."""
        answer = self.answers[name]
        chunks = self.chunks(pixels)
        unlearned = sum(chunk.length for chunk in chunks) - 1
        chunks.append(types.EncodedTextChunk(tokens=answer[:-1]))
        return types.Datum(
            model_input=types.ModelInput(chunks=chunks),
            loss_fn_inputs={
                "target_tokens": [0] * unlearned + answer,
                "weights": [0.0] * unlearned + [1.0] * len(answer),
            },
        )

    def say(self, sampler, pictures):
        """What the model answers to each picture."""
        greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=self.end)
        futures = [sampler.sample(self.prompt(pixels), num_samples=1, sampling_params=greedy) for pixels, _ in pictures]
        said = [future.result().sequences[0].tokens for future in futures]
        return [self.decode(tokens, skip_special_tokens=True).strip() for tokens in said]

    def surprise(self, training, pictures):
        """Minus the log-probability of the right answers, the mean of all pictures."""
        output = training.forward([self.example(*picture) for picture in pictures], "cross_entropy").result()
        return output.metrics["loss:sum"] / len(pictures)


def right(said, pictures):
    """The share of answers that are right."""
    return sum(answer == name for answer, (_, name) in zip(said, pictures, strict=True)) / len(pictures)


def learn(training, task, args):
    """Trains; returns a sampler of what was learned, the loss of each step, and what unseen pictures said on the way."""
    random = np.random.default_rng([args.seed, 1])
    watched = task.pictures(np.random.default_rng([args.seed, 2]), WATCHED)
    began, losses, rows = time.monotonic(), [], []
    print("step  seconds  loss   loss unseen  right unseen")
    for step in range(args.steps + 1):
        if step % args.watch_every == 0 or step == args.steps:
            sampler = training.save_weights_and_get_sampling_client().result()
            row = dict(
                step=step,
                unseen_loss=task.surprise(training, watched),
                accuracy=right(task.say(sampler, watched), watched),
                seconds=time.monotonic() - began,
            )
            rows.append(row)
            loss = f"{np.mean(losses[-args.watch_every:]):.3f}" if losses else "     "
            print(f"{step:4}  {row['seconds']:7.1f}  {loss}  {row['unseen_loss']:11.3f}  {row['accuracy']:11.0%}", flush=True)
        if step == args.steps:
            return sampler, losses, rows
        batch = [task.example(*picture) for picture in task.pictures(random, args.batch)]
        # Up within ten steps, and down to nothing over the second half.
        rate = args.learning_rate * min(1.0, (step + 1) / 10, 2 * (1 - step / args.steps))
        backward = training.forward_backward(batch, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=rate, grad_clip_norm=1.0))
        losses.append(backward.result().metrics["loss:sum"] / args.batch)
        stepped.result()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def strata():
    """The binary: $STRATA_BINARY, that of this clone, or that on the path."""
    built = ROOT / "target/release/strata"
    return os.environ.get("STRATA_BINARY") or (str(built) if built.exists() else "strata")


@contextlib.contextmanager
def serve(seed):
    """A server of a small random model that sees, for as long as it is needed; its URL."""
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        model, log_path, port = directory / "model", directory / "server.log", free_port()
        init = [strata(), "init-model", str(model), "--config", str(MODEL / "config.json"), "--seed", str(seed)]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
        for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
            shutil.copy(MODEL / name, model)
        command = [strata(), "serve", str(model), "--name", "example/sees", "--port", str(port), "--data-dir", str(directory / "data")]
        with open(log_path, "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(process, url, log_path)
            yield url
        finally:
            process.terminate()
            process.wait()


def wait_for(process, url, log_path):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/healthz").status_code == 200:
                return
        time.sleep(0.05)
    raise SystemExit(f"the server did not start:\n{log_path.read_text(errors='replace')}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the adapter and all pictures")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16, help="pictures in a step")
    parser.add_argument("--watch-every", type=int, default=25, help="steps from one look at unseen pictures to the next")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("colour_of_a_square.svg"), help="where the plot is written")
    parser.add_argument("--base-url", help="a running server, instead of one of a small random model")
    parser.add_argument("--base-model", help="which model of that server [default: its first]")
    parser.add_argument("--processor", type=pathlib.Path, default=MODEL / "preprocessor_config.json", help="that of the model on that server")
    return parser.parse_args()


def main():
    args = arguments()
    began = time.monotonic()
    if not args.base_url:
        # What there is to load is on this machine.
        os.environ["HF_HUB_OFFLINE"] = "1"
    with contextlib.ExitStack() as stack:
        url = args.base_url or stack.enter_context(serve(args.seed))
        server = dict(base_url=url, api_key=os.environ.get("TINKER_API_KEY", "tml-local"))
        service = stack.enter_context(tinker.ServiceClient(**server))
        served = tinker.RestClient(**server).get_server_capabilities().result().supported_models
        base_model = args.base_model or served[0].model_name
        training = service.create_lora_training_client(base_model=base_model, rank=args.rank, seed=args.seed).result()
        task = Task(training.get_tokenizer(), json.loads(args.processor.read_text()))
        sampler, losses, rows = learn(training, task, args)
        unseen = task.pictures(np.random.default_rng([args.seed, 3]), UNSEEN)
        said = task.say(sampler, unseen)
        surprise = task.surprise(training, unseen)
    share = right(said, unseen)
    plot(args.plot, f"Colour of a square: {share:.1%} of {UNSEEN} unseen pictures right", losses, rows, unseen, said)
    print(f"\nUnseen pictures right: {round(share * UNSEEN)} of {UNSEEN}, {share:.1%}; chance is {1 / len(COLOURS):.1%}.")
    print(f"Mean log-probability of the right answer: {-surprise:.3f}.")
    print(f"{time.monotonic() - began:.0f} s in all; {args.plot} shows them.")


if __name__ == "__main__":
    main()
