"""The page in a real browser, over live runs: every page and every button, kills included."""

import json
import os
import re
import shutil
import signal

import pytest

from shoal.jobs.queue import client as queue
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.spec.load import load_run_job, save_job
from shoal.spec.receipt import read_receipt_file
from shoal.storage.trash import list_trash
from tests.jobs.past_run import TOLD, write_run
from tests.web.browser import Page, chromium
from tests.web.live_run import serving, state_of, training, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not chromium(), reason="there is no Chromium")]
TABS = ["Curves", "Workers", "Timeline", "Receipt", "Logs", "Job"]
ADDRESSES = [
    "#/runs", "#/runs?group=1", "#/compare?runs=mlp-1,mlp-2,cnn-1", "#/disk", "#/searches", "#/searches/small-1",
    "#/queue", "#/queue/1", "#/compressions", "#/compressions/mlp-compressed-1",
]  # fmt: skip


def test_the_link_logs_in_once_and_the_code_leaves_the_address(browser, past):
    link = past.link()
    first, second = Page(browser), Page(browser)
    first.page.goto(link)
    first.page.get_by_role("link", name="mlp-1").wait_for()
    assert "code=" not in first.page.url
    assert first.page.title() == "runs – Shoal"  # and not the code
    assert first.page.locator("nav a[aria-current=page]").inner_text() == "Runs"
    assert first.page.evaluate("document.cookie") == ""
    second.page.goto(link)
    second.page.get_by_label("Token or code").wait_for()
    token = TokenFile(past.site.runs).create("guest", role="read", runs=["mlp-1"], expires_t=None)
    second.page.get_by_label("Token or code").fill(token)
    second.page.get_by_role("button", name="Open").click()
    second.page.get_by_role("link", name="mlp-1").wait_for()
    assert second.page.get_by_role("link", name="mlp-2").count() == 0
    assert second.page.get_by_role("link", name="Disk").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_page_without_errors_or_sideways_scrolling(browser, past, scheme, width):
    one = Page(browser, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = one.log_in(past)
    page.get_by_role("link", name="mlp-1").wait_for()
    for address in [*ADDRESSES, "#/run/mlp-1"]:
        page.goto(f"{past.url}/{address}")
        page.locator("h1").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        page.locator(f"[role=tab][aria-selected=true]:has-text('{tab}')").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
    assert one.failures == []
    assert all(address.startswith(past.url) for address in one.asked)  # attack 32: nothing is asked elsewhere


def test_keys_do_everything_in_the_list(browser, past):
    page = Page(browser).log_in(past)
    page.get_by_role("link", name="mlp-1").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("mlp")
    page.get_by_text("3 runs").wait_for()
    page.keyboard.press("Tab")
    page.evaluate("document.activeElement.blur()")
    for key in ("x", "j", "x", "c"):
        page.keyboard.press(key)
    page.get_by_text("The same bits.").wait_for()
    assert "runs=" in page.url
    page.keyboard.press("Escape")
    page.get_by_role("link", name="cnn-1").wait_for()
    page.keyboard.press("j")  # the newest is a search
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Curves").wait_for()
    page.keyboard.press("4")
    page.get_by_text("SHA-256 of the weights").wait_for()


def test_zooming_asks_for_the_range_and_keeps_it_in_the_address(browser, past):
    page = Page(browser, viewport={"width": 1280, "height": 900}).log_in(past)
    page.goto(f"{past.url}/#/run/mlp-1")
    plot = page.locator(".u-over").first
    plot.wait_for()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40, steps=5)
    page.mouse.up()
    page.get_by_role("button", name=re.compile("show all")).wait_for()
    assert "from=" in page.url
    page.reload()
    page.get_by_role("button", name=re.compile("show all")).click()
    page.wait_for_url(lambda url: "from=" not in url)


def with_deaths():
    """A past run with two workers, of which one dies, and one that comes."""
    told = [row for row in TOLD if row[0] != "joined"]
    at = next(n for n, row in enumerate(told) if row[0] == "step" and row[2] == 30)
    first = ("view", "driver", 0, {"number": 1, "carries": {"worker-0": [0, 1], "worker-1": [2, 3]}})
    died = ("worker_died", "driver", 30, {"worker": "worker-1", "reason": "exit code -9"})
    second = ("view", "driver", 30, {"number": 2, "carries": {"worker-0": [0, 1], "worker-2": [2, 3]}})
    return [*told[:3], first, *told[3:at], died, second, *told[at:]]


