"""The goodput simulator agrees with the published formulas, and would not if it were wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from goodput_simulator import (
    DAY,
    Estimate,
    Job,
    Launcher,
    exact_goodput,
    first_order_waste,
    mean_detection,
    simulate,
    young_interval,
)

SWIFT = Launcher("swift", crash_s=0.0, silent_s=0.0, restart_s=600.0)
SLOW = Launcher("slow", crash_s=5.0, silent_s=1800.0, restart_s=300.0)
SIGMAS = 4.0  # 1 in 16,000 by chance, and the seed is fixed

CASES = {
    "as Daly's figure 3: MTBF 24 h": (Job(24 * 3600, 300, 117 * 60, 0), SWIFT),
    "as Daly's figure 4: MTBF 6 h": (Job(6 * 3600, 300, 57 * 60, 0), SWIFT),
    "as Daly's figure 5: MTBF 15 min, a failure in most restarts": (Job(15 * 60, 300, 9.1 * 60, 0), SWIFT),
    "an interval as long as the MTBF": (Job(3600, 60, 3600, 0), SWIFT),
    "hangs noticed after half an hour": (Job(4 * 3600, 60, 1200, 0.3), SLOW),
    "nothing but hangs": (Job(2 * 3600, 30, 900, 1.0), SLOW),
}


def found_for(job: Job, launcher: Launcher, runs: int = 200) -> Estimate:
    return simulate(job, launcher, 200 * job.interval_s, runs, seed=1)


def distance(found: Estimate, truth: float) -> float:
    """In standard errors."""
    return abs(found.goodput - truth) / found.error


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_dalys_complete_model(name: str) -> None:
    job, launcher = CASES[name]
    assert distance(found_for(job, launcher), exact_goodput(job, launcher)) < SIGMAS


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("changed", ["checkpoint_s", "mtbf_s", "interval_s", "restart_s", "silent_s"])
def test_it_tells_a_doubled_parameter(name: str, changed: str) -> None:
    """The simulation of the doubled parameter agrees with its own formula and, where the formulas differ at all, not with the old one."""
    job, launcher = CASES[name]
    if hasattr(job, changed):
        other, who = replace(job, **{changed: 2 * getattr(job, changed)}), launcher
    else:
        other, who = job, replace(launcher, **{changed: 2 * getattr(launcher, changed)})
    before, after = exact_goodput(job, launcher), exact_goodput(other, who)
    found = found_for(other, who)
    assert distance(found, after) < SIGMAS
    if abs(before - after) > 2 * SIGMAS * found.error:
        assert distance(found, before) > SIGMAS


def test_doubling_the_checkpoint_costs_what_the_formula_says() -> None:
    job, launcher = CASES["hangs noticed after half an hour"]
    twice = replace(job, checkpoint_s=2 * job.checkpoint_s)
    one, two = (found_for(which, launcher, runs=1000) for which in (job, twice))
    predicted = exact_goodput(job, launcher) - exact_goodput(twice, launcher)
    assert predicted > 0.03
    assert one.goodput - two.goodput == pytest.approx(predicted, abs=SIGMAS * (one.error**2 + two.error**2) ** 0.5)


@pytest.mark.parametrize("mtbf_h", [50, 500, 5000])
def test_the_first_order_waste_is_its_limit(mtbf_h: float) -> None:
    """Young's waste for T << M. What is left out is of second order: products of C/T, T/M, R/M and D/M."""
    mtbf = mtbf_h * 3600
    job = Job(mtbf, 60, young_interval(60, mtbf), 0.2)
    waste = first_order_waste(job, SLOW)
    small = (
        max(job.interval_s + job.checkpoint_s, SLOW.restart_s, mean_detection(job, SLOW)) / mtbf
        + job.checkpoint_s / job.interval_s
    )
    assert 1 / exact_goodput(job, SLOW) - 1 == pytest.approx(waste, abs=2 * small**2)
    found = found_for(job, SLOW, runs=1000)
    assert 1 / found.goodput - 1 == pytest.approx(waste, abs=2 * small**2 + SIGMAS * found.error)


@pytest.mark.parametrize(("mtbf_h", "published_min"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_best_interval_is_the_published_one(mtbf_h: float, published_min: float) -> None:
    """Daly 2006, figures 3 to 5: dumps of 5 min, restarts of 10 min. His are of the first terms of a series, so the last is a little off."""

    def goodput(minutes: float) -> float:
        return exact_goodput(Job(mtbf_h * 3600, 300, minutes * 60, 0), SWIFT)

    best = max((tenths / 10 for tenths in range(10, 3000)), key=goodput)
    assert best == pytest.approx(published_min, rel=0.015)


def test_no_failure_costs_only_the_checkpoints() -> None:
    found = simulate(Job(1e15, 60, 540, 0.5), SLOW, DAY, 10, 0)
    assert found.goodput == pytest.approx(0.9) and found.error == pytest.approx(0)
