"""A moto cloud per test."""

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.login_answers import LoginHandler
from tests.support.moto_fixtures import aws, clock, cloud, gateway, launcher, on


@pytest.fixture
def endpoint() -> Iterator[str]:
    LoginHandler.refusals = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), LoginHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def configured(
    isolated: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], dict[str, str]]:
    """Write an AWS configuration; return the environment that has it."""
    cache = str(isolated / ".aws/sso/cache")  # botocore reads the home folder at import
    monkeypatch.setattr("botocore.tokens.SSOTokenProvider._SSO_TOKEN_CACHE_DIR", cache)

    def write(config: str) -> dict[str, str]:
        (isolated / "config").write_text(config)
        environ = {"AWS_CONFIG_FILE": str(isolated / "config"), "AWS_ENDPOINT_URL": endpoint}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return environ

    return write