def test_the_slider_goes_through_views_and_deaths(browser, past):
    write_run(past.site.runs / "killed-1", with_deaths())
    one = Page(browser)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/run/killed-1?tab=timeline")
    page.get_by_role("slider").focus()
    page.keyboard.press("Home")
    page.get_by_text(re.compile("1 of 4: a new view")).wait_for()
    page.keyboard.press("ArrowRight")
    page.get_by_text(re.compile(r"worker died \(worker-1\)")).wait_for()
    assert "died" in page.locator(".carries .gone").inner_text()
    page.keyboard.press("ArrowRight")
    page.locator(".carries").get_by_text("worker-2").wait_for()
    assert page.locator(".carries .gone").count() == 0
    address = page.url
    assert "at=2" in address
    other = Page(browser).log_in(past)
    other.goto(address)  # the address keeps the moment
    other.get_by_text(re.compile("3 of 4: a new view")).wait_for()
    assert one.failures == []


def test_arrows_walk_the_tabs_and_the_job_shows_its_difference(browser, past):
    job = load_run_job(past.site.runs / "mlp-2" / "job.yaml")
    save_job(job.model_copy(update={"seed": 77}), past.site.runs / "mlp-2" / "job.yaml")
    one = Page(browser)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/run/mlp-2")
    page.get_by_role("tab", name="Curves").focus()
    page.keyboard.press("End")
    page.locator("[role=tab][aria-selected=true]:has-text('Job')").wait_for()
    page.get_by_label("Difference to").fill("cnn-1")
    page.keyboard.press("Enter")
    row = page.locator("table.diff tr", has_text="seed")
    row.wait_for()
    assert "77" in row.inner_text()
    page.reload()
    row.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="cnn-1").wait_for()
    assert one.failures == []


def test_the_disk_is_cleaned_up_by_a_plan(browser, past):
    one = Page(browser)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/disk")
    page.get_by_text("Clean up").click()
    page.get_by_label("unchanged for days").fill("0")
    page.get_by_label("keep of each job").fill("newest=1")
    page.get_by_role("button", name="Show what would go").click()
    page.get_by_role("button", name=re.compile("Move 1 to the trash")).wait_for()
    page.get_by_label("until all are below").fill("much")  # a changed rule hides the plan, and not the rules
    page.get_by_role("button", name=re.compile("Move 1 to the trash")).wait_for(state="detached")
    page.get_by_role("button", name="Show what would go").click()
    page.get_by_text("'much' is not a size").wait_for()
    page.get_by_label("until all are below").fill("")
    page.get_by_role("button", name="Show what would go").click()
    page.get_by_role("button", name=re.compile("Move 1 to the trash")).click()
    page.locator("dialog").get_by_role("button", name="Move to the trash").click()
    page.get_by_text("1 are in the trash").wait_for()
    assert not (past.site.runs / "mlp-2").exists()  # mlp-1 has the newer job file
    page.get_by_role("button", name="Restore").click()
    page.locator("dialog").get_by_role("button", name="Restore").click()
    page.get_by_text("mlp-2 is back").wait_for()
    assert [failure for failure in one.failures if "422" not in failure] == []


def test_a_hundred_runs_are_compared(browser, past):
    """Overlay, parallel coordinates, the table of differences; two of them: where their losses part."""
    source = past.site.runs / "mlp-1"
    for n in range(3, 101):
        shutil.copytree(source, past.site.runs / f"mlp-{n}")
    for n in (7, 50):
        job = load_run_job(source / "job.yaml").model_copy(update={"seed": n})
        save_job(job, past.site.runs / f"mlp-{n}" / "job.yaml")
        events = past.site.runs / f"mlp-{n}" / "events.jsonl"
        told = [json.loads(line) for line in events.read_text().splitlines()]
        for row in told:
            if row["kind"] == "step" and row["step"] >= 40:
                row["loss"] += n
            if row["kind"] == "finished":
                row["weights_sha256"] = f"{n:02d}" * 32
                row["metrics"] = {"accuracy": n / 100}
        events.write_text("".join(json.dumps(row) + "\n" for row in told))
    one = Page(browser, viewport={"width": 1280, "height": 900})
    page = one.log_in(past)
    every = ",".join(f"mlp-{n}" for n in range(1, 101))
    page.goto(f"{past.url}/#/compare?runs={every}")
    page.get_by_text("Different weights.").wait_for()
    page.locator(".u-over").first.wait_for()
    page.locator("canvas.parallel").wait_for()
    page.locator("table.diff tr", has_text="seed").wait_for()
    page.goto(f"{past.url}/#/compare?runs=mlp-1,mlp-7")
    page.get_by_text("Their losses part at step 40.").wait_for()
    assert one.failures == []


