"""Adapters in and out over the API: uploaded as an archive, used through the SDK, downloaded in the form of other tools."""

import io
import json
import tarfile
import time

import httpx
import numpy as np
import pytest
import tinker
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from tinker import types

from harness import API_KEY, Server, encode, logprobs_of, next_token, same_bits, train

DATA = [next_token(encode("the quick brown fox jumps over the lazy dog"))]
HEADERS = {"x-api-key": API_KEY}


def evaluate(client):
    return logprobs_of(client.forward(DATA, "cross_entropy").result())


def download(server, path, **query):
    run, kind, name = path.removeprefix("tinker://").split("/")
    url = f"{server.url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    return httpx.get(url, params=query, headers=HEADERS, follow_redirects=True, timeout=60)


def files_of(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers() if member.isfile()}


def packed(files, form=tarfile.PAX_FORMAT):
    """As Python's tarfile writes it, with the time of a file in an extended header."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1763812345.25
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def upload(server, archive, base_model, name="mine", **extra):
    query = {"name": name, "base_model": base_model} | extra
    headers = HEADERS | {"content-type": "application/x-tar"}
    return httpx.post(f"{server.url}/api/v1/weights/import", params=query, headers=headers, content=archive, timeout=60)


def test_a_checkpoint_goes_out_in_pefts_form_and_comes_back_as_what_it_was(server, service, training, base_model):
    train(training, DATA, steps=2, learning_rate=1e-2)
    path, expected = training.save_state("out").result().path, evaluate(training)
    for form, named in (("peft", "lm_head"), ("tinker", "unembed_tokens")):
        answer = download(server, path, format=form)
        assert answer.status_code == 200, answer.text
        files = files_of(answer.content)
        config = json.loads(files["adapter_config.json"])
        assert named in config["target_modules"] and set(files) >= {"adapter_model.safetensors"}
        answer = upload(server, packed(files), base_model)
        assert answer.status_code == 200, answer.text
        again = answer.json()["path"]
        assert again.startswith("tinker://import-") and again.endswith("/weights/mine")
        assert same_bits(evaluate(service.create_training_client_from_state(again).result()), expected)
        tokens = types.ModelInput.from_ints(encode("the quick brown fox jumps over the lazy dog"))
        sampled = service.create_sampling_client(model_path=again).compute_logprobs(tokens).result()
        assert same_bits(sampled[1:], expected)
    training.load_state(again).result()
    assert same_bits(evaluate(training), expected)
    assert same_bits(load_tensors(files_of(download(server, path).content)["adapter_model.safetensors"])["base_model.model.model.unembed_tokens.lora_B.weight"],
                     load_tensors(files["adapter_model.safetensors"])["base_model.model.model.unembed_tokens.lora_B.weight"])


def test_an_adapter_without_an_optimizer_says_how_it_is_loaded(server, service, training, base_model):
    path = training.save_weights_for_sampler("no-moments").result().path
    imported = upload(server, packed(files_of(download(server, path).content)), base_model).json()["path"]
    with pytest.raises(tinker.RequestFailedError) as refused:
        service.create_training_client_from_state_with_optimizer(imported).result()
    assert imported in str(refused.value) and "has no state of an optimizer" in str(refused.value)
    assert "create_training_client_from_state" in str(refused.value)
    with pytest.raises(tinker.RequestFailedError, match="has no state of an optimizer"):
        training.load_state_with_optimizer(imported).result()
    train(service.create_training_client_from_state(imported).result(), DATA, steps=1)
    train(training, DATA, steps=1)


def test_every_format_of_tar_is_taken(server, training, base_model):
    files = files_of(download(server, training.save_state("tars").result().path).content)
    wanted = {f"./{name}": content for name, content in files.items() if name.startswith("adapter_")}
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        answer = upload(server, packed(wanted, form), base_model)
        assert answer.status_code == 200, answer.text


def test_a_hostile_upload_says_why_and_leaves_nothing(server, training, base_model):
    files = files_of(download(server, training.save_state("hostile").result().path).content)
    files.pop("checkpoint_complete")
    before = sorted((server.directory / "data").glob("checkpoints/import-*"))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        link = tarfile.TarInfo("adapter_config.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    tensors = load_tensors(files["adapter_model.safetensors"])
    name = next(iter(tensors))
    poisoned = save_tensors(tensors | {name: np.full_like(tensors[name], np.inf)})
    for archive, said in (
        (out.getvalue(), "is a link"),
        (packed({"../adapter_config.json": b"{}"}), "../adapter_config.json"),
        (packed(files | {"adapter_model.safetensors": poisoned}), "not a finite number"),
        (packed(files)[:-5000], "ends before its end"),
        (b"\x1f\x8b" * 1000, "no tar archive"),
        (b"\xff" * 1024, "no tar archive"),
    ):
        answer = upload(server, archive, base_model)
        assert answer.status_code == 400 and said in answer.json()["detail"], answer.text
    answer = upload(server, packed(files), "nobody/serves-this")
    assert answer.status_code == 400 and "nobody/serves-this" in answer.json()["detail"]
    assert sorted((server.directory / "data").glob("checkpoints/import-*")) == before
    assert not list((server.directory / "data/scratch").iterdir())


def test_an_upload_that_is_killed_leaves_nothing(tmp_path):
    with Server(tmp_path) as server:
        begun = packed({"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(1 << 20)})[: 1 << 19]

        def chunks():
            yield begun
            deadline = time.monotonic() + 10
            while not list((server.directory / "data/scratch").glob("*/adapter_model.safetensors")):
                assert time.monotonic() < deadline, "the upload is on disk while it goes on"
                time.sleep(0.05)
            server.stop(how=9)
            yield begun

        with pytest.raises(httpx.HTTPError):
            upload(server, chunks(), server.base_model())
        assert list((server.directory / "data/scratch").iterdir())
        server.start()
        assert not list((server.directory / "data").glob("scratch/*")) and not list((server.directory / "data").glob("checkpoints/import-*"))
