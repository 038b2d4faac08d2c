"""What clients of earlier versions (0.24 to 0.30) send and expect, on the wire."""

import io
import tarfile
import urllib.request

import pytest

from harness import encode
from wire import create_model

TOKENS = encode("the quick brown fox")


def datum():
    inputs = {"target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [len(TOKENS) - 1]},
              "weights": {"data": [1.0] * (len(TOKENS) - 1), "dtype": "float32", "shape": [len(TOKENS) - 1]}}
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]}, "loss_fn_inputs": inputs}


@pytest.mark.parametrize("path,field", [("forward_backward", "forward_backward_input"), ("forward", "forward_input")])
def test_a_pass_goes_in_and_comes_back_as_json(wire, base_model, path, field):
    model = wire.model(base_model)
    body = {"model_id": model, "seq_id": 1, field: {"data": [datum(), datum()], "loss_fn": "cross_entropy"}, "type": path}
    output = wire.result(wire.ok(path, body)["request_id"])
    assert output["metrics"]["loss:sum"] > 0
    assert len(output["loss_fn_outputs"]) == 2 and output["loss_fn_outputs"][1]["logprobs"]["dtype"] == "float32"
    norm = wire.result(wire.optim_step(model, 2))["metrics"]["optim/grad_norm"]
    assert (norm > 0) == (path == "forward_backward")


def sampled(wire, **fields):
    body = {"num_samples": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}, "prompt_logprobs": True,
            "sampling_params": {"max_tokens": 3, "seed": 1, "temperature": 0.0, "stop": []}, "type": "sample"}
    return wire.result(wire.ok("asample", body | fields)["request_id"])


def test_a_sample_needs_no_session_and_comes_back_as_json(wire, base_model):
    answer = sampled(wire, base_model=base_model)
    assert [len(s["tokens"]) for s in answer["sequences"]] == [3, 3] and len(answer["prompt_logprobs"]) == len(TOKENS)
    assert answer["prompt_logprobs"][0] is None and answer["sequences"][0]["stop_reason"] == "length"
    model = wire.model(base_model)
    saved = wire.result(wire.ok("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "old"})["request_id"])
    # A fresh adapter is the base model.
    assert sampled(wire, model_path=saved["path"]) == answer
    refused = wire.post("asample", {"prompt": {"chunks": [{"tokens": [1]}]}, "base_model": "no/such"})
    assert refused.status_code == 400 and "no/such" in refused.text


def test_an_archive_is_redirected_to_and_fetched_without_a_key(wire, base_model):
    model = wire.model(base_model)
    wire.result(wire.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "old"})["request_id"])
    response = wire.get(f"training_runs/{model}/checkpoints/weights/old/archive", follow_redirects=False)
    assert response.status_code == 302 and response.headers["expires"].endswith("GMT")
    with urllib.request.urlopen(response.headers["location"]) as fetched:
        assert int(fetched.headers["content-length"]) > 0
        archive = tarfile.open(fileobj=io.BytesIO(fetched.read()))
    assert archive.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
    assert archive.extractfile("adapter_config.json").read().startswith(b"{")
    assert wire.get(f"training_runs/{model}/checkpoints/weights/none/archive").status_code == 404


def test_a_model_is_unloaded(wire, base_model):
    body = create_model(wire.session(), base_model)
    model = wire.result(wire.ok("create_model", body)["request_id"])["model_id"]
    assert wire.result(wire.ok("unload_model", {"model_id": model})["request_id"])["model_id"] == model
    assert wire.post("optim_step", {"model_id": model, "seq_id": 1}).status_code == 400
