"""What the page's smaller controls do, in a real browser: sorting, tags, compaction, downloads, logs, axes, disk,
queue, alerts, profiles, and all of it by the keyboard alone."""

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import time

import pytest

from shoal.jobs.queue import client as queue
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.plan.queueing import transitions
from shoal.spec.run_paths import RunPaths
from shoal.web.single_file import export_html
from tests.jobs.past_run import TOLD, write_run
from tests.web.browser import Page, chromium
from tests.web.live_run import serving, state_of, training, wait_until
from tests.web.test_api import append, step
from tests.web.test_browser import ADDRESSES, TABS, with_deaths

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not chromium(), reason="there is no Chromium")]
CHOICE = {"workers": 2, "hosts": 1, "threads": 1, "how": "lanes"}
NOTHING = dict.fromkeys(("compute_s", "encode_s", "exchange_s", "apply_s"), 0.0)
DESK = {"viewport": {"width": 1280, "height": 900}}


def press(page, button, *, confirm=None, typed=None):
    """Press a button, fill the field of its question if it has one, and answer it."""
    page.get_by_role("button", name=button, exact=True).first.click()
    question = page.locator("dialog")
    if typed is not None:
        question.get_by_role("textbox").fill(typed)
    question.get_by_role("button", name=confirm or button, exact=True).click()
    question.wait_for(state="detached")


def rich_run(runs, name="rich-1"):
    """A run with a plan, an alert, NaN, logs of a worker that died, a model, checkpoints and much to compact."""
    told = with_deaths()
    plan = ("plan", "driver", 0, {"choice": CHOICE, "prediction": {"step_s": 0.02, **NOTHING}, "reason": "measured"})
    bad = ("step", "worker-0", 61, {"loss": float("nan"), "samples": 50, "wall_s": 0.01})
    alert = ("alert", "driver", 61, {"when": "nan", "text": "the loss is NaN at step 61", "about": "loss"})
    paths = write_run(runs / name, [*told[:4], plan, *told[4:-2], bad, alert, *told[-2:]])
    paths.logs.mkdir()
    for worker in (0, 1):
        paths.log(worker).write_bytes(b"".join(b"worker %d says %d\n" % (worker, n) for n in range(2000)))
    paths.model.mkdir()
    (paths.model / "model.safetensors").write_bytes(b"weights" * 1000)
    paths.checkpoints.mkdir()
    (paths.checkpoints / "blob").write_bytes(b"x" * 100_000)
    return paths


def charts(page):
    """What the curves say of themselves."""
    page.locator(".plot canvas").first.wait_for()
    return page.locator(".plot").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")


def zoom(page, first, last):
    """By the fields: by keyboard, and on a phone."""
    page.get_by_label("From step").fill(str(first))
    page.get_by_label("To step").fill(str(last))
    page.keyboard.press("Enter")
    page.get_by_role("button", name=f"Steps {first} to {last}: show all").wait_for()


def test_the_list_is_sorted_grouped_selected_and_extended(browser, past):
    for n in range(3, 120):
        shutil.copytree(past.site.runs / "mlp-2", past.site.runs / f"mlp-{n}")
    one = Page(browser, **DESK)
    page = one.log_in(past)
    page.get_by_role("button", name="run", exact=True).click()
    page.locator("th[aria-sort=ascending]").wait_for()
    page.wait_for_function("() => document.querySelector('table.runs tbody a').innerText === 'cnn-1'")
    assert "sort=run" in page.url
    page.get_by_role("button", name="run ↑").click()
    page.wait_for_function("() => document.querySelector('table.runs tbody a').innerText !== 'cnn-1'")
    page.reload()  # the address keeps the order
    page.locator("th[aria-sort=descending]").wait_for()
    page.wait_for_function("() => document.querySelectorAll('table.runs tbody tr').length === 100")
    page.get_by_role("button", name="Next").click()
    page.wait_for_function("() => document.querySelectorAll('table.runs tbody tr').length === 22")
    page.get_by_text("101 to 122").wait_for()
    assert page.get_by_role("button", name="Next").is_disabled()
    page.get_by_role("button", name="accuracy").click()  # by a metric, from the first page again
    page.locator("th[aria-sort=ascending]", has_text="accuracy ↑").wait_for()
    page.wait_for_function("() => document.querySelectorAll('table.runs tbody tr').length === 100")
    page.get_by_role("button", name="run", exact=True).click()
    page.locator("th[aria-sort=ascending]", has_text="run ↑").wait_for()
    page.get_by_label("select mlp-2", exact=True).check()
    page.get_by_label("select mlp-3", exact=True).check()
    page.get_by_role("link", name="Compare 2").click()
    page.get_by_text("The same bits.").wait_for()
    page.go_back()
    page.get_by_label("by job").check()
    page.get_by_role("link", name="cnn", exact=True).click()
    page.get_by_text("1 runs").wait_for()
    page.get_by_label("Filter").fill("nothing-like-this")
    page.get_by_text("No run matches.").wait_for()
    assert one.failures == []


