"""Attacks on the web page, each with the test that fails without its defence. The comments number them, 1 to 32; 28 is
in tests/storage/test_storage.py, and 32 in test_browser.py too. That they do fail is shown by test_defences.py."""

import ast
import json
import os
import shutil
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest

import shoal
from shoal.errors import ShoalError
from shoal.jobs.queue.access_tokens import ROLES, Identity, TokenFile
from shoal.spec.alerts.config import AlertConfig
from shoal.spec.load import load_run_job, save_job
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import RunPaths
from shoal.storage.locks import locked
from shoal.storage.logs import plain_line
from shoal.web import gate, site
from shoal.web.access import MAX_SESSIONS, AccessControl
from shoal.web.acting import SessionRoutes
from shoal.web.app import STATIC, static_files
from shoal.web.routes import api_routes
from shoal.web.serve import WebServer, parse_listen
from shoal.web.site import MAX_RUNNING
from shoal.web.stream import MAX_STREAMS, Streams
from shoal.web.table import without_paths
from tests.jobs.past_run import write_run
from tests.web.conftest import COOKIE, PORT, URL

WEB = Path(shoal.__file__).parent / "web"


def table():
    return api_routes(SessionRoutes(None, cookie=COOKIE, secure=False), Streams())


def filled(path):
    names = {
        "run": "mlp-1",
        "log": "worker-0.log",
        "operation": "0",
        "entry": "20260101-000000-00000000",
        "job": "1",
        "profile": "0",
    }
    for name, value in names.items():
        path = path.replace(f"{{{name}}}", value)
    return path


def call(client, route, **more):
    extra = {"json": {}} if route.method == "POST" else {}
    return client.request(route.method, filled(route.path), **extra, **more)


PROTECTED = [route for route in table() if route.role != "public"]
CHANGES = [route for route in PROTECTED if route.method != "GET"]


# 1, 5: whoever reaches the port needs a token, on every route
@pytest.mark.parametrize("route", PROTECTED, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_needs_a_token(served, route):
    assert call(served.client(), route).status_code == 401


def test_paths_outside_the_table_are_refused_without_a_token(served):
    client = served.client()
    for path in ("/api/v1/openapi.json", "/api/v1/nothing", "/api/v2/runs", "/api"):
        assert client.get(path).status_code == 401, path


# 2: a page whose name was bound to this address
@pytest.mark.parametrize("host", ["evil.example:8470", "127.0.0.1", "127.0.0.1:80", "127.0.0.1.evil.example:8470", ""])
def test_another_host_is_not_served(served, host):
    for path in ("/", "/api/v1/runs", "/healthz"):
        assert served.client("read").get(path, headers={"host": host}).status_code == 421


# 3: what a client says of itself proves nothing
def test_headers_of_the_client_do_not_replace_the_token(served):
    forged = {
        "user-agent": "shoal",
        "origin": URL,
        "x-forwarded-for": "127.0.0.1",
        "x-shoal": "1",
        "sec-fetch-site": "none",
    }
    assert served.client().get("/api/v1/runs", headers=forged).status_code == 401


def test_forwarded_hosts_are_not_believed(served):
    headers = {"host": "evil.example", "x-forwarded-host": f"127.0.0.1:{PORT}", "forwarded": f"host=127.0.0.1:{PORT}"}
    assert served.client("read").get("/api/v1/runs", headers=headers).status_code == 421


# 4: no verb is forgotten
@pytest.mark.parametrize(
    "method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "HEAD", "POST"]
)
def test_other_methods_change_nothing_without_a_token(served, method):
    for path in ("/api/v1/runs/mlp-1", "/api/v1/runs/mlp-1/stop", "/api/v1/runs", "/api/v1/trash/empty"):
        assert served.client().request(method, path).status_code in (401, 403, 404, 405)
    assert (served.runs / "mlp-1").is_dir()


# 6: another site sends a form, or a request with the browser's cookie
@pytest.mark.parametrize("route", CHANGES, ids=lambda route: route.path)
def test_a_cookie_alone_changes_nothing(served, route):
    client = served.browser()
    assert call(client, route).status_code == 403
    foreign = {"x-shoal": "1", "origin": "https://evil.example"}
    assert call(client, route, headers=foreign).status_code == 403
    assert call(client, route, headers={"x-shoal": "1", "sec-fetch-site": "cross-site"}).status_code == 403
    assert call(client, route, headers={"x-shoal": "1", "sec-fetch-site": "same-site"}).status_code == 403


def test_a_form_is_not_json(served):
    client = served.client("submit")
    body = '{"confirm": "mlp-1"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = client.post("/api/v1/runs/mlp-1/delete", content=body, headers={"content-type": kind})
        assert answer.status_code == 415
    assert (served.runs / "mlp-1").is_dir()


def test_the_cookie_is_for_this_site_and_not_for_scripts(served):
    client = served.client()
    code = served.access.make_code(Identity("the owner", "read"))
    cookie = client.post("/api/v1/session", json={"secret": code}).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "domain" not in cookie


# 7: no page of another origin can read an answer
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", f"http://127.0.0.1:{PORT}.evil.example", "http://localhost"]
)
def test_no_other_origin_gets_an_answer(served, origin):
    answer = served.browser().get("/api/v1/runs", headers={"origin": origin})
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control-")]


