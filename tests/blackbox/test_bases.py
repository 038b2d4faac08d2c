"""Several base models in one server: a teacher beside the model that learns from it."""

import json
import subprocess

import numpy as np
import pytest
import tinker
from tinker import types

from harness import API_KEY, Server, binary, encode, logprobs_of, next_token, same_bits, supervised, train

STUDENT, TEACHER = "strata/tiny-base", "org/teacher"
TEACHER_CONFIG = dict(
    model_type="qwen3", vocab_size=272, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=96, max_position_embeddings=512, initializer_range=0.2, eos_token_id=2, bos_token_id=0,
)
TEXT = encode("a teacher and a student share one machine")
REFUSED = (tinker.RequestFailedError, tinker.APIStatusError)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher")
    (directory / "config.json").write_text(json.dumps(TEACHER_CONFIG))
    command = [binary(), "init-model", str(directory / "model"), "--config", str(directory / "config.json"), "--dtype", "f32"]
    subprocess.run(command, check=True, capture_output=True)
    return str(directory / "model")


@pytest.fixture(scope="module")
def both(teacher, tmp_path_factory):
    flags = ("--name", STUDENT, "--name", TEACHER, "--tokenizer", "org/words", "--tokenizer", "org/words")
    with Server(tmp_path_factory.mktemp("both"), STUDENT, teacher, *flags, "--memory", "2GiB") as running:
        yield running


@pytest.fixture
def service(both):
    with tinker.ServiceClient(base_url=both.url, api_key=API_KEY) as client:
        yield client


def adapter(service, base_model):
    return service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()


def scores(service, base_model):
    prompt = types.ModelInput.from_ints(TEXT)
    return service.create_sampling_client(base_model=base_model).compute_logprobs(prompt)


def test_both_are_named_and_others_refused(both, service):
    rest = tinker.RestClient(base_url=both.url, api_key=API_KEY)
    models = rest.get_server_capabilities().result().supported_models
    assert [model.model_name for model in models] == [STUDENT, TEACHER]
    with pytest.raises(REFUSED, match=f"{STUDENT}.*{TEACHER}"):
        adapter(service, "org/nobody")


def test_each_computes_what_it_does_alone_while_the_other_is_busy(both, teacher, service, tmp_path):
    student, other = adapter(service, STUDENT), adapter(service, TEACHER)
    work = [other.forward_backward([next_token(TEXT * 5)] * 8, "cross_entropy") for _ in range(6)]
    losses = train(student, [next_token(TEXT)], steps=3)
    of_student, of_teacher = scores(service, STUDENT).result(), scores(service, TEACHER).result()
    [pass_.result() for pass_ in work]
    assert student.get_info().model_data.model_name == STUDENT
    assert other.get_info().model_data.model_name == TEACHER
    for name, expected in ((STUDENT, of_student), (TEACHER, of_teacher)):
        directory = tmp_path / name.replace("/", "-")
        directory.mkdir()
        flags = (teacher, "--name", TEACHER, "--tokenizer", "org/words") if name == TEACHER else ()
        with Server(directory, *flags) as alone, tinker.ServiceClient(base_url=alone.url, api_key=API_KEY) as client:
            assert same_bits(scores(client, name).result()[1:], expected[1:])
            if name == STUDENT:
                assert train(adapter(client, STUDENT), [next_token(TEXT)], steps=3) == losses


def test_a_student_learns_what_its_teacher_says(service):
    student = adapter(service, STUDENT)
    teacher = service.create_sampling_client(base_model=TEACHER)
    prompt = types.ModelInput.from_ints(TEXT[:6])
    greedy = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    said = list(teacher.sample(prompt, 1, greedy).result().sequences[0].tokens)
    losses = train(student, [supervised(TEXT[:6], said)], steps=100, learning_rate=4e-3)
    assert losses[-1] < 0.1 < losses[0]
    learned = student.save_weights_and_get_sampling_client()
    assert list(learned.sample(prompt, 1, greedy).result().sequences[0].tokens) == said


def test_a_checkpoint_belongs_to_its_base_model(service):
    student, other = adapter(service, STUDENT), adapter(service, TEACHER)
    [client.optim_step(types.AdamParams(learning_rate=1e-3)).result() for client in (student, other)]
    path = other.save_state("of-teacher").result().path
    with pytest.raises(REFUSED, match=TEACHER):
        student.load_state(path).result()
    restored = service.create_training_client_from_state(path)
    assert restored.get_info().model_data.model_name == TEACHER
    expected, found = (client.forward([next_token(TEXT)], "cross_entropy").result() for client in (other, restored))
    assert same_bits(logprobs_of(expected), logprobs_of(found))
    path = other.save_weights_for_sampler("sampler").result().path
    with pytest.raises(REFUSED, match=f"{TEACHER}.*{STUDENT}"):
        service.create_sampling_client(model_path=path, base_model=STUDENT).result()
    sampler = service.create_sampling_client(model_path=path, base_model=TEACHER)
    assert np.isfinite(sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()[1:]).all()
    # An operation of the student that was refused holds up nothing.
    assert np.isfinite(train(student, [next_token(TEXT)], steps=1)).all()