def test_a_run_is_tagged_compacted_expanded_and_downloaded(browser, past):
    paths = rich_run(past.site.runs)
    before = paths.events.read_bytes()
    one = Page(browser, **DESK)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/run/rich-1")
    drawn = charts(page)
    press(page, "Tag", confirm="Save", typed="best kept")
    page.locator(".bar .tag", has_text="best").wait_for()
    press(page, "Tag", confirm="Save", typed="kept")
    page.locator(".bar .tag", has_text="best").wait_for(state="detached")
    press(page, "Compact")
    page.locator(".said", has_text=re.compile("before, .* now")).wait_for()
    assert not paths.events.exists()
    page.get_by_role("button", name="Expand").wait_for()
    page.reload()
    assert charts(page) == drawn
    page.get_by_role("tab", name="Logs").click()
    page.get_by_text("worker 0 says 1999").wait_for()
    press(page, "Expand")
    page.get_by_role("button", name="Compact").wait_for()
    assert paths.events.read_bytes() == before
    with page.expect_download() as download:
        page.get_by_role("link", name="Model").click()
    with open(download.value.path(), "rb") as file:
        assert file.read() == b"weights" * 1000
    page.locator(".actions").get_by_role("link", name="Compare").click()
    page.wait_for_url(lambda url: "compare" in url)
    assert one.failures == []


def test_curves_have_axes_marks_plan_and_alert(browser, past):
    rich_run(past.site.runs)
    one = Page(browser, **DESK)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/run/rich-1")
    page.get_by_text("NaN or infinite at the red marks").wait_for()
    page.get_by_text("seconds per step: the plan and the truth").wait_for()
    page.locator(".notes").get_by_text("alert: the loss is NaN at step 61").wait_for()
    page.get_by_label("over time").check()
    page.get_by_label("logarithmic").check()
    page.wait_for_url(lambda url: "x=time" in url and "log=1" in url)
    page.locator(".plot canvas").first.wait_for()
    page.reload()
    page.locator(".plot canvas").first.wait_for()
    assert page.get_by_label("over time").is_checked()
    assert page.get_by_label("logarithmic").is_checked()
    assert one.failures == []


def test_a_range_of_steps_is_typed(browser, past):
    one = Page(browser, viewport={"width": 360, "height": 720})
    page = one.log_in(past)
    page.goto(f"{past.url}/#/run/mlp-1")
    assert "at step 60" in charts(page)[0]
    zoom(page, 10, 20)
    page.wait_for_function("() => document.querySelector('.plot').getAttribute('aria-label').includes('at step 20')")
    assert "from=10" in page.url
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="show all").click()
    page.wait_for_function("() => document.querySelector('.plot').getAttribute('aria-label').includes('at step 60')")
    assert one.failures == []


def test_logs_of_the_dead_are_chosen_and_searched(browser, past):
    rich_run(past.site.runs)
    one = Page(browser, **DESK)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/run/rich-1?tab=logs")
    page.get_by_text("worker 0 says 1999").wait_for()
    page.locator("#part select").select_option("worker-1.log")
    page.get_by_text("worker 1 says 1999").wait_for()
    page.get_by_label("Search all logs").fill("says 1234")
    page.get_by_role("button", name="Search").click()
    page.get_by_text("2 lines with").wait_for()
    page.get_by_text("worker-1.log: worker 1 says 1234").wait_for()
    page.reload()  # the address keeps log and search
    page.get_by_text("worker-1.log: worker 1 says 1234").wait_for()
    page.get_by_text("worker 1 says 1999").wait_for()
    assert one.failures == []