# 8, 9: names that lead elsewhere
HOSTILE_NAMES = [
    "..", "../mlp-1", "%2e%2e", "..%2fmlp-1", "%252e%252e", "mlp-1%2f..%2fcnn-1", "mlp-1;x", "mlp-1%3bx", "mlp-1%00",
    "mlp-1%5c..", "%5c%5chost", ".trash", "/etc", "//etc", "mlp-1%2523", ".", "~", "mlp-1~fold-0/..", "mlp-1~..", "%ff",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_stay_in_the_directory(served, name):
    (served.runs / ".trash").mkdir()
    (served.runs / ".trash" / "job.yaml").write_text("secret")
    (served.runs.parent / "job.yaml").write_text("secret")
    client = served.client("submit")
    for path in (f"/api/v1/runs/{name}/job", f"/api/v1/runs/mlp-1/logs/{name}", f"/static/{name}"):
        answer = client.get(path)
        assert answer.status_code in (400, 404), answer.text
        assert "secret" not in answer.text


@pytest.mark.parametrize(
    "name", ["%252e%252e", "mlp-1%252f", "mlp-1%3b", "mlp-1%5c", "mlp-1%00", "..%2fmlp-1", "mlp-1%2fx", "..", "."]
)
def test_what_no_name_has_is_refused_before_it_is_looked_for(served, name):
    assert served.client("submit").get(f"/api/v1/runs/{name}/job").status_code == 400


def test_names_in_questions_stay_in_the_directory(served):
    write_run(served.runs.parent / "outside")
    client = served.client("submit")
    for name in ("../outside", str(served.runs.parent / "outside"), f"mlp-1/../../{served.runs.name}/mlp-2"):
        for question in ("compare?runs={}", "stream?runs={}", "runs/mlp-1/diff?with={}"):
            answer = client.get(f"/api/v1/{question.format(quote(name))}")
            assert answer.status_code == 404, (question, name)
        assert client.post("/api/v1/queue", json={"run": name}).status_code == 404


def test_logs_are_found_by_their_names_only(served):
    logs = served.runs / "mlp-1" / "logs"
    logs.mkdir()
    (logs / "notes.txt").write_text("secret")
    for name in ("notes.txt", "worker-0.log.bak", "worker-0", "worker--1.log"):
        assert served.client("read").get(f"/api/v1/runs/mlp-1/logs/{name}").status_code == 404


# 10: what a user writes never becomes a path
@pytest.mark.parametrize("tag", ["../x", "a/b", ".hidden", "a" * 41, "", "a b", "\x00"])
def test_tags_are_words(served, tag):
    assert served.client("operate").post("/api/v1/runs/mlp-1/tags", json={"add": [tag]}).status_code == 422


def test_a_restored_name_stays_in_the_directory(served):
    entry = served.runs / ".trash" / "20260101-000000-00000000"
    (entry / "content").mkdir(parents=True)
    (entry / "entry.json").write_text(json.dumps({"run": "../escaped", "part": "", "t": 1.0, "size_bytes": 0}))
    answer = served.client("operate").post(f"/api/v1/trash/{entry.name}/restore", json={})
    assert answer.status_code == 409
    assert not (served.runs.parent / "escaped").exists()


# 11: deleting
def test_only_a_run_of_the_directory_can_be_deleted(served, tmp_path):
    client = served.client("operate")
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "job.yaml").write_text("x")
    (served.runs / "link").symlink_to(outside)
    assert client.post("/api/v1/runs/link/delete", json={"confirm": "link"}).status_code == 404
    assert client.post("/api/v1/runs/mlp-1/delete", json={"confirm": "mlp-1", "part": "../cnn-1"}).status_code == 422
    assert client.post("/api/v1/runs/mlp-1/delete", json={"confirm": "mlp-2"}).status_code == 422
    assert (outside / "job.yaml").exists()
    assert (served.runs / "mlp-1").is_dir()
    assert (served.runs / "cnn-1").is_dir()


