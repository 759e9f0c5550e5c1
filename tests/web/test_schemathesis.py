"""At least 10,000 generated requests as each role: no answer is a failure of the server, every answer fits the
description, and no role does what it may not do. `SHOAL_CASES` sets another number for each role."""

import os
from collections import Counter

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.jobs.queue.access_tokens import ROLES, TokenFile
from shoal.web import table as web_table
from shoal.web.openapi import make_document
from tests.jobs.past_run import write_run
from tests.web.live_run import serving
from tests.web.test_attacks import table

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.browser
CASES = int(os.environ.get("SHOAL_CASES", "10000"))
ROLE_OF = {(route.method, route.path): route.role for route in table()}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    for name in ("mlp-1", "mlp-2"):
        write_run(runs / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web_table, "REQUESTS_PER_S", 1e9)
        patch.setattr(web_table, "BURST", 1e9)
        patch.setattr(web_table, "FAILURE_BURST", 1e9)
        with serving(runs) as one:
            yield one


def operations(document):
    schema = schemathesis.openapi.from_dict(document)
    return [found.ok() for found in schema.get_all_operations() if not found.ok().path.endswith("/stream")]


def try_operation(operation, url, headers, *, role, counted, cases, seed):
    """Try so many cases; fewer where a route does not have so many."""
    needed = ROLE_OF[operation.method.upper(), operation.path]
    may = needed == "public" or (role is not None and ROLES.index(role) >= ROLES.index(needed))

    @hypothesis.seed(seed)
    @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(), is_known=st.booleans())
    def try_it(case, is_known):
        if is_known and "run" in case.path_parameters:
            case.path_parameters["run"] = "mlp-1"  # else most names are of no run
        answer = case.call(base_url=url, headers=headers, timeout=60)
        counted[answer.status_code] += 1
        assert answer.status_code < 500, (case.method, case.formatted_path, answer.text)
        assert may or answer.status_code >= 400, (case.method, case.formatted_path, answer.text)
        for name in ("content-security-policy", "x-content-type-options"):
            assert name in answer.headers
        if answer.status_code < 300 and answer.headers["content-type"] == ["application/json"]:
            operation.validate_response(answer)

    try_it()


@pytest.mark.parametrize("role", [*ROLES, None])
def test_no_request_breaks_the_server(server, role):
    headers = {}
    if role:
        token = TokenFile(server.site.runs).create(f"fuzz {role}", role=role, runs=[], expires_t=None)
        headers["Authorization"] = f"Bearer {token}"
    counted, every, seed = Counter(), operations(make_document(table())), 0
    while counted.total() < CASES:
        each = max(5, (CASES - counted.total()) // len(every) + 1)
        for operation in every:
            try_operation(operation, server.url, headers, role=role, counted=counted, cases=each, seed=seed)
        seed += 1
    print(role, counted.total(), dict(counted))
    assert set(counted) - {401, 403} or role is None
