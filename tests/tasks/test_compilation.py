"""Where compiled code is kept."""

import os

import pytest
from torch._inductor.runtime import cache_dir_utils

from shoal.tasks.compilation import CACHE_VARIABLE, use_cache


@pytest.mark.parametrize("who", ["nobody", "torch", "the user"])
def test_code_is_in_shoals_cache_unless_the_user_names_a_place(who, tmp_path, monkeypatch):
    """torch names its own default place in the environment when a library asks for it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    if who != "the user":
        monkeypatch.delenv(CACHE_VARIABLE)
    if who == "torch":
        monkeypatch.setattr(cache_dir_utils.tempfile, "gettempdir", lambda: str(tmp_path))
        cache_dir_utils.cache_dir()
        assert CACHE_VARIABLE in os.environ
    use_cache(tmp_path / "shoal")
    wanted = "mine" if who == "the user" else "shoal/compiled"
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / wanted)