# 12: links in a run's directory
def test_links_are_not_followed(served, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    logs = served.runs / "mlp-1" / "logs"
    logs.mkdir()
    (logs / "worker-0.log").symlink_to(secret)
    client = served.client("read")
    assert client.get("/api/v1/runs/mlp-1/logs/worker-0.log").status_code == 404
    assert client.get("/api/v1/runs/mlp-1/logs").json() == []
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "worker-0.log").write_text("secret")
    logs2 = served.runs / "mlp-2" / "logs"
    logs2.symlink_to(elsewhere)
    assert client.get("/api/v1/runs/mlp-2/logs/worker-0.log").status_code == 404
    (served.runs / "cnn-1" / "job.yaml").unlink()
    (served.runs / "cnn-1" / "job.yaml").symlink_to(secret)
    assert client.get("/api/v1/runs/cnn-1/job").status_code == 404


def test_a_model_that_is_a_link_is_not_sent(served, tmp_path):
    (tmp_path / "secret").write_text("secret")
    paths = RunPaths(served.runs / "mlp-1")
    paths.model.mkdir()
    (paths.model / "model.safetensors").symlink_to(tmp_path / "secret")
    assert served.client("submit").get("/api/v1/runs/mlp-1/model").status_code == 409


# 13, 14: text of others in the page
def test_the_page_makes_no_html_of_text():
    for name, file in static_files().items():
        if name.endswith(".js") and not name.startswith("vendor/"):
            text = file.content.decode()
            for word in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "dangerouslySetInnerHTML",
                "eval(",
                "Function(",
            ):
                assert word not in text, f"{name}: {word}"


