"""The SDK's whole surface, method by method, and what of it this server does not do."""

import asyncio
import datetime
import pickle
import urllib.request

import pyrage
import pytest
import tinker
from tinker import types

from harness import API_KEY, encode, logprobs_of, next_token, same_bits, train

DATA = [next_token(encode("the quick brown fox jumps over the lazy dog"))]
PROMPT = types.ModelInput.from_ints(encode("the quick"))


def fetched(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
        return response.status, response.read()


# ---- downloads -------------------------------------------------------------------------------------------------------


def test_external_weights_are_fetched_without_a_key(rest, training):
    train(training, DATA, steps=1)
    saved = training.save_weights_external("plain", ttl_seconds=3600).result()
    assert saved.path.endswith("/external_weights/plain")
    signed = rest.get_external_weights_urls(saved.path).result()
    assert signed.expires - datetime.datetime.now(datetime.UTC) > datetime.timedelta(hours=1)
    assert set(signed.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    url = signed.urls["adapter_model.safetensors"]
    _, whole = fetched(url)
    status, part = fetched(url, Range="bytes=100-199")
    assert status == 206 and part == whole[100:200]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetched(url[:-2])
    # Saving took its place in the order of the model.
    train(training, DATA, steps=1)


@pytest.mark.parametrize("kind", ["x25519", "ssh-ed25519", "ssh-rsa"])
def test_external_weights_are_encrypted_to_the_keys_that_are_given(server, rest, training, tmp_path, kind):
    if kind == "x25519":
        identity = pyrage.x25519.Identity.generate()
        recipient = str(identity.to_public())
    else:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

        key = ed25519.Ed25519PrivateKey.generate() if kind == "ssh-ed25519" else rsa.generate_private_key(65537, 2048)
        form = serialization.PrivateFormat.OpenSSH
        identity = pyrage.ssh.Identity.from_buffer(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        recipient = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode() + " me@here"
    other = pyrage.x25519.Identity.generate()
    train(training, DATA, steps=1)
    plain = training.save_weights_external("plain").result().path
    sealed = training.save_weights_external("sealed", age_encryption_recipients=[str(other.to_public()), recipient]).result().path
    plain, sealed = (rest.get_external_weights_urls(path).result().urls for path in (plain, sealed))
    assert set(sealed) == {f"{name}.age" for name in plain}
    for name, url in plain.items():
        encrypted = fetched(sealed[f"{name}.age"])[1]
        assert pyrage.decrypt(encrypted, [identity]) == pyrage.decrypt(encrypted, [other]) == fetched(url)[1]
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(encrypted, [pyrage.x25519.Identity.generate()])
    on_disk = [path.name for path in server.directory.glob(f"**/{training.model_id}/external_weights/sealed/*")]
    assert sorted(on_disk) == ["adapter_config.json.age", "adapter_model.safetensors.age", "strata.json"]


@pytest.mark.parametrize("recipients", [["age1nonsense"], ["ssh-dss AAAA"], [str(pyrage.x25519.Identity.generate().to_public())] * 11])
def test_keys_that_are_of_no_use_are_refused_and_training_goes_on(training, recipients):
    with pytest.raises(tinker.RequestFailedError, match="recipient"):
        training.save_weights_external("refused", age_encryption_recipients=recipients).result(timeout=30)
    train(training, DATA, steps=1)


def test_a_training_checkpoint_is_downloaded_as_the_cookbook_does_it(server, training, tmp_path):
    """The cookbook's `weights.download`, call by call: load into a new run, export to a key of one use, fetch, decrypt, delete."""
    train(training, DATA, steps=2)
    path = training.save_state("to-download").result().path
    identity = pyrage.x25519.Identity.generate()
    service = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
    rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
    loaded = service.create_training_client_from_state(path, user_metadata={"created_by": "a test"}).result()
    export = loaded.save_weights_external("download", ttl_seconds=3600, age_encryption_recipients=[str(identity.to_public())]).result().path
    signed = rest.get_external_weights_urls(export).result()
    rest.set_checkpoint_ttl_from_tinker_path(export, 3600).result()
    for name, url in signed.urls.items():
        fetched_to, opened = tmp_path / name, tmp_path / name.removesuffix(".age")
        urllib.request.urlretrieve(url, fetched_to)
        pyrage.decrypt_file(str(fetched_to), str(opened), [identity])
    rest.delete_checkpoint_from_tinker_path(export).result()
    service.close("success").result()
    expected = training.save_weights_external("expected").result().path
    expected = rest.get_external_weights_urls(expected).result().urls["adapter_model.safetensors"]
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == fetched(expected)[1]
    with pytest.raises(urllib.error.HTTPError):
        fetched(next(iter(signed.urls.values())))


def test_external_weights_are_for_download_only(service, training):
    path = training.save_weights_external("outside").result().path
    for use in (lambda: service.create_training_client_from_state(path).result(), lambda: service.create_sampling_client(model_path=path).result()):
        with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match="external|download"):
            use()


# ---- the rest client -------------------------------------------------------------------------------------------------


def test_a_copy_outlives_what_it_was_copied_from(service, rest, training):
    train(training, DATA, steps=1)
    path = training.save_state("source", user_metadata={"a": "b"}).result().path
    copy = rest.copy_weights(path, destination_project_id="elsewhere", ttl_seconds=3600).result()
    expected = logprobs_of(training.forward(DATA, "cross_entropy").result())
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert same_bits(logprobs_of(service.create_training_client_from_state(copy).result().forward(DATA, "cross_entropy").result()), expected)
    found = next(c for c in rest.list_user_checkpoints(limit=1000).result().checkpoints if c.tinker_path == copy)
    assert found.user_metadata == {"a": "b"} and found.expires_at is not None
    assert rest.get_training_run_by_tinker_path(copy).result().base_model == training.get_info().model_name


def test_sessions_are_found_and_assigned(server, rest):
    def search(**query):
        page = rest.search_sessions(types.SessionSearchRequest(**query)).result()
        return {s.session_id: s for s in page.sessions}

    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY, user_metadata={"k": "v1"}) as client:
        client.create_sampling_client(base_model=server.base_model()).get_base_model()
        (session_id,) = search(user_metadata={"k": "v1"})
        rest.assign_session_project(session_id, "a-project").result()
        found = search(user_metadata={"k": "v1"})[session_id]
        assert found.status.type == "active" and found.project_id == "a-project"
        assert session_id in search(session_id=session_id) and session_id in search(project_ids=["a-project"])
        assert session_id not in search(user_metadata={"k": "v2"}) and session_id not in search(project_ids=["b"])
        assert rest.get_session(session_id).result().sampler_ids
    assert search(session_id=session_id)[session_id].status.type == "client_finished"
    pages, request = [], types.SessionSearchRequest(limit=1)
    for _ in range(2):
        page = rest.search_sessions(request).result()
        pages += [s.session_id for s in page.sessions]
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert len(set(pages)) == 2 and session_id in rest.list_sessions(limit=1000).result().sessions


def test_what_a_service_of_its_own_does_not_have_is_empty(server, rest):
    admin = tinker.AdminClient(base_url=server.url, api_key=API_KEY)
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert admin.get_billing_usage(now, now + datetime.timedelta(hours=1)).result().data == []
    assert admin.get_current_checkpoint_storage_usage().result() is not None
    assert admin.get_audit_log("checkpoint_read", now.date()).result().entries == []
    with pytest.raises(Exception, match="trace"):
        rest.export_session_trace("some-session").result(timeout=30)


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_many_samples_come_back_through_one_poll(service, base_model):
    sampler = service.create_sampling_client(base_model=base_model)
    params = types.SamplingParams(max_tokens=2, temperature=0.0, seed=0, stop=[])
    samples = [sampler.sample(PROMPT, 1, params) for _ in range(64)]
    tokens = {tuple(sample.result(timeout=120).sequences[0].tokens) for sample in samples}
    assert len(tokens) == 1
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError)):
        sampler.sample(types.ModelInput.from_ints([10**6]), 1, params).result(timeout=60)
    assert sampler.sample(PROMPT, 1, params).result(timeout=60).sequences