def test_checkpoints_go_runs_are_compacted_and_the_trash_is_emptied(browser, past):
    paths = rich_run(past.site.runs)
    past.site._disk._samples.clear()
    for n in range(4):
        past.site._disk.observe(time.monotonic() - 40 * (4 - n), 10**9 * (200 - n))
    one = Page(browser, **DESK)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/disk")
    page.locator(".facts").get_by_text("full in").wait_for()  # a gigabyte each 40 s: in some hours
    row = page.locator("tr", has=page.get_by_role("link", name="rich-1"))
    row.get_by_role("button", name="Drop checkpoints").click()
    page.get_by_label("Type rich-1 to confirm").fill("rich-1")
    page.locator("dialog").get_by_role("button", name="Move to the trash").click()
    page.get_by_text("the checkpoints of rich-1 are in the trash").wait_for()
    assert not paths.checkpoints.exists()
    page.get_by_text("Clean up").click()
    page.get_by_label("unchanged for days").fill("0")
    page.get_by_label("keep of each job").fill("0")
    page.get_by_label("what goes").select_option("compact")
    page.get_by_role("button", name="Show what would go").click()
    page.get_by_role("button", name=re.compile(r"Compact \d+, about")).click()
    page.locator("dialog").get_by_role("button", name="Compact").click()
    page.get_by_text(re.compile(r"\d+ are compacted")).wait_for()
    assert not paths.events.exists()
    page.get_by_role("button", name="Empty", exact=True).click()
    page.get_by_label("Type empty to confirm").fill("empty")
    page.get_by_role("button", name="Delete for good").click()
    page.get_by_text("The trash is empty.").wait_for()
    assert one.failures == []


def test_a_held_job_is_released_and_tells_its_history(browser, past, monkeypatch):
    monkeypatch.setattr(queue, "ensure_served", lambda paths: False)
    runs = past.site.runs
    queue._change(runs, 1, lambda entry: transitions.claim(entry, epoch=1, run="mlp-9"))
    queue._change(runs, 1, lambda entry: transitions.stop(entry, epoch=1, why="somebody stopped it"))
    one = Page(browser, **DESK)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/queue")
    page.get_by_text("somebody stopped it").wait_for()
    press(page, "Release")
    page.get_by_text("job 1 is waiting").wait_for()
    page.get_by_role("link", name="1", exact=True).click()
    page.get_by_text("1 attempt").wait_for()
    page.locator("td .status", has_text="held").wait_for()
    page.get_by_role("link", name="Queue").last.click()
    page.get_by_label("Run whose job is submitted again").fill("nothing")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("alert").get_by_text("there is no run").wait_for()
    assert len(queue.look(runs).entries) == 1


def test_a_compression_shows_its_ladder_and_leads_to_its_parent(browser, past):
    one = Page(browser, **DESK)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/run/mlp-compressed-1")
    page.get_by_role("link", name="Ladder").click()
    page.get_by_text("It meets the targets.").wait_for()
    page.locator("tr.at", has_text="int8").wait_for()
    page.get_by_role("link", name="mlp-1", exact=True).click()
    page.get_by_role("tab", name="Curves").wait_for()
    assert one.failures == []


def test_a_reader_has_no_buttons_that_change_anything(browser, past):
    rich_run(past.site.runs)
    token = TokenFile(past.site.runs).create("reader", role="read", runs=[], expires_t=None)
    one = Page(browser, **DESK)
    page = one.log_in(past, token=token)
    assert token not in page.url
    for address in ("#/run/rich-1", "#/run/rich-1?tab=workers", "#/disk", "#/queue"):
        page.goto(f"{past.url}/{address}")
        page.locator("main table, main canvas").first.wait_for()
        names = page.locator("main").get_by_role("button").all_inner_texts()
        assert not [name for name in names if not re.search(r"[↑↓]|show all|Zoom", name)], (address, names)
        assert page.get_by_role("link", name=re.compile("Model|Submit again")).count() == 0
    assert one.failures == []


