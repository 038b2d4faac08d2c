"""`forward_backward_custom` with torch, where torch is installed."""

import numpy as np
import pytest
from tinker import types

from harness import encode, logprobs_of, next_token, same_bits

torch = pytest.importorskip("torch")

DATA = [next_token(encode("Hello, how are you today?")), next_token(encode("another one"))]


def test_the_gradient_of_a_custom_cross_entropy_is_that_of_the_servers(service, base_model):
    """-sum(logprobs) is cross-entropy of weight 1: the same gradient, and so the same step."""

    def loss(_data, logprobs):
        return -sum(lp.sum() for lp in logprobs), {"tokens:sum": float(sum(len(lp) for lp in logprobs))}

    after = []
    for run in (lambda client: client.forward_backward_custom(DATA, loss), lambda client: client.forward_backward(DATA, "cross_entropy")):
        client = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
        output = run(client).result()
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        after.append((output.metrics["loss:sum"], logprobs_of(client.forward(DATA, "cross_entropy").result())))
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-5)
    assert same_bits(after[0][1], after[1][1])


def test_a_preference_loss_descends_and_its_metrics_come_back(training):
    """A pair as DPO has it: the first is preferred to the second."""
    reference = [lp.copy() for lp in (logprobs_of(training.forward(DATA, "cross_entropy").result(), i) for i in range(2))]

    def loss(_data, logprobs):
        margins = [lp.sum() - float(ref.sum()) for lp, ref in zip(logprobs, reference, strict=True)]
        value = -torch.nn.functional.logsigmoid(0.1 * (margins[0] - margins[1]))
        return value, {"margin:mean": float((margins[0] - margins[1]).detach())}

    values = []
    for _ in range(8):
        backward = training.forward_backward_custom(DATA, loss)
        training.optim_step(types.AdamParams(learning_rate=2e-3))
        metrics = backward.result().metrics
        assert "margin:mean" in metrics and "surrogate_loss:sum" in metrics
        values.append(metrics["loss:sum"])
    assert values[0] == pytest.approx(np.log(2), rel=1e-4) and values[-1] < values[0] - 0.1, values