def test_a_run_is_deleted_only_by_its_name_and_comes_back(browser, past):
    page = Page(browser).log_in(past)
    page.goto(f"{past.url}/#/run/mlp-2")
    page.get_by_role("button", name="Delete").click()
    button = page.get_by_role("button", name="Move to the trash")
    assert button.is_disabled()
    page.get_by_label("Type mlp-2 to confirm").fill("mlp-1")
    assert button.is_disabled()
    page.get_by_label("Type mlp-2 to confirm").fill("mlp-2")
    button.click()
    page.get_by_role("status").get_by_text("mlp-2 is in the trash").wait_for()
    page.get_by_role("button", name="Restore").click()
    page.locator("dialog").get_by_role("button", name="Restore").click()
    page.get_by_text("mlp-2 is back").wait_for()
    assert (past.site.runs / "mlp-2" / "job.yaml").is_file()


def test_a_run_can_be_deleted_for_good(browser, past):
    write_run(past.site.runs / "gone-1")
    page = Page(browser).log_in(past)
    page.goto(f"{past.url}/#/run/gone-1")
    page.get_by_role("button", name="Delete").click()
    page.get_by_label("Type gone-1 to confirm").fill("gone-1")
    page.locator("dialog").get_by_text("can be restored").wait_for()
    page.get_by_label("For good").check()
    page.locator("dialog").get_by_text("cannot be restored").wait_for()
    assert "trash, from where" not in page.locator("dialog").inner_text()
    page.get_by_role("button", name="Delete for good").click()
    page.get_by_role("heading", name="Trash").wait_for()
    page.get_by_role("status").get_by_text("gone-1 is deleted for good").wait_for()
    assert not (past.site.runs / "gone-1").exists()
    assert "gone-1" not in {one.fields["run"] for one in list_trash(past.site.runs)}


def test_escape_leaves_the_question_and_not_the_page(browser, past):
    """Also where a refusal has taken the focus: the button that was pressed is disabled meanwhile."""
    page = Page(browser).log_in(past)
    page.goto(f"{past.url}/#/run/mlp-1")
    page.get_by_role("button", name="Tag").click()
    page.locator("dialog input").fill("../x")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("cannot be a tag").wait_for()
    page.keyboard.press("2")
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert page.url.endswith("/#/run/mlp-1")
    page.keyboard.press("Escape")
    page.locator("table.runs").wait_for()


def test_a_search_leads_to_its_trials(browser, past):
    one = Page(browser)
    page = one.log_in(past)
    page.get_by_role("link", name="Searches").click()
    page.get_by_role("link", name="small-1").click()
    page.get_by_text("Pareto front").wait_for()
    page.get_by_text("Which values matter").wait_for()
    page.locator("table.trials").get_by_role("link", name="0", exact=True).click()
    page.locator(".u-over").first.wait_for()
    assert page.get_by_role("button", name="Delete").count() == 0  # its search steers it
    page.get_by_role("link", name="small-1").click()
    page.get_by_text("(best)").wait_for()
    assert one.failures == []


