"""A hub id that can't be had fails soon, in one sentence, without trying again and again."""

import socket
import threading

import pytest

from tidegate.base.errors import ModelError
from tidegate.models import hub
from tidegate.plan.shapes import find_shape


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    for module in ("constants", "_snapshot_download.constants"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def asked(monkeypatch):
    """What a hub that never answers has been asked about models."""
    listener, waiting, asked = socket.create_server(("127.0.0.1", 0)), [], []

    def accept():
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            path = connection.recv(4096).split()[1].decode()
            if "owner/name" in path:
                asked.append(path)
                waiting.append(connection)
            else:
                connection.close()  # the library's own questions

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    threading.Thread(target=accept, daemon=True).start()
    yield asked
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in waiting:
        connection.close()


def test_a_hub_that_does_not_answer_is_asked_once_and_told_in_one_sentence(asked):
    with pytest.raises(ModelError, match=r"^'owner/name' is neither a path .* can't be had from the hub: [^\n]+$"):
        hub.snapshot("owner/name", ["config.json"], lambda cached: True)
    assert len(asked) == 1


def test_a_plan_for_a_model_on_an_unreachable_hub_asks_it_once_too(asked):
    with pytest.raises(ModelError, match="'owner/name' is neither a path that exists nor in the local cache"):
        find_shape("owner/name")
    assert len(asked) == 1


def test_what_is_no_id_is_told_without_asking(asked):
    with pytest.raises(ModelError, match="a model id of the form 'owner/name'"):
        hub.snapshot("no id", ["config.json"], lambda cached: True)
    assert not asked