WALK = """() => {
  const all = [...document.querySelectorAll("a[href], button, input, select, summary, textarea")]
    .filter((one) => one.checkVisibility() && !one.disabled && one.tabIndex >= 0);
  window.unreached = new Set(all);
  document.activeElement.blur();
  return all.length;
}"""
REACH = "() => { window.unreached.delete(document.activeElement); return window.unreached.size; }"


@pytest.mark.parametrize("address", [*ADDRESSES, *(f"#/run/rich-1?tab={tab.lower()}" for tab in TABS)])
def test_the_keyboard_reaches_every_control(browser, past, address):
    rich_run(past.site.runs)
    page = Page(browser, **DESK).log_in(past)
    page.goto(f"{past.url}/{address}")
    page.locator("main table, main canvas, main pre").first.wait_for()
    for summary in page.locator("main summary").all():
        summary.click()
    controls = page.evaluate(WALK)
    left = controls
    for _ in range(2 * controls + 20):
        page.keyboard.press("Tab")
        left = page.evaluate(REACH)
        if not left:
            break
    names = page.evaluate("[...window.unreached].map((one) => one.outerHTML.slice(0, 120))")
    assert (left, names) == (0, [])
    assert controls > 6


def test_a_run_is_deleted_and_restored_by_the_keyboard_alone(browser, past):
    one = Page(browser, **DESK)
    page = one.log_in(past)
    page.goto(f"{past.url}/#/run/mlp-2")
    page.get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    page.get_by_label("Type mlp-2 to confirm").wait_for()
    page.keyboard.press("Escape")  # the question goes, nothing else happens
    page.locator("dialog").wait_for(state="detached")
    assert "run/mlp-2" in page.url
    page.get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    page.locator("dialog input:focus").wait_for()
    page.keyboard.type("mlp-2")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Restore").focus()
    page.keyboard.press("Enter")
    page.locator("dialog").get_by_role("button", name="Restore").focus()
    page.keyboard.press("Enter")
    page.get_by_text("mlp-2 is back").wait_for()
    page.keyboard.press("?")
    page.get_by_label("Keys").get_by_text("compare the selected").wait_for()
    page.keyboard.press("Escape")
    page.get_by_label("Keys").wait_for(state="detached")
    # the page of the run may ask for it once more before it goes to the disk
    assert [failure for failure in one.failures if "404" not in failure] == []


def test_a_compacted_run_opens_from_disk_without_a_network(browser, tmp_path):
    """One file, every part of it; nothing is asked of anybody."""
    from shoal.storage.compaction import compact_run

    paths = rich_run(tmp_path)
    compact_run(paths)
    export_html(paths, tmp_path / "run.html")
    one = Page(browser, viewport={"width": 360, "height": 720}, color_scheme="dark")
    one.context.set_offline(True)
    one.page.goto(f"file://{tmp_path}/run.html")
    signs = {"Curves": "alert: the loss is NaN", "Workers": "worker-0", "Timeline": "of 4:", "Job": "name: mlp",
             "Logs": "worker 0 says 1999", "Receipt": "SHA-256 of the weights"}  # fmt: skip
    assert set(signs) == set(TABS)
    for tab, sign in signs.items():
        one.page.get_by_role("tab", name=tab).click()
        one.page.locator("#part").get_by_text(sign).first.wait_for()
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 360, tab
    assert one.page.get_by_role("button", name=re.compile("Delete|Stop|Tag|Compact")).count() == 0
    one.page.get_by_role("tab", name="Curves").click()
    zoom(one.page, 10, 20)
    assert "loss is" in charts(one.page)[0]
    assert all("at step 20" in told or "no points here" in told for told in charts(one.page))
    assert one.failures == []
    assert {address.split(":")[0] for address in one.asked} <= {"file", "data"}


