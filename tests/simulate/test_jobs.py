"""Jobs on a cluster: the trace as it is read, the baselines as published, and what holds under every policy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.core.errors import DataError, UsageError
from raytide.simulate.jobs import trace as job_trace
from raytide.simulate.jobs.cluster import RESTART_S, ReplayResult, lower_bound_s, replay
from raytide.simulate.jobs.compare import POLICIES, Setting, simulate
from raytide.simulate.jobs.trace import DAY_S, JobTrace

HEADER = "submit_s,duration_s,num_gpus,vc\n"


def trace(*jobs: tuple[float, float, int], teams: str = "") -> JobTrace:
    """(submitted at, runs for, GPUs); a letter for each team."""
    submit_s, duration_s, gpus = (np.array(column, dtype=float) for column in zip(*jobs, strict=True))
    numbers = np.array([ord(team) - ord("a") for team in teams or "a" * len(jobs)])
    return JobTrace(submit_s, duration_s, gpus.astype(np.int64), numbers)


def outcome(policy: str, jobs: JobTrace, gpus: int = 8) -> ReplayResult:
    return replay(jobs, gpus, POLICIES[policy], days=1)


@st.composite
def traces(draw: st.DrawFn) -> JobTrace:
    jobs = draw(
        st.lists(
            st.tuples(st.integers(0, 40_000), st.integers(30, 90_000), st.sampled_from([1, 1, 2, 4, 8])),
            min_size=1,
            max_size=25,
        )
    )
    teams = "".join(draw(st.lists(st.sampled_from("abc"), min_size=len(jobs), max_size=len(jobs))))
    return trace(*sorted(jobs), teams=teams)


@settings(max_examples=40, deadline=None)
@given(traces())
def test_every_job_ends_and_no_policy_beats_the_lower_bound(jobs: JobTrace) -> None:
    total_s = float(jobs.duration_s.sum())
    for name in POLICIES:
        done = outcome(name, jobs)
        assert done.mean_jct_s >= done.lower_bound_mean_jct_s - 1e-6, name
        assert done.makespan_s <= jobs.submit_s.max() + total_s + RESTART_S * (done.restarts + 1) + 60 * len(jobs), name
        assert done.restarts == 0 or POLICIES[name].preempts


def test_alone_a_job_takes_what_it_takes_under_every_policy() -> None:
    for name in POLICIES:
        done = outcome(name, trace((0, 1000, 8)))
        assert (done.mean_jct_s, done.max_wait_s, done.makespan_s) == (1000, 0, 1000)
        assert done.utilisation == pytest.approx(1000 / DAY_S)


def test_under_fifo_nothing_overtakes_and_easy_fills_the_hole_without_delaying_the_head() -> None:
    # 6 GPUs are taken until 1000; the gang of 8 waits for them; a short and a long job follow.
    jobs = trace((0, 1000, 6), (1, 100, 8), (2, 500, 2), (3, 5000, 2))
    assert outcome("fifo", jobs).makespan_s == 1100 + 5000
    assert outcome("easy", jobs).max_wait_s == outcome("fifo", jobs).max_wait_s == 999
    easy, fifo = outcome("easy", jobs), outcome("fifo", jobs)
    assert fifo.mean_jct_s - easy.mean_jct_s == pytest.approx((1600 - 502) / 4)


def test_drf_serves_the_team_that_holds_less() -> None:
    jobs = trace((0, 1000, 8), (1, 1000, 4), (2, 1000, 4), (3, 1000, 4), teams="aaab")
    # At 1000 both teams hold nothing: one job of each starts, the third of `a` waits.
    assert outcome("drf", jobs).makespan_s == 3000
    assert outcome("drf", jobs).mean_jct_s == pytest.approx((1000 + 1999 + 2998 + 1997) / 4)


def test_las_lets_the_new_go_first_and_charges_a_restart() -> None:
    jobs = trace((0, 7200, 8), (3600, 120, 8))
    done = outcome("las", jobs)
    assert done.restarts == 1
    assert done.makespan_s == 7200 + 120 + RESTART_S
    assert done.max_wait_s == 120


def test_srpt_is_the_lower_bound_when_jobs_use_the_whole_cluster() -> None:
    jobs = trace((0, 6000, 8), (0, 600, 8), (0, 60, 8))
    assert outcome("srpt", jobs).mean_jct_s == pytest.approx(lower_bound_s(jobs, 8)) == (60 + 660 + 6660) / 3


@pytest.mark.parametrize("seed", [2, 7, 9])
def test_no_gang_of_eight_waits_for_longer_than_under_easy_which_knows_the_durations(seed: int) -> None:
    """These draws are among those on which gangs waited for longer before they kept their place while they run."""
    random = np.random.default_rng(seed)
    duration_s = np.clip(random.lognormal(np.log(1800), 1.8, 500), 30, 3e5)
    gpus = random.choice([1, 2, 4, 8, 16], p=[0.7, 0.1, 0.1, 0.08, 0.02], size=500)
    submit_s = np.sort(random.random(500)) * float(duration_s @ gpus) / 96 / 1.1
    jobs = JobTrace(submit_s, duration_s, gpus, np.zeros(500, dtype=np.int64))
    easy = outcome("easy", jobs, gpus=96)
    assert 0 < outcome("raytide", jobs, gpus=96).max_wait_s <= easy.max_wait_s


def write(folder: Path, *rows: str) -> Path:
    path = folder / "jobs.csv"
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


def test_durations_and_sizes_are_clipped_and_the_busiest_days_found(tmp_path: Path) -> None:
    days = [f"{day * DAY_S + 5},{1e7 if day == 3 else 1},{500 if day == 3 else 1},vc{day % 2}" for day in range(6)]
    jobs = job_trace.read(write(tmp_path, *reversed(days)))
    assert (jobs.duration_s.min(), jobs.duration_s.max(), jobs.gpus.max()) == (30, 7 * DAY_S, 64)
    assert job_trace.window(jobs, None, 1).submit_s.tolist() == [5]
    assert job_trace.window(jobs, 2, 3).submit_s.tolist() == [5, DAY_S + 5, 2 * DAY_S + 5]
    with pytest.raises(DataError, match="from day 9"):
        job_trace.window(jobs, 9, 1)


def test_no_gpu_and_a_part_of_one_are_one(tmp_path: Path) -> None:
    jobs = job_trace.read(write(tmp_path, "0,0,0,a", "1,10,1.5,a"))
    assert jobs.gpus.tolist() == [1, 2] and jobs.duration_s.tolist() == [30, 30]


def test_single_gpu_jobs_are_redrawn_from_the_sizes_of_the_others(tmp_path: Path) -> None:
    jobs = job_trace.read(write(tmp_path, *(f"{i},100,{4 if i % 10 == 0 else 1},a" for i in range(2000))))
    mixed = job_trace.with_multi_gpu_share(jobs, 0.5, seed=1)
    assert set(mixed.gpus.tolist()) == {1, 4}
    assert (mixed.gpus > 1).mean() == pytest.approx(0.5, abs=0.04)
    assert np.array_equal(mixed.gpus, job_trace.with_multi_gpu_share(jobs, 0.5, seed=1).gpus)
    assert job_trace.with_multi_gpu_share(jobs, 0.05, seed=1) is jobs
    assert job_trace.gpus_for(mixed, 1.0, 1) >= job_trace.gpus_for(jobs, 1.0, 1)


def test_a_cluster_of_given_size_is_resized_to_the_same_load(tmp_path: Path) -> None:
    path = write(tmp_path, *(f"{i * 40},20000,{8 if i % 4 == 0 else 1},a" for i in range(400)))
    plain = simulate(path, Setting(days=1, gpus=160, policy="fifo"))
    mixed = simulate(path, Setting(days=1, gpus=160, policy="fifo", multi_gpu_share=0.5))
    assert plain["gpus"] == 160
    by_load = simulate(path, Setting(days=1, load=float(str(plain["load"])), policy="fifo", multi_gpu_share=0.5))
    assert mixed["gpus"] == by_load["gpus"] > 160  # type: ignore[operator]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(load=1.0, policy="best"),
        Setting(load=1.0, gpus=8),
        Setting(),
        Setting(gpus=0),
        Setting(load=0.0),
        Setting(load=float("nan")),
        Setting(load=1.0, window="monday"),
        Setting(load=1.0, window="²"),
        Setting(load=1.0, seed=-1),
    ],
)
def test_a_bad_setting_is_refused(tmp_path: Path, setting: Setting) -> None:
    with pytest.raises(UsageError):
        simulate(write(tmp_path, "0,100,1,a"), setting)


def test_a_cluster_that_is_too_small_for_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="16 GPUs"):
        simulate(write(tmp_path, "0,100,16,a"), Setting(days=1, gpus=8))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "no rows"),
        (("0,x,1,a",), "line 2: duration_s"),
        (("0,10,nan,a",), "line 2: num_gpus"),
        (("0,10,1",), "line 2: vc is missing"),
        (("-1,10,1,a",), "submit_s"),
        (("1e18,10,1,a",), "submit_s"),
        (("0,10,-1,a",), "negative number of GPUs"),
    ],
)
def test_a_broken_trace_is_refused(tmp_path: Path, rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        job_trace.read(write(tmp_path, *rows))


def test_the_command_prints_the_setting_and_the_outcome(tmp_path: Path) -> None:
    path = write(tmp_path, "0,1000,8,a", "10,1000,8,b")
    command = ["simulate", "jobs", "--trace", str(path), "--window", "0", "--days", "1", "--gpus", "8"]
    shown = json.loads(CliRunner().invoke(app, [*command, "--policy", "fifo", "--json"]).stdout)
    assert (shown["policy"], shown["gpus"], shown["jobs"], shown["max_wait_s"]) == ("fifo", 8, 2, 990)
    named = {"gpus", "mean_jct_s", "p99_jct_s", "makespan_s", "utilisation", "lower_bound_mean_jct_s", "max_wait_s"}
    assert named <= shown.keys()
