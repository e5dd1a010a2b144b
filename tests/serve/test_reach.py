"""Who reaches a server: keys that can match, keys that no process list shows, names, and pages of other sites."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.serve.conftest import Reached, local, serving
from vivace.cli.app import run
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.serve.config import ServeConfig
from vivace.serve.hosts import is_allowed
from vivace.serve.keys import read_keys

APP = "https://app.example.com"


@pytest.fixture(scope="module")
def proxied(engine: Engine) -> Iterator[Reached]:
    """A server behind a reverse proxy that hands the name on, for pages of one site."""
    config = ServeConfig(api_keys=("first",), allowed_hosts=("api.example.com", "*.internal"), cors=(APP,))
    with local(engine, config) as reached:
        yield reached


@pytest.mark.parametrize(
    "key", ["schlüssel", "two words", " padded", "padded ", "tab\t", "line\n", "nul\0", "ключ", "\udcff"]
)
def test_a_key_that_could_never_match_is_refused_at_the_start(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(api_keys=("good", key))
    assert "API key 2" in str(caught.value)
    assert key.strip() not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_key_that_is_taken_matches(engine: Engine) -> None:
    keys = ("".join(map(chr, range(33, 127))), "#hash", "a:b=c")
    with local(engine, ServeConfig(api_keys=keys)) as reached, reached.http() as http:
        for key in keys:
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for raw in (b"Bearer \xff\xfe", "Bearer schlüssel".encode(), "Bearer schlüssel".encode("latin-1")):
            assert http.get("/v1/models", headers=[(b"Authorization", raw)]).status_code == 401


def test_keys_are_not_shown() -> None:
    assert "secret-7" not in repr(ServeConfig(api_keys=("secret-7",)))


def test_keys_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\ufeff# keys of the team\n\nfirst\r\n  second  \n"
    (tmp_path / "keys").write_bytes(text.encode())
    assert read_keys(str(tmp_path / "keys")) == ("first", "second")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"third\n")))
    assert read_keys("-") == ("third",)


@pytest.mark.parametrize(
    ("data", "says"),
    [(None, "No such file"), (b"", "holds no key"), (b"# none\n", "holds no key"), (b"\xff\xfe", "no text")],
)
def test_a_file_without_keys_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes | None, says: str
) -> None:
    if data is not None:
        (tmp_path / "keys").write_bytes(data)
    assert run(["serve", "--port", "0", "--quiet", "--api-key-file", str(tmp_path / "keys")]) in (1, 2)
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.multiprocess
def test_a_key_from_standard_input_is_in_no_process_list(folder: Path) -> None:
    with serving(folder / "tiny", folder / "keyed.log", "--api-key-file", "-", stdin="hidden-key\n") as running:
        shown = (
            Path(f"/proc/{running.process.pid}/cmdline").read_bytes()
            + Path(f"/proc/{running.process.pid}/environ").read_bytes()
        )
        assert b"serve" in shown
        assert b"hidden-key" not in shown
        with running.http() as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"Authorization": "Bearer hidden-key"}).status_code == 200
        assert "hidden-key" not in running.log.read_text()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("api.example.com", 200),
        ("API.Example.COM.", 200),
        ("api.example.com:8443", 200),
        ("a.b.internal", 200),
        ("localhost:1", 200),
        ("[::1]:8000", 200),
        ("internal", 403),
        ("evilinternal", 403),
        ("api.example.com.evil.org", 403),
        ("evil.org", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_proxy_may_hand_its_name_on(proxied: Reached, host: str, status: int) -> None:
    with proxied.http() as http:
        headers = {"Host": host, "Authorization": "Bearer first"}
        reply = http.get("/v1/models", headers=headers)
        assert reply.status_code == status
        if status == 403:
            assert "--allowed-hosts" in reply.json()["error"]["message"]
        assert http.get("/health", headers={"Host": host}).status_code == 200, "probes ask addresses"


def test_every_name_may_be_allowed() -> None:
    config = ServeConfig(allowed_hosts=("*",), allow_no_key=True)
    assert config.hosts is not None
    assert is_allowed("anything.example", config.hosts)
    assert ServeConfig(host="0.0.0.0", allow_no_key=True).hosts is None, (
        "whoever listens everywhere is asked by any name"
    )
    named = ServeConfig(host="0.0.0.0", allow_no_key=True, allowed_hosts=("api.example.com",)).hosts
    assert named is not None
    assert not is_allowed("evil.org", named)


def test_names_of_others_need_a_key() -> None:
    with pytest.raises(ConfigError, match=r"allowed host api\.example\.com can be reached"):
        ServeConfig(allowed_hosts=("localhost", "api.example.com"))
    ServeConfig(allowed_hosts=("localhost",))


@pytest.mark.parametrize("host", ["", "https://api.example.com", "a:8000", "a/b", "*.*", "a*", "user@a", "[::1"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        ServeConfig(allowed_hosts=(host,), allow_no_key=True)


@pytest.mark.parametrize(
    "origin", ["", "app.example.com", f"{APP}/", f"{APP}/path", "ftp://a", "https://u@a", "https://", "null"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors"):
        ServeConfig(cors=(origin,))


def preflight(http: httpx2.Client, origin: str) -> httpx2.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    return http.options("/v1/chat/completions", headers=headers)


def test_pages_of_a_site_that_was_named_may_ask(proxied: Reached) -> None:
    with proxied.http() as http:
        before = preflight(http, APP)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == APP
        assert "x-stainless-os" in before.headers["access-control-allow-headers"]
        assert "POST" in before.headers["access-control-allow-methods"]
        reply = http.get("/v1/models", headers={"Origin": APP, "Authorization": "Bearer first"})
        assert reply.headers["access-control-allow-origin"] == APP
        refused = http.get("/v1/models", headers={"Origin": APP})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP), (
            "the page can read why"
        )


def test_pages_of_other_sites_may_not(proxied: Reached) -> None:
    with proxied.http() as http:
        for found in (
            preflight(http, "https://evil.example"),
            http.get("/v1/models", headers={"Origin": "https://evil.example", "Authorization": "Bearer first"}),
        ):
            assert "access-control-allow-origin" not in found.headers
