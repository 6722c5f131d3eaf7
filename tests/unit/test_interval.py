"""How often it pays to save, against published figures."""

import math

import pytest

from mpipar.train.interval import best_interval

HOUR, MINUTE = 3600.0, 60.0


@pytest.mark.parametrize(
    ("failure_s", "minutes"),
    [(24 * HOUR, 116.7), (6 * HOUR, 56.7), (15 * MINUTE, 9.1)],
    ids=["24 h", "6 h", "15 min"],
)
def test_saves_of_five_minutes(failure_s: float, minutes: float) -> None:
    found = best_interval(5 * MINUTE, failure_s) / MINUTE
    assert found == pytest.approx(minutes, abs=0.05)


def lost(interval_s: float, save_s: float, failure_s: float) -> float:
    """Seconds of a run for each second of work, by Daly's equation 13.

    Restarting is left out: it does not move the minimum.
    """
    segment = math.exp((interval_s + save_s) / failure_s) - 1
    return failure_s * segment / interval_s


@pytest.mark.parametrize("save_s", [0.05, 1.0, 30.0, 300.0])
@pytest.mark.parametrize("failure_s", [15 * MINUTE, 6 * HOUR, 24 * HOUR])
def test_no_other_interval_loses_less(save_s: float, failure_s: float) -> None:
    best = best_interval(save_s, failure_s)
    least = lost(best, save_s, failure_s)
    for factor in (0.3, 0.7, 0.9, 1.1, 1.4, 3.0):
        # The series is cut after three terms.
        assert least <= lost(best * factor, save_s, failure_s) * (1 + 1e-4)


def test_without_a_cost_it_pays_at_once() -> None:
    assert best_interval(0.0, HOUR) == 0.0


@pytest.mark.parametrize("save_s", [2 * HOUR, 3 * HOUR])
def test_a_save_that_outlasts_failures_is_no_fraction_of_them(save_s: float) -> None:
    assert best_interval(save_s, HOUR) == HOUR


def test_longer_saves_and_rarer_failures_mean_longer_intervals() -> None:
    saves = [best_interval(s, HOUR) for s in (1, 10, 100, 1000)]
    failures = [best_interval(10, h * HOUR) for h in (1, 2, 5, 24)]
    assert saves == sorted(saves) and failures == sorted(failures)