def test_no_script_but_the_servers_own_runs(served):
    policy = served.client().get("/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == "'self'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in policy
    page = static_files()["index.html"].content.decode()
    assert page.count("<script") == page.count('<script type="module" src="/static/')
    assert "style=" not in page
    assert " on" not in page.replace(" on ", " ").split("<body>")[1].split("noscript")[0]


def test_the_page_is_the_same_for_every_question(served):
    plain = served.client().get("/").content
    assert served.client().get("/?file=%22%3E%3Cscript%3Ealert(1)%3C/script%3E").content == plain


def test_names_in_answers_are_json(served):
    name = "<img src=x onerror=alert(1)>"
    (served.runs / "mlp-1").rename(served.runs / name)
    answer = served.client("read").get("/api/v1/runs")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert name in {row["run"] for row in answer.json()["rows"]}


# 15: files of runs are never served as pages
def test_no_file_of_a_run_is_served_as_it_is(served):
    logs = served.runs / "mlp-1" / "logs"
    logs.mkdir()
    (logs / "worker-0.log").write_text("<script>alert(1)</script>\n")
    answer = served.client("read").get("/api/v1/runs/mlp-1/logs/worker-0.log")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["lines"] == ["<script>alert(1)</script>"]


# 16: the filter evaluates nothing
@pytest.mark.parametrize("where", ["__import__('os').system('x')", "run.__class__", "(a+)+$", "step>__class__", "1==1"])
def test_the_filter_is_not_code(served, where):
    answer = served.client("read").get("/api/v1/runs", params={"where": where})
    assert answer.status_code in (200, 422)
    assert not answer.json().get("rows")


def test_the_room_neither_evaluates_nor_unpickles():  # 16, 17, 19
    for path in WEB.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("eval", "exec", "compile", "os.system", "pickle.loads", "pickle.load"), path
                assert not any(word.arg == "shell" for word in node.keywords), path
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "pickle" not in ast.unparse(node), path
                # 18: the server asks nobody; what others ask it with is not loaded by it
                assert "urllib.request" not in ast.unparse(node) or path.name == "client.py", path
                assert "web.client" not in ast.unparse(node), path


# 17: words of a request do not become options of a command
def test_resume_starts_exactly_one_command(served, monkeypatch):
    started = []
    monkeypatch.setattr(
        "shoal.web.acting.subprocess.Popen",
        lambda words, **more: started.append((words, more)) or SimpleNamespace(pid=1, poll=lambda: 0, returncode=0),
    )
    (served.runs / "mlp-1" / "receipt.json").unlink()
    (served.runs / "mlp-1").rename(served.runs / "--help")
    assert served.client("submit").post("/api/v1/runs/--help/resume", json={}).status_code == 200
    ((words, more),) = started
    assert words[1:4] == ["-m", "shoal", "resume"]
    assert words[-2:] == ["--", "--help"]
    assert more["start_new_session"]
    assert "shell" not in more


# 12, 18: where the runs lie is nobody's business
def test_errors_tell_no_path(served):
    client = served.client("operate")
    entry = client.post("/api/v1/runs/mlp-1/delete", json={"confirm": "mlp-1"}).json()["result"]["entry"]
    shutil.copytree(served.runs / "mlp-2", served.runs / "mlp-1")
    shutil.copytree(served.runs / "mlp-2", served.runs / "cnn-1" / "fold-0")
    taken = client.post(f"/api/v1/trash/{entry}/restore", json={})
    inner = client.post("/api/v1/runs/cnn-1~fold-0/delete", json={"confirm": "fold-0"})
    assert [(one.status_code, one.json()["code"]) for one in (taken, inner)] == [(409, "SH671"), (422, "SH609")]
    assert taken.json()["title"] == "mlp-1 exists"
    assert not any(part in one.text for one in (taken, inner) for part in (str(served.runs), str(served.runs.parent)))


def test_what_is_no_path_stays_in_an_error():
    assert without_paths("'/a b/c.py' (/home/me/runs/x): /x/y, file:/z") == "'/a b/c.py' (x): y, file:/z"
    same = "https://hooks.example/a/b, 3/4, and/or, digits-1/fold-0, ../x/y, s3://bucket/key"
    assert without_paths(same) == same


# 18: no route takes an address to ask
def test_no_input_is_an_address():
    for route in table():
        for model in filter(None, (route.query, route.body)):
            assert not {"url", "uri", "host", "address", "webhook"} & set(model.model_fields)


# 19: no upload
def test_bodies_are_small_and_json(served):
    client = served.client("submit")
    answer = client.post(
        "/api/v1/runs/mlp-1/tags",
        content=b"[" * (gate.MAX_BODY_BYTES + 1),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 413
    deep = b"[" * 60_000
    answer = client.post("/api/v1/runs/mlp-1/tags", content=deep, headers={"content-type": "application/json"})
    assert answer.status_code == 400


# 20: nothing to guess
def test_secrets_are_random_private_and_never_stored(served):
    token = served.tokens.create("one", role="read", runs=[], expires_t=None)
    other = served.tokens.create("two", role="read", runs=[], expires_t=None)
    assert token != other
    assert len(token) >= 43
    file = served.runs / ".web-tokens.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in file.read_text()


def test_wrong_tokens_are_counted(served):
    client = served.client("read")
    wrong = {"authorization": "Bearer shoal_wrong"}
    answers = [client.get("/api/v1/me", headers=wrong).status_code for _ in range(60)]
    assert answers[0] == 401
    assert 429 in answers


def test_wrong_tokens_of_others_lock_nobody_out(served):
    """Other users of the machine, and pages that were open before the server was started again, have its address."""
    known, stale = served.client("read"), served.client()
    stale.cookies[COOKIE] = "of-the-server-before"
    for _ in range(60):
        stale.get("/api/v1/runs")
    assert stale.get("/api/v1/runs").status_code == 429
    assert known.get("/api/v1/runs").status_code == 200
    assert served.browser().get("/api/v1/runs").status_code == 200


def test_wrong_codes_are_counted(served):
    client = served.client()
    answers = [client.post("/api/v1/session", json={"secret": f"no-{n}"}).status_code for n in range(60)]
    assert answers[0] == 401
    assert 429 in answers


# 20, 31: a token for one run logs nobody else out
def test_many_sessions_of_one_token_end_only_its_own(served):
    owner, other = served.browser(), served.browser("read")
    token = served.tokens.create("guest", role="read", runs=["mlp-1"], expires_t=None)
    pages = [served.client() for _ in range(MAX_SESSIONS + 5)]
    for page in pages:
        assert page.post("/api/v1/session", json={"secret": token}).status_code == 200
    assert [page.get("/api/v1/me").status_code for page in pages] == [401] * 5 + [200] * MAX_SESSIONS
    assert {one.get("/api/v1/me").status_code for one in (owner, other)} == {200}


def test_too_many_sessions_at_once_are_refused(served, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    token = served.tokens.create("guest", role="read", runs=[], expires_t=None)
    client = served.client()
    answers = [client.post("/api/v1/session", json={"secret": token}).status_code for _ in range(int(gate.BURST) + 1)]
    assert set(answers[:-1]) == {200}
    assert answers[-1] == 429


def test_a_file_of_tokens_that_others_can_read_is_refused(served):
    client = served.client("read")
    assert client.get("/api/v1/me").status_code == 200
    os.chmod(served.runs / ".web-tokens.json", 0o644)
    os.utime(served.runs / ".web-tokens.json", ns=(1, 1))
    assert client.get("/api/v1/me").status_code == 503


# 21: the code is used once, and never part of what a browser sends as an address
def test_a_code_works_once(served):
    code = served.access.make_code(Identity("the owner", "read"))
    assert served.client().post("/api/v1/session", json={"secret": code}).status_code == 200
    assert served.client().post("/api/v1/session", json={"secret": code}).status_code == 401


def test_the_link_has_its_code_after_the_hash(tmp_path):
    server = WebServer(tmp_path, listen="127.0.0.1:0", say=lambda line: None)
    before, _, after = server.link().partition("#")
    server._listener.close()
    assert before == f"{server.url}/"
    assert after.startswith("code=")


def test_no_referrer_and_no_token_in_an_address(served):
    client = served.client("read")
    token = client.headers["authorization"].partition(" ")[2]
    assert client.get("/").headers["referrer-policy"] == "no-referrer"
    bare = served.client()
    for name in ("token", "access_token", "t", "code"):
        assert bare.get("/api/v1/me", params={name: token}).status_code == 401


# 22: host and path are read raw
def test_the_framework_is_new_enough_and_urls_decide_nothing():
    import starlette

    assert tuple(map(int, starlette.__version__.split(".")[:3])) >= (1, 3, 1)
    for path in WEB.rglob("*.py"):
        assert "request.url" not in path.read_text(), path
        assert "base_url" not in path.read_text(), path


def test_an_absolute_path_in_the_host_does_not_help(served):
    assert served.client("read").get("/", headers={"host": f"127.0.0.1:{PORT}/healthz"}).status_code == 421


# 23: ranges and long addresses
def test_ranges_are_not_served(served):
    ranges = "bytes=" + ",".join(f"{n}-{n}" for n in range(500))
    answer = served.client().get("/static/main.js", headers={"range": ranges})
    assert answer.status_code == 200
    assert served.client().get("/?" + "x" * 9000).status_code == 414


# 24: questions are bounded
QUESTIONS = [
    "runs?limit=1001", "runs/mlp-1/series?points=5001", "runs/mlp-1/events?limit=5001", "storage?limit=99999",
    "runs/mlp-1/timeline?bins=1001", "runs/mlp-1/logs/worker-0.log?tail=2001", "runs?unknown=1",
    "runs?limit=1&limit=2", "runs/mlp-1/series?from=-1", "runs/mlp-1/search?find=",
]  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_are_bounded(served, question):
    assert served.client("read").get(f"/api/v1/{question}").status_code == 422


def test_a_search_over_all_logs_ends(served, monkeypatch):
    logs = served.runs / "mlp-1" / "logs"
    logs.mkdir()
    (logs / "worker-0.log").write_text("a line\n" * 1000)
    client, question = served.client("read"), "/api/v1/runs/mlp-1/search?find=line&limit=1000"
    found = client.get(question).json()
    assert (len(found["matches"]), found["more"]) == (1000, False)
    monkeypatch.setattr("shoal.web.reading.SEARCH_S", 0.0)
    found = client.get(question).json()
    assert (len(found["matches"]), found["more"]) == (0, True)


def test_too_many_requests_are_refused(served, monkeypatch):
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: 5.0))  # all at one moment
    client = served.client("read")
    answers = {client.get("/api/v1/me").status_code for _ in range(int(gate.BURST) + 100)}
    assert answers == {200, 429}


# 25: streams are few
def test_streams_are_counted(served):
    streams = Streams()
    streams._open["token x"] = MAX_STREAMS
    with pytest.raises(gate.RequestRefused):
        streams.open_stream(FakeCall(served, "token x"))


class FakeCall:
    def __init__(self, served, name):
        self.site, self.identity = served.site, Identity(name, "read")
        self.query = type("Q", (), {"runs": "mlp-1", "after": ""})
        self.request = type("R", (), {"headers": {}})

    def find(self, name):
        return self.site.find(name)


# 26: no frame
def test_the_page_cannot_be_framed(served):
    headers = served.client().get("/").headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"


# 27: commands to a terminal in logs, and forged lines
def test_logs_are_text():
    hostile = b"\x1b[2J\x1b]0;title\x07red \x1b[31mred\x1b[0m \xe2\x80\xaetxt\x9b31m\rline"
    line = plain_line(hostile)
    assert line.isprintable()
    assert "red red" in line


def test_a_name_cannot_forge_a_line_of_the_server(served, capsys):
    from shoal.terminal import reports
    from shoal.terminal.console import make_console

    reports.print_lines(make_console(), "token a\x1b[2J: stop x")
    assert "\x1b" not in capsys.readouterr().out


# 29: no redirect at all
def test_nothing_redirects(served):
    client = served.browser()
    for path in ("/?next=//evil.example", "/api/v1/runs/", "/login?next=https://evil.example", "//evil.example/"):
        answer = client.get(path)
        assert answer.status_code not in (301, 302, 303, 307, 308)
        assert "location" not in answer.headers


# 30: other users of the machine
def test_off_this_machine_only_with_tls(tmp_path):
    for listen in ("0.0.0.0:1", "[::]:1", "192.0.2.1:8470", "evil.example:80", "127.0.0.1:99999"):
        with pytest.raises(ShoalError) as refused:
            parse_listen(listen, tls=None)
        assert refused.value.code == "SH675"
    with pytest.raises(ShoalError):
        parse_listen("0.0.0.0:1", tls=tmp_path)
    assert parse_listen("192.0.2.1:8470", tls=tmp_path).host == "192.0.2.1"


# 31: a role does what it may, and nothing else
@pytest.mark.parametrize("route", PROTECTED, ids=lambda route: f"{route.method} {route.path}")
def test_roles_hold(served, route):
    for role in ROLES:
        answer = call(
            served.client(role),
            route,
            params={"runs": "none", "find": "x", "with": "none"} if route.method == "GET" else None,
        )
        may = ROLES.index(role) >= ROLES.index(route.role)
        assert (answer.status_code == 403) is not may, (role, answer.text)
    assert route.method == "GET" or route.role != "read" or route.path.endswith("/session/end")


def test_what_starts_processes_needs_the_role_submit():
    needed = {route.path: route.role for route in table() if route.method != "GET"}
    for path in ("/api/v1/runs/{run}/resume", "/api/v1/queue", "/api/v1/queue/{job}/release"):
        assert needed[path] == "submit"


def test_a_token_for_some_runs_sees_no_operation_of_others(served):
    done = served.client("operate").post("/api/v1/runs/mlp-2/tags", json={"add": ["best"]}).json()
    path = f"/api/v1/operations/{done['operation']}"
    assert served.client("read").get(path).status_code == 200
    assert served.client("read", runs=["mlp-1"]).get(path).status_code == 404


def test_a_token_for_some_runs_sees_no_other(served):
    client = served.client("operate", runs=["mlp-1"])
    assert [row["run"] for row in client.get("/api/v1/runs").json()["rows"]] == ["mlp-1"]
    assert client.get("/api/v1/runs/mlp-2").status_code == 404
    assert client.get("/api/v1/compare", params={"runs": "mlp-1,mlp-2"}).status_code == 404
    assert client.get("/api/v1/runs/mlp-1/diff", params={"with": "cnn-1"}).status_code == 404
    assert client.get("/api/v1/stream", params={"runs": "mlp-2"}).status_code == 404
    assert client.post("/api/v1/runs/mlp-2/delete", json={"confirm": "mlp-2"}).status_code == 404
    for path in ("/api/v1/storage", "/api/v1/queue", "/api/v1/queue/1"):
        assert client.get(path).status_code == 403
    for path in ("/api/v1/trash/empty", "/api/v1/queue/1/cancel", "/api/v1/queue/1/priority"):
        assert client.post(path, json={"confirm": "empty"}).status_code == 403
    starter = served.client("submit", runs=["mlp-1"])
    assert starter.post("/api/v1/queue", json={"run": "mlp-1"}).status_code == 403


OF_RUNS = [route for route in PROTECTED if "{run}" in route.path]
INPUT = {
    "drain": {"who": "worker-0"},
    "delete": {"confirm": "mlp-2"},
    "search": {"find": "x"},
    "diff": {"with": "mlp-2"},
}


@pytest.mark.parametrize("route", OF_RUNS, ids=lambda route: f"{route.method} {route.path}")
def test_a_token_for_one_run_is_for_no_route_of_another(served, route):
    """It learns as little as of a run that is not there, and nothing changes."""
    client = served.client("submit", runs=["mlp-1"])
    before = {path: path.read_bytes() for path in served.runs.rglob("*") if path.is_file()}
    given = INPUT.get(route.path.rpartition("/")[2], {})
    sent = {"json": given} if route.method == "POST" else {"params": given}

    def ask(run):
        answer = client.request(route.method, filled(route.path.replace("{run}", run)), **sent)
        return answer.status_code, answer.text.replace(run, "RUN")

    for name in ("mlp-2", "mlp-2~fold-0"):
        assert ask(name) == ask("none-1".join(name.split("mlp-2")))
        assert ask(name)[0] == 404
    assert served.said == []
    assert {path: path.read_bytes() for path in served.runs.rglob("*") if path.is_file()} == before


def test_links_expire_and_can_be_revoked(served):
    late = served.client("read", expires_t=time.time() - 1)
    assert late.get("/api/v1/me").status_code == 401
    assert served.tokens.find(late.headers["authorization"].partition(" ")[2]) is None
    token = served.tokens.create("guest", role="read", runs=["mlp-1"], expires_t=time.time() + 60)
    page = served.client()
    assert page.post("/api/v1/session", json={"secret": token}).status_code == 200
    assert page.get("/api/v1/me").json()["runs"] == ["mlp-1"]
    served.tokens.revoke("guest")
    assert page.get("/api/v1/me").status_code == 401
    assert served.client().post("/api/v1/session", json={"secret": token}).status_code == 401


def test_a_session_ends_when_its_link_expires(served, monkeypatch):
    access = AccessControl(TokenFile(served.runs))
    secret, _ = access.begin_session(access.make_code(Identity("guest", "read", None, time.time() + 5)))
    assert access.of_session(secret)
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 10)
    assert access.of_session(secret) is None