def test_the_queue_is_steered(browser, past, monkeypatch):
    monkeypatch.setattr(queue, "ensure_served", lambda paths: False)
    page = Page(browser).log_in(past)
    page.goto(f"{past.url}/#/run/mlp-1")
    page.get_by_role("link", name="Submit again").click()
    page.get_by_label("Changed fields").fill("seed=4")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("job 2 is waiting").wait_for()
    page.locator("tr", has=page.get_by_role("link", name="2", exact=True)).get_by_role(
        "button", name="Priority"
    ).click()
    page.get_by_label("Priority", exact=True).fill("5")
    page.get_by_role("button", name="Change").click()
    page.get_by_text("job 2 has priority 5").wait_for()
    page.locator("tr", has=page.get_by_role("link", name="2", exact=True)).get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    page.get_by_text("job 2 is cancelled").wait_for()
    page.get_by_role("link", name="2", exact=True).click()
    page.get_by_text("it was cancelled").first.wait_for()
    assert queue.look(past.site.runs).entries[2].priority == 5


def test_hostile_text_stays_text(browser, tmp_path):
    told = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
    paths = write_run(tmp_path / "runs" / "<img src=x onerror=window.hacked=1>")
    paths.logs.mkdir()
    paths.log(0).write_text(told)
    content = paths.events.read_text().replace("weights from a file", told.replace('"', ""))
    paths.events.write_text(content)
    with serving(tmp_path / "runs") as server:
        one = Page(browser)
        one.page.goto(server.link())
        one.page.get_by_role("link", name="<img").click()
        one.page.get_by_text("<script>window.hacked=1</script>").first.wait_for()
        for tab in TABS:
            one.page.get_by_role("tab", name=tab).click()
        assert one.page.evaluate("window.hacked") is None
        assert one.failures == []


def test_a_live_run_is_seen_and_steered(browser, tmp_path):
    """Kill, scale, drain, stop, resume: each is seen on the page without a reload."""
    with training(tmp_path / "job", tmp_path / "runs") as paths, serving(tmp_path / "runs") as server:
        one = Page(browser, viewport={"width": 1280, "height": 900})
        page = one.page
        page.goto(server.link())
        page.locator("tr", has_text="digits-1").get_by_text("training").wait_for()
        page.get_by_role("link", name="digits-1").click()
        page.locator(".u-over").first.wait_for()
        step = page.locator(".facts dd").first
        before = step.inner_text()
        page.wait_for_function("before => document.querySelector('.facts dd').innerText !== before", arg=before)

        page.get_by_role("button", name="Scale").click()
        page.get_by_role("textbox", name="Workers").fill("2")
        page.locator("dialog").get_by_role("button", name="Scale").click()
        page.get_by_text("2 workers are wanted").wait_for()
        wait_until(lambda: len(state_of(paths).training_workers) == 2)

        os.kill(state_of(paths).training_workers[0].pid, signal.SIGKILL)
        page.locator(".notes").get_by_text(re.compile("died")).first.wait_for()
        wait_until(lambda: len(state_of(paths).training_workers) == 2)

        page.get_by_role("tab", name="Workers").click()
        page.get_by_role("button", name="Where is every thread now?").click()
        page.get_by_text(re.compile("Current thread")).first.wait_for()
        page.get_by_role("button", name="Drain").first.click()
        page.locator("dialog").get_by_role("button", name="Drain").click()
        page.locator("td .status", has_text="left").wait_for()

        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Save and stop").click()
        page.get_by_text(re.compile("stopped; saved at step")).wait_for()
        page.get_by_role("button", name="Resume").click()
        page.locator("dialog").get_by_role("button", name="Resume").click()
        page.locator(".bar .status", has_text=re.compile("training|starting")).wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Save and stop").click()
        page.get_by_text(re.compile("stopped; saved at step")).wait_for()
        assert read_receipt_file(paths.receipt).found is None
        assert one.failures == []


def test_a_file_opens_from_disk(browser, tmp_path):
    from shoal.web.single_file import export_html

    export_html(write_run(tmp_path / "mlp-1"), tmp_path / "mlp-1.html")
    one = Page(browser)
    one.page.goto(f"file://{tmp_path}/mlp-1.html")
    one.page.locator(".u-over").first.wait_for()
    assert one.page.get_by_role("link", name="Compare").count() == 0  # no other run is in the file
    one.page.get_by_role("tab", name="Receipt").click()
    one.page.get_by_text("SHA-256 of the weights").wait_for()
    assert one.failures == []
    assert {address.split(":")[0] for address in one.asked} <= {"file", "data"}
