"""A client that speaks the wire format and nothing else: it sends what it is told to, right or wrong."""

import itertools
import time

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

PROTOBUF = "application/x-protobuf"
RESULT_TIMEOUT_S = 60

_session_seq = itertools.count()


class Wire:
    def __init__(self, url, api_key="tml-test-key"):
        headers = {"X-API-Key": api_key} if api_key else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=50)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()

    def get(self, path, **kwargs):
        return self.http.get(f"/api/v1/{path}", **kwargs)

    def post(self, path, body, **kwargs):
        return self.http.post(f"/api/v1/{path}", json=body, **kwargs)

    def post_bytes(self, path, body, content_type=PROTOBUF, **headers):
        headers = {"content-type": content_type} | {k.replace("_", "-"): v for k, v in headers.items()}
        return self.http.post(f"/api/v1/{path}", content=body, headers=headers)

    def ok(self, path, body):
        response = self.post(path, body)
        assert response.status_code == 200, (path, response.status_code, response.text)
        return response.json()

    def poll(self, request_id, accept="application/json"):
        body = {"request_id": request_id, "allow_metadata_only": False}
        return self.http.post("/api/v1/retrieve_future", json=body, headers={"accept": accept})

    def result(self, request_id, message=None):
        """The final answer of a future: a parsed `message`, or JSON. Failures are JSON with an `error`."""
        deadline = time.monotonic() + RESULT_TIMEOUT_S
        while time.monotonic() < deadline:
            response = self.poll(request_id, PROTOBUF if message else "application/json")
            if response.status_code == 408:
                continue
            assert response.status_code == 200, (response.status_code, response.text)
            if response.headers["content-type"].startswith(PROTOBUF):
                parsed = message()
                parsed.ParseFromString(response.content)
                return parsed
            answer = response.json()
            if answer.get("type") != "try_again":
                return answer
        raise AssertionError(f"{request_id} did not resolve within {RESULT_TIMEOUT_S} s")

    def session(self):
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        return self.ok("create_session", body)["session_id"]

    def model(self, base_model, rank=4, session=None, seed=3):
        """A fresh tenant; its id."""
        session = session or self.session()
        ack = self.ok("create_model", create_model(session, base_model, rank, seed))
        return self.result(ack["request_id"])["model_id"]

    def submit(self, request):
        """Sends a `ForwardBackwardRequest`; the response."""
        return self.post_bytes("forward_backward", request.SerializeToString())

    def forward_backward(self, request):
        """Runs a `ForwardBackwardRequest` to its outcome."""
        response = self.submit(request)
        assert response.status_code == 200, (response.status_code, response.text)
        return self.result(response.json()["request_id"], pb.ForwardBackwardOutput)

    def optim_step(self, model_id, seq_id, **adam):
        return self.ok("optim_step", optim_step(model_id, seq_id, **adam))["request_id"]

    def base_sampler(self, base_model):
        session = self.session()
        body = {"session_id": session, "sampling_session_seq_id": next(_session_seq), "base_model": base_model}
        return self.ok("create_sampling_session", body | {"type": "create_sampling_session"})["sampling_session_id"]


def create_model(session, base_model, rank=4, seed=3, **lora):
    config = {"rank": rank, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True} | lora
    return {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": config,
            "optimizer_config": {"type": "adamw"}, "type": "create_model"}


def optim_step(model_id, seq_id, **adam):
    params = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    return {"adam_params": params | adam, "model_id": model_id, "seq_id": seq_id, "type": "optim_step"}


def sample_body(sampler, seq_id, prompt, num_samples=1, prompt_chunks=None, **params):
    chunks = prompt_chunks if prompt_chunks is not None else [{"type": "encoded_text", "tokens": list(prompt)}]
    sampling = {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 1} | params
    return {"num_samples": num_samples, "prompt": {"chunks": chunks}, "sampling_params": sampling, "sampling_session_id": sampler,
            "seq_id": seq_id, "prompt_logprobs": False, "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0,
            "prompt_alt_tokens_k": 0, "record_stability_info": False, "type": "sample"}


def tensor(values, dtype=None, shape=None):
    """A dense tensor: integers are int64, the rest float32."""
    array = np.asarray(values)
    is_int = array.dtype.kind == "i" if dtype is None else dtype == "int64"
    message = pb.Tensor(dtype=pb.DTYPE_INT64 if is_int else pb.DTYPE_FLOAT32)
    message.dense = array.astype(np.int64 if is_int else np.float32).tobytes()
    message.shape.extend(array.shape if shape is None else shape)
    return message


def fwdbwd(model_id, seq_id, data, loss_fn="cross_entropy", forward_only=False):
    """A request of `data`: a list of (tokens, {name: tensor})."""
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only)
    for tokens, inputs in data:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, dtype=np.int32).tobytes()
        for name, value in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(value)
    return request


def next_token_datum(tokens, weight=1.0):
    n = len(tokens) - 1
    return tokens[:-1], {"target_tokens": tensor(tokens[1:]), "weights": tensor([weight] * n, dtype="float32")}


def floats(output, field="logprobs"):
    """One array for each datum of a `ForwardBackwardOutput`."""
    arrays = []
    for record in output.loss_fn_outputs:
        batched = record.fields[field]
        offsets = np.frombuffer(batched.offsets, dtype=np.int64)
        assert batched.dtype == pb.DTYPE_FLOAT32
        for start, end in itertools.pairwise(offsets):
            values = np.frombuffer(batched.data[start:end], dtype=np.float32)
            arrays.append(values.reshape(-1, *batched.trailing_shape) if batched.trailing_shape else values)
    return arrays


def is_user_error(answer):
    return isinstance(answer, dict) and "error" in answer and answer.get("category") == "user"
