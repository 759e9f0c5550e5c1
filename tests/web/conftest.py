import shutil

import pytest

from shoal.jobs.queue.access_tokens import Identity, TokenFile
from shoal.web.access import AccessControl
from shoal.web.app import make_app
from shoal.web.gate import AllowedHosts
from shoal.web.site import Site
from tests.jobs.past_run import write_run
from tests.web.asgi_client import AsgiClient

PORT = 8470
URL = f"http://127.0.0.1:{PORT}"
COOKIE = "shoal-8470"


class Served:
    """The application over a directory of runs, without a socket."""

    def __init__(self, runs):
        self.runs = runs
        self.tokens = TokenFile(runs)
        self.said = []
        self.access = AccessControl(self.tokens)
        self.site = Site(runs, say=self.said.append)
        self.app = make_app(
            self.site, self.access, AllowedHosts.of(["127.0.0.1", "localhost"], port=PORT, scheme="http"), cookie=COOKIE
        )

    def client(self, role=None, *, runs=(), expires_t=None):
        """A client with a token of this role; without a token for None."""
        headers = {}
        if role:
            name = f"{role} {len(self.tokens.read())}"
            token = self.tokens.create(name, role=role, runs=list(runs), expires_t=expires_t)
            headers["authorization"] = f"Bearer {token}"
        return AsgiClient(self.app, host=f"127.0.0.1:{PORT}", headers=headers)

    def browser(self, role="submit"):
        """A client with a cookie, as a page in a browser has it."""
        client = self.client()
        code = self.access.make_code(Identity("the owner", role))
        assert client.post("/api/v1/session", json={"secret": code}).status_code == 200
        return client


@pytest.fixture(scope="session")
def written_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("written") / "mlp-1").root


@pytest.fixture
def served(tmp_path, written_run):
    runs = tmp_path / "runs"
    for name in ("mlp-1", "mlp-2", "cnn-1"):
        shutil.copytree(written_run, runs / name)
    one = Served(runs)
    yield one
    one.site.close()
