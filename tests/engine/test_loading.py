"""The loader tells where the time of a start went."""

import logging
from collections.abc import Callable

import pytest

from engine.executor import DeviceLimits, ReportProgress
from engine.loading import Loader
from streamkv.protocol import ModelFacts

LOADED = (ModelFacts("m", 8, 8, [], "float32", "cpu", 1), DeviceLimits(2, 4, 8, 8))


class Stages:
    """Goes through stages that take as long as they say."""

    def __init__(self, stages: list[tuple[str, float]], error: Exception | None = None) -> None:
        self.now_s = 100.0
        self._stages = stages
        self._error = error

    def load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        self.now_s += 0.5
        for stage, seconds in self._stages:
            report(stage, 0.0)
            self.now_s += seconds
            report(stage, 100.0)
        if self._error is not None:
            raise self._error
        return LOADED


def load(stages: Stages, wake: Callable[[], None] = lambda: None) -> Loader:
    loader = Loader(stages, wake, None, lambda: stages.now_s)  # type: ignore[arg-type]
    loader._load()
    return loader


def test_the_time_of_each_stage_is_logged_once_all_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    stages = Stages([("loading weights", 2.0), ("hashing", 0.25), ("loading weights", 1.0), ("warming up", 4.0)])
    with caplog.at_level(logging.INFO):
        loader = load(stages)
    assert loader.result == LOADED
    (record,) = caplog.records
    assert record.getMessage() == "loaded"
    assert vars(record)["fields"] == {
        "total_s": 7.75, "starting_s": 0.5, "loading_weights_s": 3.0, "hashing_s": 0.25, "warming_up_s": 4.0,
    }  # fmt: skip


def test_a_models_name_in_a_stage_begins_no_field_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(Stages([("downloading me/m=1\nlevel=error", 2.0)]))
    (record,) = caplog.records
    assert vars(record)["fields"] == {"total_s": 2.5, "starting_s": 0.5, "downloading_me_m_1_level_error_s": 2.0}


def test_what_failed_was_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    woken: list[bool] = []
    error = ValueError("no")
    with caplog.at_level(logging.INFO):
        loader = load(Stages([("loading weights", 2.0)], error), lambda: woken.append(True))
    assert loader.result is error and not caplog.records and woken
