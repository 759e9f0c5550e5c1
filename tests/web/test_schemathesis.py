"""At least 10,000 generated requests as each role: no answer is a failure of the server, every answer fits the
description, and no role does what it may not do. `SHOAL_CASES` sets another number for each role. The counts and the
seconds of each role are printed (`pytest -s`)."""

import hashlib
import os
import shutil
import time
from collections import Counter

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.jobs.queue import client as queue
from shoal.jobs.queue.access_tokens import ROLES, TokenFile
from shoal.spec.load import load_run_job, save_job
from shoal.spec.run_paths import RunPaths
from shoal.storage.compaction import compact_run
from shoal.storage.trash import move_to_trash, restore
from shoal.web import table as web_table
from shoal.web.openapi import make_document
from tests.conftest import FIXTURES
from tests.jobs.past_run import write_run
from tests.web import past_work
from tests.web.live_run import serving
from tests.web.test_attacks import table

schemathesis = pytest.importorskip("schemathesis")
requests = pytest.importorskip("requests")
pytestmark = pytest.mark.browser
CASES = int(os.environ.get("SHOAL_CASES", "10000"))
ROLE_OF = {(route.method, route.path): route.role for route in table()}
RUNS = ("mlp-1", "mlp-2", "packed-1", "small-1", "small-1~trial-0", "mlp-compressed-1")
REFUSED = (400, 401, 403, 404)
"""Without a role: 400 and 404 are for paths that lead to no route."""
KEPT_FILES = (".state.json", ".history.bin", ".index.json")
"""What reading may write: it can be made again."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    fill(runs)
    shutil.copytree(runs, as_new(runs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web_table, "REQUESTS_PER_S", 1e9)
        patch.setattr(web_table, "BURST", 1e9)
        patch.setattr(web_table, "FAILURE_BURST", 1e9)
        started = []
        patch.setattr("shoal.web.acting._start_driver", lambda paths, stopping: started.append(paths.name) or 1)
        patch.setattr(queue, "ensure_served", lambda paths: started.append("daemon") or False)
        with serving(runs) as one:
            one.started = started
            yield one


def as_new(runs):
    return runs.with_name(f"{runs.name}-as-new")


def fill(runs):
    """Something for every route: runs with logs, a model and a profile, a packed one, one in the trash, a search, a
    compression, a job that waits."""
    for name in ("mlp-1", "mlp-2", "packed-1", "gone-1"):
        paths = write_run(runs / name)
        paths.logs.mkdir()
        paths.log(0).write_bytes(b"".join(b"line %d\n" % n for n in range(2000)))
        job = load_run_job(paths.job).model_copy(update={"base_dir": str(FIXTURES)})
        save_job(job, paths.job)
    paths = RunPaths(runs / "mlp-1")
    paths.model.mkdir()
    (paths.model / "model.safetensors").write_bytes(b"weights")
    paths.profiles.mkdir()
    (paths.profiles / "ab.trace.json.gz").write_bytes(b"trace")
    compact_run(RunPaths(runs / "packed-1"))
    move_to_trash(RunPaths(runs.resolve() / "gone-1"), runs)
    past_work.write_search(runs / "small-1")
    past_work.write_compression(runs / "mlp-compressed-1")
    queue.submit([load_run_job(paths.job)], runs=runs, start=False)


def known_names(server):
    """For each name in a path, some that exist: nearly all generated ones do not."""
    entries = [path.name for path in (server.site.runs / ".trash").iterdir() if path.name != "plans"]
    return {"run": RUNS, "log": ("worker-0.log",), "job": ("1",), "profile": ("ab",), "entry": entries or ("none",)}


def content(runs):
    """The digest of every file that a request might change."""
    files = (path for path in runs.rglob("*") if path.is_file() and path.name not in KEPT_FILES)
    return {str(path.relative_to(runs)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def operations(document):
    schema = schemathesis.openapi.from_dict(document)
    return [found.ok() for found in schema.get_all_operations()]


class Caller:
    """Sends cases as one role, counts the answers, and judges each."""

    def __init__(self, server, role):
        self.server, self.role, self.counted = server, role, Counter()
        self.headers, self.session = {}, requests.Session()
        if role:
            token = TokenFile(server.site.runs).create(f"fuzz {role}", role=role, runs=[], expires_t=None)
            self.headers["Authorization"] = f"Bearer {token}"

    def may(self, operation):
        needed = ROLE_OF[operation.method.upper(), operation.path]
        return needed == "public" or (self.role is not None and ROLES.index(self.role) >= ROLES.index(needed))

    def try_operation(self, operation, *, cases, seed):
        """Try so many cases; fewer where a route does not have so many."""

        @hypothesis.seed(seed)
        @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(), data=st.data())
        def try_it(case, data):
            self.use_known_names(case, data)
            self.judge(operation, case, self.call(case))

        try_it()

    def use_known_names(self, case, data):
        if not data.draw(st.booleans()):
            return
        known = known_names(self.server)
        for name in case.path_parameters or ():
            if name in known:
                case.path_parameters[name] = data.draw(st.sampled_from(known[name]))
        run = case.path_parameters.get("run", "mlp-2") if case.path_parameters else "mlp-2"
        for fields in (case.body, case.query):
            if isinstance(fields, dict):
                fields.update({name: run for name in ("run", "runs", "with", "confirm") if name in fields})

    def call(self, case):
        sent = case.as_transport_kwargs(base_url=self.server.url, headers=self.headers)
        with self.session.request(**sent, timeout=60, stream=True) as answer:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                answer._content = next(answer.iter_content(1), b"")  # it has no end
            assert answer.content is not None  # it is read before the connection goes
            return answer

    def judge(self, operation, case, answer):
        self.counted[answer.status_code] += 1
        asked = (case.method, case.formatted_path, case.body, answer.text)
        assert answer.status_code < 500, asked
        assert self.may(operation) or answer.status_code in REFUSED, asked
        for name in ("content-security-policy", "x-content-type-options"):
            assert name in answer.headers
        if answer.status_code < 300 and answer.headers["content-type"] == "application/json":
            operation.validate_response(answer)
        if answer.status_code < 300 and operation.path.endswith("/delete"):
            self.bring_back(case.path_parameters["run"], answer.json()["result"].get("entry"))

    def bring_back(self, run, entry):
        """From the trash, or as it was at the beginning if it was deleted for good."""
        runs, part = self.server.site.runs, run.replace("~", "/")
        if entry:
            restore(runs, entry)
        else:
            shutil.copytree(as_new(runs) / part, runs / part, dirs_exist_ok=True)


@pytest.mark.parametrize("role", [*ROLES, None])
def test_no_request_breaks_the_server(server, role):
    caller, every, seed, began_s = Caller(server, role), operations(make_document(table())), 0, time.monotonic()
    before, jobs, started = content(server.site.runs), len(queue.look(server.site.runs).entries), len(server.started)
    while caller.counted.total() < CASES:
        each = max(5, (CASES - caller.counted.total()) // len(every) + 1)
        for operation in every:
            caller.try_operation(operation, cases=each, seed=seed)
        seed += 1
    counted = caller.counted
    print(role, counted.total(), dict(sorted(counted.items())), f"{time.monotonic() - began_s:.0f} s")
    if role in ("read", None):
        assert content(server.site.runs) == before
    if role != "submit":
        assert len(queue.look(server.site.runs).entries) == jobs
        assert len(server.started) == started
    else:
        assert len(server.started) > started  # the cases reach what only this role may do
    assert set(counted) - {401, 403} or role is None