def test_forks_of_a_sampling_client_are_told_apart(service, base_model):
    sampler = service.create_sampling_client(base_model=base_model)
    forks = [pickle.loads(pickle.dumps(sampler)) for _ in range(3)]
    params = types.SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    for client in [sampler, *forks]:
        assert client.sample(PROMPT, 1, params).result(timeout=60).sequences
    assert sorted(client._cloned_sampler_id for client in forks) == [1, 2, 3]
    handle = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=API_KEY)
    assert handle.get_base_model() == base_model


def test_a_sample_that_is_given_up_is_cancelled(service, base_model):
    sampler = service.create_sampling_client(base_model=base_model)

    async def run():
        params = types.SamplingParams(max_tokens=1500, temperature=1.0, seed=0, stop=[])
        task = asyncio.create_task(sampler.sample_async(PROMPT, 8, params))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    short = types.SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    assert sampler.sample(PROMPT, 1, short).result(timeout=60).sequences


# ---- training --------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_is_not_here_is_refused_by_name(wire, base_model):
    from wire import create_model

    body = create_model(wire.session(), base_model) | {"optimizer_config": {"type": "dimuon", "version": 1}}
    response = wire.post("create_model", body)
    assert response.status_code == 400 and "dimuon" in response.json()["detail"]
    model = wire.model(base_model)
    step = {"model_id": model, "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 1e-3}, "type": "optim_step"}
    assert "dimuon" in wire.result(wire.ok("optim_step", step)["request_id"])["error"]
    assert "metrics" in wire.result(wire.optim_step(model, 2))


@pytest.mark.parametrize("path", ["save_weights_somewhere", "optim_step", "load_weights", "save_weights", "forward"])
def test_a_refused_operation_never_holds_up_those_after_it(wire, base_model, path):
    model = wire.model(base_model)
    later = wire.optim_step(model, 2)
    cut = f'{{"model_id": "{model}", "seq_id": 1, "path": '
    response = wire.post_bytes(path, cut.encode(), content_type="application/json")
    assert response.status_code in (200, 404), response.text
    assert "metrics" in wire.result(later)
    answer = wire.result(f"{model}:1")
    assert answer["category"] == "user", answer
