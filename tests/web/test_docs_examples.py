"""The examples of docs/web.md: curl asks a real server, and every route of the API stands in the table."""

import json
import re
import shutil
import subprocess
from itertools import takewhile

import pytest

from shoal.cli.program import app
from shoal.jobs.queue.access_tokens import TokenFile
from tests.docs.pages import ROOT, blocks
from tests.jobs.past_run import write_run
from tests.web.live_run import serving
from tests.web.test_attacks import table

PAGE = ROOT / "docs" / "web.md"


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
def test_the_curl_examples_run(tmp_path):
    write_run(tmp_path / "digits-1")
    token = TokenFile(tmp_path).create("docs", role="submit", runs=[], expires_t=None)
    (block,) = [one for one in blocks(PAGE) if "curl" in one.marks]
    with serving(tmp_path) as server:
        for line in block.text.splitlines():
            command = line.replace("$URL", server.url).replace("$TOKEN", token).replace("curl -s", "curl -sf")
            answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
            assert answer.stdout.endswith("# EOF\n") or json.loads(answer.stdout)


def test_every_route_stands_in_the_table():
    text = PAGE.read_text()
    for route in table():
        last = re.sub(r"\{\w+\}", "", route.path.removeprefix("/api/v1")).rstrip("/").rsplit("/", 1)[-1]
        assert last in ("healthz", "me", "session", "end") or f"/{last}" in text, route.path


def button_rows():
    """Buttons, commands and role of each row."""
    lines = PAGE.read_text().partition("| button | command | role |")[2].strip().splitlines()[1:]
    cells = [line.strip("|").split("|") for line in takewhile(lambda line: line.startswith("|"), lines)]
    return [(buttons.split("(")[0].strip().split(", "), command, role) for buttons, command, role in cells]


def test_every_button_is_a_verb_and_a_route_of_its_role():
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    changes = {route.path.rsplit("/", 1)[-1]: route.role for route in table() if route.method == "POST"}
    known = changes | {"model": "operate", "tag": changes["tags"], "submit": changes["queue"], "expand": "operate"}
    rows = button_rows()
    for buttons, command, role in rows:
        assert set(re.findall(r"`shoal (\w+)", command)) <= verbs, command
        told = {known[button.split()[0].lower()] for button in buttons if button != "Clean up"}
        assert all(role.split(":")[0].strip() == one for one in told), (buttons, role, told)
    shown = {button.split()[0].lower() for buttons, _, _ in rows for button in buttons}
    assert not changes.keys() - shown - {"session", "end", "tags", "queue", "plan", "apply"}
