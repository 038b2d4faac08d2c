"""Every command of the SDK's own command line, in both of its formats."""

import json
import os

import pytest

from harness import API_KEY, encode, next_token, run_client, train

DATA = [next_token(encode("the quick brown fox"))]


@pytest.fixture
def cli(server, tmp_path):
    """Runs `tinker ...` against the server; the text it prints. A command that fails has to say so without a traceback."""

    def run(*args, fails=False):
        environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "HOME": str(tmp_path)}
        done = run_client("-m", "tinker.cli", *args, fails=fails, env=environment, cwd=tmp_path)
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture
def paths(training):
    """Paths of a training checkpoint, one for sampling and one for download."""
    train(training, DATA, steps=1)
    saves = training.save_state("cli", user_metadata={"k": "v"}), training.save_weights_for_sampler("cli"), training.save_weights_external("cli")
    return [save.result().path for save in saves]


@pytest.mark.parametrize("form", ["table", "json"])
def test_what_lists_and_shows(cli, paths, training, base_model, form):
    def run(*args):
        out = cli("--format", form, *args)
        return json.loads(out) if form == "json" else out

    weights, _, external = paths
    run_id = training.model_id
    assert base_model in str(run("model", "list"))
    assert base_model in str(run("model", "list", base_model.split("/")[-1][:4]))
    assert run_id in str(run("run", "list", "--limit", "0"))
    assert run_id in str(run("run", "info", run_id))
    if form == "json":
        listed = run("checkpoint", "list", "--run-id", run_id)["checkpoints"]
        assert {c["tinker_path"]: c["checkpoint_type"] for c in listed} == dict(zip(paths, ["training", "sampler", "external"]))
        assert all(c["size_bytes"] > 0 for c in listed)
        assert external in {c["tinker_path"] for c in run("checkpoint", "list", "--limit", "0")["checkpoints"]}
    else:
        assert "cli" in run("checkpoint", "list", "--run-id", run_id) and "checkpoint" in run("checkpoint", "list")
    assert "cli" in str(run("checkpoint", "info", weights))
    run("billing", "usage", "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00")
    run("billing", "checkpoint-storage")


def test_what_changes_a_checkpoint(cli, paths):
    weights, sampler, external = paths
    info = lambda path: json.loads(cli("--format", "json", "checkpoint", "info", path))
    cli("checkpoint", "publish", weights)
    assert info(weights)["public"]
    cli("checkpoint", "unpublish", weights)
    assert not info(weights)["public"]
    cli("checkpoint", "set-ttl", sampler, "--ttl", "7200")
    assert info(sampler)["expires_at"]
    cli("checkpoint", "set-ttl", sampler, "--remove")
    assert info(sampler)["expires_at"] is None
    assert "ttl_seconds" in cli("checkpoint", "set-ttl", sampler, "--ttl", "5", fails=True)
    cli("checkpoint", "delete", sampler, external, "--yes")
    assert "not found" in cli("checkpoint", "info", sampler, fails=True).lower()
    assert "not found" in cli("--format", "json", "checkpoint", "info", external, fails=True).lower()


@pytest.mark.parametrize("which", ["weights", "external"])
def test_a_checkpoint_is_downloaded_as_a_peft_adapter(cli, paths, tmp_path, server, which):
    path = {"weights": paths[0], "external": paths[2]}[which]
    cli("checkpoint", "download", path, "--output", str(tmp_path / "out"))
    files = {f.name: f for f in (tmp_path / "out").rglob("*") if f.is_file()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(files["adapter_config.json"].read_text())["r"] == 8
    saved = next(p for p in server.directory.glob("**/external_weights/cli/adapter_model.safetensors") if paths[2].split("/")[2] in p.parts)
    assert files["adapter_model.safetensors"].read_bytes() == saved.read_bytes()
    left = [p for p in server.directory.glob("**/external_weights/download") if p.is_dir()]
    assert not left, "what was made for the download is gone"
    assert "sampler" in cli("checkpoint", "download", paths[1], fails=True).lower()


def test_what_needs_no_checkpoint(cli, service):
    assert "0.38" in cli("version")
    assert "yes" in cli("auth", "status")
    assert cli("auth", "whoami", fails=True)
    assert "No default credential" in cli("auth", "logout", fails=True)
    session_id = service.holder.get_session_id() if hasattr(service.holder, "get_session_id") else "x"
    assert "trace" in cli("session", "export-trace", session_id, fails=True).lower()
    assert cli("run", "info", "no-such-run", fails=True)
    assert cli("checkpoint", "push-hf", "tinker://a/weights/b", fails=True)


def test_a_key_can_be_verified_for_logging_in(server):
    import httpx
    from tinker.cli.auth_api import AuthApiError, TinkerAuthApi

    with httpx.Client() as http:
        api = TinkerAuthApi(http, base_url=server.url)
        assert api.get_self_api_key(API_KEY).name == "strata"
        with pytest.raises(AuthApiError, match="cannot be deleted"):
            api.delete_self_api_key(API_KEY)
