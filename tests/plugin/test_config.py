"""Settings: process-wide changes, block overrides, typed errors."""

from __future__ import annotations

import threading

import pytest

from magjit import config
from magjit.errors import ArgumentError


def test_override_is_for_a_block_and_nests() -> None:
    before = config.current()
    with config.override(record_limit=3) as outer:
        assert outer.record_limit == config.current().record_limit == 3
        with config.override(verify=True):
            assert (config.current().record_limit, config.current().verify) == (3, True)
        assert not config.current().verify
    assert config.current() == before


def test_override_is_for_one_thread() -> None:
    seen = []
    with config.override(record_limit=3):
        thread = threading.Thread(target=lambda: seen.append(config.current().record_limit))
        thread.start()
        thread.join()
    assert seen == [config.current().record_limit]


def test_update_is_for_the_process() -> None:
    before = config.current().record_limit
    try:
        config.update(record_limit=5)
        assert config.current().record_limit == 5
    finally:
        config.update(record_limit=before)


@pytest.mark.parametrize("changes", [{"no_such": 1}, {"record_limit": 0}, {"cache_bytes": -1}])
def test_bad_settings_change_nothing(changes: dict) -> None:
    before = config.current()
    with pytest.raises(ArgumentError):
        config.update(**changes)
    with pytest.raises(ArgumentError), config.override(**changes):
        pass
    assert config.current() == before
