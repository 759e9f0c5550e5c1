import sys

import pytest

from shoal.errors import ShoalError
from shoal.jobs.search.search_dir import create
from shoal.jobs.search.summary import read_search
from shoal.terminal.search_png import draw_search
from tests.jobs.search.test_search import PROMOTE


def test_without_matplotlib_the_fix_is_told(make, job_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = read_search(create(make(), job_dir / "runs"))
    with pytest.raises(ShoalError) as caught:
        draw_search(found, job_dir / "search.png")
    assert caught.value.code == "SH635"
    assert "shoal[plot]" in str(caught.value)
    assert not (job_dir / "search.png").exists()


@pytest.mark.long
def test_a_search_is_drawn_at_any_time(make, search, job_dir):
    """Also before it has a trial, and with choices that are sections."""
    imread = pytest.importorskip("matplotlib.image").imread
    empty = create(make(), job_dir / "empty")
    sections = {"optimizer": [{"name": "AdamW"}, {"name": "SGD", "args": {"momentum": {"low": 0.5, "high": 0.9}}}]}
    whole = search(1, search=PROMOTE | {"space": sections})
    drawn = []
    for name, paths in (("empty", empty), ("whole", whole.paths)):
        file = job_dir / f"{name}.png"
        draw_search(read_search(paths), file)
        assert file.read_bytes().startswith(b"\x89PNG")
        drawn.append(imread(file))
    lines = [(picture[picture.shape[0] // 2 :, :, :3].min(axis=2) < 0.95).sum() for picture in drawn]
    assert lines[1] > 1.2 * lines[0], "no line for any trial"
    with pytest.raises(ShoalError) as caught:
        draw_search(read_search(empty), job_dir / "nowhere" / "search.png")
    assert caught.value.code == "SH609"
