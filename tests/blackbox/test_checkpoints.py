"""Saving, loading, listing and deleting checkpoints through the official SDK."""

import json
import threading

import pytest
import tinker
from tinker import types

from harness import chat_prompt, encode, logprobs_of, next_token, same_bits, supervised, train

DATA = [next_token(encode("the quick brown fox jumps over the lazy dog")), supervised(chat_prompt("Say it"), encode("it"))]


def evaluate(client):
    return logprobs_of(client.forward(DATA, "cross_entropy").result())


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(service, training):
    train(training, DATA, steps=3)
    path = training.save_state("middle").result().path
    assert path.startswith("tinker://") and path.endswith("/weights/middle")
    uninterrupted = train(training, DATA, steps=3)
    resumed_client = service.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed_client, DATA, steps=3) == uninterrupted
    assert same_bits(evaluate(resumed_client), evaluate(training))


def test_weights_alone_restore_the_weights_and_not_the_moments(service, training):
    train(training, DATA, steps=3)
    path = training.save_state("weights-alone").result().path
    expected = evaluate(training)
    fresh_moments = service.create_training_client_from_state(path).result()
    assert same_bits(evaluate(fresh_moments), expected)
    assert fresh_moments.get_info().lora_rank == 8
    after = train(training, DATA, steps=2)
    assert train(fresh_moments, DATA, steps=2) != after


def test_loading_into_a_living_client(training):
    train(training, DATA, steps=2)
    path = training.save_state("to-load").result().path
    saved = evaluate(training)
    train(training, DATA, steps=2)
    assert not same_bits(evaluate(training), saved)
    training.load_state(path).result()
    assert same_bits(evaluate(training), saved)


def test_named_sampler_weights_do_not_change_when_training_goes_on(service, training):
    prompt = types.ModelInput.from_ints(encode("the quick"))
    train(training, DATA, steps=2)
    path = training.save_weights_for_sampler("frozen").result().path
    assert path.endswith("/sampler_weights/frozen")
    ephemeral = training.save_weights_and_get_sampling_client()
    expected = evaluate(training)
    before = training.create_sampling_client(path).compute_logprobs(prompt).result()
    train(training, DATA, steps=3)
    later = service.create_sampling_client(model_path=path)
    assert same_bits(later.compute_logprobs(prompt).result()[1:], before[1:])
    assert same_bits(ephemeral.compute_logprobs(prompt).result()[1:], before[1:])
    full = types.ModelInput.from_ints(encode("the quick brown fox jumps over the lazy dog"))
    assert same_bits(later.compute_logprobs(full).result()[1:], expected)
    assert not same_bits(evaluate(training), expected), "and sampling an old checkpoint leaves the live weights alone"


def test_sampling_clients_of_one_save_share_it_and_those_of_the_next_do_not(service, training):
    prompt = types.ModelInput.from_ints(encode("the quick brown fox jumps over the lazy dog " * 20)[:200])
    params = types.SamplingParams(max_tokens=8, temperature=0.0)

    def sampled(path):
        output = service.create_sampling_client(model_path=path).sample(prompt, 1, params).result()
        return output.prompt_cache_hit_tokens, output.sequences[0]

    train(training, DATA, steps=2)
    path = training.save_weights_for_sampler("shared").result().path
    (none, first), (found, second) = sampled(path), sampled(path)
    assert (none, found) == (0, 199)
    assert first.tokens == second.tokens and same_bits(first.logprobs, second.logprobs)
    service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    train(training, DATA, steps=2)
    assert training.save_weights_for_sampler("shared").result().path == path
    none, third = sampled(path)
    assert none == 0 and not same_bits(first.logprobs, third.logprobs)


def test_a_training_checkpoint_can_be_sampled(service, training):
    train(training, DATA, steps=2)
    path = training.save_state("both").result().path
    prompt = types.ModelInput.from_ints(encode("the quick brown fox jumps over the lazy dog"))
    assert same_bits(service.create_sampling_client(model_path=path).compute_logprobs(prompt).result()[1:], evaluate(training))


def test_sampler_weights_cannot_be_trained(service, training):
    path = training.save_weights_for_sampler("sampler-only").result().path
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)):
        service.create_training_client_from_state(path).result()


def test_a_name_is_taken_once(training):
    training.save_state("name").result()
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match="name"):
        training.save_state("name").result()
    training.save_weights_for_sampler("name").result()
    train(training, DATA, steps=1)


def test_overwriting_is_asked_for(service, training):
    training.save_state("again").result()
    train(training, DATA, steps=2)
    path = training.save_state("again", overwrite=True).result().path
    assert same_bits(evaluate(service.create_training_client_from_state(path).result()), evaluate(training))