# 24: one token for one run leaves the others room to act
def test_operations_of_one_identity_are_few(served, monkeypatch):
    monkeypatch.setattr("shoal.web.site.OPERATION_WAIT_S", 0.01)
    one, other = served.client("operate", runs=["mlp-1"]), served.client("operate")
    path, body = "/api/v1/runs/mlp-1/tags", {"add": ["best"]}
    with locked(open_lock_file(served.runs / ".tags.lock")):
        begun = [one.post(path, json=body) for _ in range(MAX_RUNNING)]
        assert [answer.status_code for answer in begun] == [202] * MAX_RUNNING
        assert one.post(path, json=body).status_code == 429
        assert other.post(path, json=body).status_code == 202
        assert len(served.said) == MAX_RUNNING + 1
    monkeypatch.undo()
    served.site.operation(begun[-1].json()["operation"]).future.result(60)
    assert one.post(path, json=body).status_code == 200


def test_an_operation_that_ends_while_it_is_waited_for_is_a_success(served, monkeypatch):
    """Between the end of the wait and the look at what came of it."""
    look = site.wait

    def wait_too_short(futures, timeout):
        look(futures, 0)
        may_end.set()
        return look(futures)

    may_end = threading.Event()
    monkeypatch.setattr(site, "wait", wait_too_short)
    begun = served.site.begin("wait", "mlp-1", "me", lambda: {"ended": may_end.wait(60)})
    assert begun.future.result() == {"ended": True}