@contextlib.contextmanager
def frozen(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_live_run_is_looked_into(browser, tmp_path):
    """What workers use, profiles, stacks with a worker that hangs, the log of one that was killed."""
    with training(tmp_path / "job", tmp_path / "runs", workers="2") as paths, serving(tmp_path / "runs") as server:
        one = Page(browser, **DESK)
        page = one.log_in(server)
        page.goto(f"{server.url}/#/run/digits-1?tab=workers")
        page.locator("td meter[aria-label=memory]").first.wait_for()  # a sample has come
        page.locator("td", has_text=re.compile(r"[\d.]+ [kM]?B/s")).first.wait_for()
        page.get_by_label("steps", exact=True).fill("5")
        page.get_by_role("button", name="Profile").click()
        page.get_by_text(re.compile("5 steps from step .* of worker-0, worker-1")).click()
        page.locator("details code", has_text="aten::").first.wait_for()
        with page.expect_download() as download:
            page.get_by_role("link", name=re.compile(r"Trace \(")).click()
        with gzip.open(download.value.path()) as file:
            named = {
                event["args"]["name"] for event in json.load(file)["traceEvents"] if event["name"] == "process_name"
            }
        assert named == {"worker-0", "worker-1"}

        hanging, killed = state_of(paths).training_workers
        with frozen(hanging.pid):  # the driver puts it out after some seconds, perhaps before it is asked
            page.get_by_role("button", name="Where is every thread now?").click()
            page.locator(".warn", has_text=re.compile("stopped|does not answer|cannot be asked")).wait_for()
            page.get_by_text(re.compile("Current thread")).first.wait_for()
        wait_until(lambda: len(state_of(paths).training_workers) == 2)
        os.kill(killed.pid, signal.SIGKILL)
        page.locator("tr", has_text=killed.name).locator(".status", has_text="dead").wait_for()
        wait_until(lambda: len(state_of(paths).training_workers) == 2)
        page.locator("tr", has_text=killed.name).get_by_role("link", name=killed.name).click()
        page.locator(f"pre[aria-label='{killed.name}.log']").wait_for()
        page.get_by_role("tab", name="Timeline").click()
        page.get_by_text(re.compile(r"worker died")).first.wait_for()
        assert one.failures == []


def test_a_comparison_of_runs_that_train_is_live(browser, past):
    for name in ("on-1", "on-2"):
        write_run(past.site.runs / name, TOLD[:64])
    one = Page(browser, **DESK)
    page = one.log_in(past)
    with page.expect_response(re.compile("/stream")):
        page.goto(f"{past.url}/#/compare?runs=on-1,on-2")
    page.get_by_text("is not known yet").wait_for()
    assert "on-2 is 0.03833 at step 60" in charts(page)[0]
    append(RunPaths(past.site.runs / "on-2"), step(61, 9.0))
    page.wait_for_function(
        "() => document.querySelector('.plot').getAttribute('aria-label').includes('on-2 is 9 at step 61')"
    )
    assert one.failures == []


def test_a_page_tells_that_its_server_is_away_and_that_another_does_not_know_it(browser, tmp_path):
    """The page of a run is not shown on as if it were live."""
    runs = tmp_path / "runs"
    write_run(runs / "mlp-1")
    one = Page(browser, **DESK)
    with serving(runs) as server:
        address = server.url
        page = one.log_in(server)
        with page.expect_response(re.compile("/stream")):
            page.goto(f"{address}/#/run/mlp-1")
        page.locator(".plot canvas").first.wait_for()
    page.get_by_role("alert").get_by_text("does not answer").wait_for()
    with serving(runs, listen=address.removeprefix("http://")) as server:
        page.get_by_role("alert").get_by_text("a token is needed").wait_for()
        page.evaluate("link => { location.href = link; }", server.link())
        page.locator("table.runs a").first.wait_for()
        page.get_by_role("link", name="mlp-1").click()
        page.locator(".plot canvas").first.wait_for()
        assert page.get_by_role("alert").count() == 0


def test_a_page_follows_a_run_that_is_deleted_and_one_that_comes(browser, past):
    one = Page(browser, **DESK)
    page = one.log_in(past)
    shutil.rmtree(RunPaths(past.site.runs / "mlp-2").root)
    page.get_by_role("link", name="mlp-2").wait_for(state="detached")
    write_run(past.site.runs / "new-1", TOLD)
    page.get_by_role("link", name="new-1").wait_for()
    page.goto(f"{past.url}/#/run/gone-1")
    page.get_by_role("alert").get_by_text("there is no run").wait_for()
