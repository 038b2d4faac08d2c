"""Fixtures: one server for most tests, the official SDK and a bare wire client on top of it."""

import os
import signal

# The SDK must not look for a hub, credentials or a telemetry endpoint on this machine.
os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest
import tinker

from harness import API_KEY, Server
from wire import Wire

# Whoever runs the tests in the background or under nohup has these ignored, and what is started inherits that.
for _name in ("SIGINT", "SIGHUP"):
    if signal.getsignal(getattr(signal, _name)) == signal.SIG_IGN:
        signal.signal(getattr(signal, _name), signal.SIG_DFL)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server with the embedded model and default settings."""
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def base_model(server):
    """Name of the base model that the server has."""
    return server.base_model()


@pytest.fixture
def service(server):
    """A session of the official SDK."""
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as client:
        yield client


@pytest.fixture
def rest(server):
    """The SDK's client for what needs no session."""
    return tinker.RestClient(base_url=server.url, api_key=API_KEY)


@pytest.fixture
def training(service, base_model):
    """A fresh adapter of rank 8."""
    return service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()


@pytest.fixture
def wire(server):
    """HTTP without the SDK, for what no well-behaved client sends."""
    with Wire(server.url) as client:
        yield client