@pytest.mark.parametrize("name", ["../escape", "a/b", "..", ".", "", "a\\b", "nul\0byte", "x" * 300])
def test_a_name_that_could_leave_its_directory_is_refused(server, training, name):
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)):
        training.save_state(name).result(timeout=20)
    train(training, DATA, steps=1)
    assert not list(server.directory.parent.glob("**/escape"))


def test_checkpoints_are_listed_until_they_are_deleted(service, rest, training, base_model):
    training.save_state("listed").result()
    sampler_path = training.save_weights_for_sampler("listed").result().path
    run_id = training.model_id
    listing = rest.list_checkpoints(run_id).result().checkpoints
    assert {c.checkpoint_id for c in listing} == {"weights/listed", "sampler_weights/listed"}
    assert {c.checkpoint_type for c in listing} == {"training", "sampler"}
    assert all(c.size_bytes > 0 for c in listing)
    everyone = rest.list_user_checkpoints(limit=1000).result().checkpoints
    assert sampler_path in {c.tinker_path for c in everyone}
    info = rest.get_weights_info_by_tinker_path(sampler_path).result()
    assert info.base_model == base_model and info.is_lora and info.lora_rank == 8
    run = rest.get_training_run(run_id).result()
    assert run.training_run_id == run_id and run.base_model == base_model and run.is_lora and run.lora_rank == 8
    assert run_id in {r.training_run_id for r in rest.list_training_runs(limit=1000).result().training_runs}
    rest.delete_checkpoint_from_tinker_path(sampler_path).result()
    assert {c.checkpoint_id for c in rest.list_checkpoints(run_id).result().checkpoints} == {"weights/listed"}
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(sampler_path).result()
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)):
        service.create_sampling_client(model_path=sampler_path).result()


def test_publishing_and_expiry_are_recorded(rest, training):
    path = training.save_state("published", ttl_seconds=7200).result().path

    def checkpoint():
        return next(c for c in rest.list_checkpoints(training.model_id).result().checkpoints if c.tinker_path == path)

    assert checkpoint().expires_at is not None and not checkpoint().public
    for _ in range(2):
        rest.publish_checkpoint_from_tinker_path(path).result()
    assert checkpoint().public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not checkpoint().public
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert checkpoint().expires_at is None


def test_user_metadata_comes_back(service, rest, base_model):
    client = service.create_lora_training_client(base_model=base_model, rank=2, user_metadata={"renderer_name": "chatml"}).result()
    assert rest.get_training_run(client.model_id).result().user_metadata == {"renderer_name": "chatml"}


def test_the_saved_adapter_is_a_peft_adapter(server, training):
    train(training, DATA, steps=1)
    training.save_weights_for_sampler("peft").result()
    configs = [path for path in server.directory.glob("**/adapter_config.json") if "peft" in path.parts]
    assert len(configs) == 1, configs
    config = json.loads(configs[0].read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 8 and config["lora_alpha"] == 32
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} <= set(config["target_modules"])
    from safetensors import safe_open

    with safe_open(configs[0].with_name("adapter_model.safetensors"), "numpy") as tensors:
        names = set(tensors.keys())
        q = "base_model.model.model.layers.0.self_attn.q_proj"
        assert tensors.get_tensor(f"{q}.lora_A.weight").shape == (8, 192)
        assert tensors.get_tensor(f"{q}.lora_B.weight").shape == (192, 8)
    assert sum("lora_A" in name and ".layers." in name for name in names) == 5 * 7


def test_saving_does_not_disturb_a_neighbour(service, training, base_model):
    neighbour = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
    expected = train(neighbour, DATA, steps=4)
    saves = [training.save_state(f"burst-{i}") for i in range(8)]
    again = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
    assert train(again, DATA, steps=4) == expected
    assert len({save.result().path for save in saves}) == 8


def test_tenants_in_parallel_compute_the_bits_they_compute_alone(server, service, base_model):
    def run(seed, client):
        data = [next_token(encode(f"tenant {seed} has a text of its own, " * (1 + seed % 3)))]
        losses = train(client, data, steps=4)
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, seed=seed, stop=[])
        sequence = sampler.sample(types.ModelInput.from_ints(encode("tenant")), 1, params).result().sequences[0]
        return losses, sequence.tokens, sequence.logprobs

    def client(seed):
        return service.create_lora_training_client(base_model=base_model, rank=2 + seed, seed=seed).result()

    alone = [run(seed, client(seed)) for seed in range(4)]
    together = [None] * 4

    def work(seed, own):
        together[seed] = run(seed, own)

    threads = [threading.Thread(target=work, args=(seed, client(seed))) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert together == alone
