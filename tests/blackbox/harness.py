"""Starting servers, and the words that tests share."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import tinker
from tinker import types
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
API_KEY = "tml-test-key"
START_TIMEOUT_S = 60
CLOSE_TIMEOUT_S = 20

_tokenizer = Tokenizer.from_file(str(ROOT / "assets/tiny-base/tokenizer.json"))


_close = tinker.ServiceClient.__exit__


def _close_in_time(client, *exception):
    """Closes a client as it closes itself. With Python 3.11 it now and then waits forever for a task of its own that has missed being cancelled, with the
    session ended and no connection open."""
    closing = threading.Thread(target=_close, args=(client, *exception), daemon=True)
    closing.start()
    closing.join(CLOSE_TIMEOUT_S)


tinker.ServiceClient.__exit__ = _close_in_time


def binary():
    target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    return os.environ.get("STRATA_BINARY", str(pathlib.Path(target) / "release/strata"))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_client(*arguments, fails=False, timeout=120, **options):
    """Runs Python with `arguments` to its end, as a user of the SDK would, and sees that it succeeds, or fails: what it printed.

    Now and then the SDK's threads abort their interpreter (SIGABRT) after its program has ended, so that is no failure by itself;
    output is unbuffered so that none is lost then, and what the program did has to be seen in it."""
    command = [sys.executable, "-u", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert done.returncode == -signal.SIGABRT or (done.returncode != 0) == fails, (arguments, done.stdout, done.stderr)
    return done


class Server:
    """A `strata serve` process; a context manager."""

    def __init__(self, directory, *flags, env=None):
        self.directory = pathlib.Path(directory)
        self.flags = flags
        self.env = env or {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = self.directory / "server.log"
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def command(self):
        data = str(self.directory / "data")
        return [binary(), "serve", "--host", "127.0.0.1", "--port", str(self.port), "--data-dir", data, *self.flags]

    def start(self):
        with open(self.log_path, "ab") as log:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("STRATA_")} | self.env
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server did not start within {START_TIMEOUT_S} s:\n{self.log()}")

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the server did not end within 20 s of {how!r}:\n{self.log()}") from None

    def log(self):
        return self.log_path.read_text(errors="replace")[-8000:]

    def base_model(self, api_key=API_KEY):
        rest = tinker.RestClient(base_url=self.url, api_key=api_key)
        return rest.get_server_capabilities().result().supported_models[0].model_name


def encode(text):
    return _tokenizer.encode(text).ids


def decode(tokens):
    return _tokenizer.decode(list(tokens), skip_special_tokens=True)


def chat_prompt(question):
    """Tokens of a user's question in the model's chat format, up to where the answer begins."""
    return encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def answer_tokens(answer):
    return encode(f"{answer}<|im_end|>")


def supervised(prompt, answer):
    """A cross-entropy example that learns `answer` after `prompt`."""
    tokens = list(prompt) + list(answer)
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def next_token(tokens):
    """A cross-entropy example over all of `tokens`."""
    return supervised(tokens[:1], tokens[1:])


def logprobs_of(output, index=0):
    return np.asarray(output.loss_fn_outputs[index]["logprobs"].to_numpy(), dtype=np.float32)


def train(client, data, steps, learning_rate=2e-3, **adam):
    """Some plain steps; the losses before each."""
    losses = []
    for _ in range(steps):
        backward = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=learning_rate, **adam))
        losses.append(backward.result().metrics["loss:sum"])
        step.result()
    return losses


def same_bits(a, b):
    a, b = np.asarray(a, dtype=np.float32), np.asarray(b, dtype=np.float32)
    return a.shape == b.shape and a.tobytes() == b.tobytes()
