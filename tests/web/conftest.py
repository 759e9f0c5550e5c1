import shutil

import pytest

from shoal.jobs.queue import client as queue
from shoal.jobs.queue.access_tokens import Identity, TokenFile
from shoal.spec.load import load_run_job, save_job
from shoal.web.access import AccessControl
from shoal.web.app import make_app
from shoal.web.gate import AllowedHosts
from shoal.web.site import Site
from tests.conftest import FIXTURES
from tests.jobs.past_run import write_run
from tests.web import past_work
from tests.web.asgi_client import AsgiClient
from tests.web.browser import open_browser
from tests.web.live_run import serving

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


@pytest.fixture(scope="module")
def browser():
    with open_browser() as one:
        yield one


@pytest.fixture
def past(tmp_path):
    """A served directory with runs, a search, a compression and a queue of the past."""
    for name in ("mlp-1", "mlp-2", "cnn-1"):
        write_run(tmp_path / "runs" / name)
    past_work.write_search(tmp_path / "runs" / "small-1")
    past_work.write_compression(tmp_path / "runs" / "mlp-compressed-1")
    job = load_run_job(tmp_path / "runs" / "mlp-1" / "job.yaml").model_copy(update={"base_dir": str(FIXTURES)})
    save_job(job, tmp_path / "runs" / "mlp-1" / "job.yaml")
    queue.submit([job], runs=tmp_path / "runs", start=False)
    with serving(tmp_path / "runs") as server:
        yield server
