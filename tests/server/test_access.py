import asyncio

import httpx
import pytest

from tidegate.server.app import create_app
from tidegate.server.fake import FakeEngine
from tidegate.server.settings import ServerSettings

ADMIN = [
    ("GET", "/admin/stats", None),
    ("GET", "/admin/info", None),
    ("POST", "/admin/shares", {"prefill": 0.25, "decode": 0.75}),
    ("POST", "/admin/mode", {"mode": "semi"}),
    ("POST", "/reset_prefix_cache", {}),
]


def ask(method, path, body=None, *, peer="127.0.0.1", host="127.0.0.1:8000", headers=None, **settings):
    """One request as the server sees it from ``peer``, to a server with these settings."""

    async def once():
        app = create_app(FakeEngine(), None, ServerSettings(model_names=("m",), **settings))
        transport = httpx.ASGITransport(app, client=(peer, 5000))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(once())


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path", "body"), ADMIN)
def test_without_an_admin_key_the_operators_paths_are_for_this_machine_only(method, path, body):
    for peer in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
        assert ask(method, path, body, peer=peer).status_code == 200
    for peer in ("10.0.0.5", "203.0.113.9", "2001:db8::1", "::ffff:10.0.0.5", "unix"):
        refused = ask(method, path, body, peer=peer)
        assert refused.status_code == 403
        assert "admin key" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "body"), ADMIN)
def test_with_an_admin_key_only_the_key_counts(method, path, body):
    for peer in ("127.0.0.1", "203.0.113.9"):
        assert ask(method, path, body, peer=peer, headers=bearer("k"), admin_key="k").status_code == 200
        for wrong in ({}, bearer("x"), bearer(""), {"Authorization": "Basic k"}, {"Authorization": "k"}):
            assert ask(method, path, body, peer=peer, headers=wrong, admin_key="k").status_code == 401


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_a_proxy_on_this_machine_does_not_make_its_clients_local(header):
    assert ask("GET", "/admin/stats", headers={header: "127.0.0.1"}).status_code == 403


def test_web_pages_of_others_do_not_reach_the_operators_paths_through_a_browser_here():
    assert ask("POST", "/reset_prefix_cache", headers={"Origin": "https://evil.example"}).status_code == 403
    assert ask("POST", "/reset_prefix_cache", host="evil.example").status_code == 403
    own = {"Origin": "http://localhost:8000"}
    assert ask("POST", "/reset_prefix_cache", host="localhost:8000", headers=own).status_code == 200


def test_api_keys_guard_the_api_and_nothing_else():
    keys = {"api_keys": ("one", "two")}
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("", 401), ("öne", 401)):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert ask("GET", "/v1/models", headers=headers, **keys).status_code == status
    refused = ask("POST", "/v1/completions", {"prompt": [1]}, **keys)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    for open_path in ("/health", "/version", "/metrics"):
        assert ask("GET", open_path, **keys).status_code == 200


def test_shares_are_given_to_the_lanes_of_the_two_phases():
    stats = ask("POST", "/admin/shares", {"prefill": 0.25, "decode": 0.75}).json()
    assert stats["lanes"]["P"]["share"] == 0.25
    assert stats["lanes"]["D"]["share"] == 0.75
    rest = ask("POST", "/admin/shares", {"prefill": 0.25}).json()
    assert rest["lanes"]["D"]["share"] == 0.75


@pytest.mark.parametrize("body", [{"decode": 0.5}, {"prefill": 0.5, "decode": 0.6}, {"prefill": 0, "decode": 1}, {}])
def test_shares_that_are_no_division_are_refused(body):
    assert ask("POST", "/admin/shares", body).status_code == 400


def test_the_mode_can_be_changed_to_one_that_exists():
    assert ask("POST", "/admin/mode", {"mode": "chunked"}).json()["mode"] == "chunked"
    refused = ask("POST", "/admin/mode", {"mode": "magic"})
    assert refused.status_code == 400
    assert "chunked, semi" in refused.json()["error"]["message"]