# 32: nothing from elsewhere
def test_the_page_asks_nobody_else():
    for name, file in static_files().items():
        text = file.content.decode()
        for sign in ("http://", "https://", '"//'):
            found = [line for line in text.splitlines() if sign in line]
            allowed = ("http://www.w3.org/", "https://github.com/leeoniya/uPlot")
            assert all(any(one in line for one in allowed) for line in found), f"{name}: {found[:1]}"


def test_vendored_files_are_those_of_the_manifest():
    import hashlib

    vendor = STATIC / "vendor"
    manifest = json.loads((vendor / "manifest.json").read_text())
    present = {path.name for path in vendor.iterdir() if path.suffix in (".js", ".css")}
    assert present == set(manifest)
    for name, facts in manifest.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == facts["sha256"]
        assert (vendor / f"LICENSE-{facts['package']}.txt").is_file()


# 18: secrets of a job stay with it
@pytest.mark.parametrize("secret", ["T0/SECRET", "a,SECRET", "it's,SECRET", 'a"SECRET', "#}SECRET", "é\\SECRET"])
def test_addresses_of_webhooks_are_not_shown(served, secret):
    file = served.runs / "mlp-1" / "job.yaml"
    alerts = [AlertConfig(when="failed", webhook=f"https://user:word@hooks.example/{secret}")]
    save_job(load_run_job(file).model_copy(update={"alerts": alerts}), file)
    assert "SECRET" in file.read_text()
    client = served.client("read")
    shown = [client.get("/api/v1/runs/mlp-1/job"), client.get("/api/v1/compare", params={"runs": "mlp-1,mlp-2"})]
    assert all(answer.status_code == 200 for answer in shown)
    assert "webhook" in shown[0].text
    assert not any(word in answer.text for answer in shown for word in ("SECRET", "hooks.example", "user:word"))


# 15: a trace is a file to save, never a page
def test_a_trace_is_not_shown_by_the_browser(served):
    profiles = served.runs / "mlp-1" / "profiles"
    profiles.mkdir()
    (profiles / "ab.trace.json.gz").write_bytes(b"<script>")
    (profiles / "cd.trace.json.gz").symlink_to(served.runs / ".web-tokens.json")
    client = served.client("read")
    answer = client.get("/api/v1/runs/mlp-1/profiles/ab", stays=True)
    assert answer.content == b"<script>"
    assert answer.headers["content-type"] == "application/gzip"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"
    for name in ("cd", "..", "%2e%2e%2fjob", "ab.trace"):
        assert client.get(f"/api/v1/runs/mlp-1/profiles/{name}").status_code in (400, 404)
