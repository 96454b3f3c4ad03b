"""Every test has this: no process outlives the session, no network for model hubs, no deadline in property tests."""

import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from tests.browser_fixture import chromium, tab
from tests.cluster_fixture import eventually, hosted_socket, last_log_lines, live, raytide_cli, tide
from tests.disk_fixture import disk
from tests.moto_fixture import aws, aws_for_ray, moto_url

__all__ = [
    "aws",
    "aws_for_ray",
    "chromium",
    "disk",
    "eventually",
    "hosted_socket",
    "live",
    "moto_url",
    "raytide_cli",
    "tab",
    "tide",
]

ROOT = Path(__file__).parents[1]

# Times are benchmarks; a slow machine must not fail a property.
settings.register_profile("raytide", deadline=None, print_blob=True)
settings.load_profile("raytide")

os.environ["HF_HUB_OFFLINE"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with a thread for each core would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Carried by everything this session starts, however far it is detached.
MARK = "RAYTIDE_TEST_SESSION"
os.environ[MARK] = uuid.uuid4().hex
os.environ["RAYTIDE_PASS"] = MARK

# End with the interpreter that started them, which is still running when this looks.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "tests/guard.py")

PR_SET_PDEATHSIG = 1


def end_with_this_process() -> None:
    """Whatever this session starts, and this process itself where it is another one's worker."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    environment["PYTHONPATH"] = str(ROOT / "platform")
    command = [sys.executable, str(ROOT / "tests/guard.py"), str(os.getpid()), MARK, os.environ[MARK]]
    nowhere = subprocess.DEVNULL
    subprocess.Popen(
        command, env=environment, cwd="/", start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere
    )


end_with_this_process()


def started_here() -> list[psutil.Process]:
    """Children, and whatever carries this session's mark after its parent is gone; this process is left out."""
    me = psutil.Process()
    found = set(me.children(recursive=True))
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == os.environ[MARK]:
                found.add(process)
        except psutil.Error:  # it ended, or belongs to another user and so not to this session
            continue
    return sorted((process for process in found if process != me and not is_helper(process)), key=lambda one: one.pid)


def is_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() == psutil.STATUS_ZOMBIE or any(helper in command for helper in HELPERS)
    except psutil.NoSuchProcess:
        return True


@functools.cache
def shared(file: str) -> str:
    """Returns the group of tests that one worker runs: those on the session's cluster and some others, all others with
    a cluster, with the how-tos, the engine's, the sources', or a file's. So two clusters are up at most: three starve
    two cores; and the two groups take about as long. Each file of tests/soak is a group: most have a cluster for each
    test."""
    if has_cluster(file) and not file.startswith("tests/soak/"):
        is_first = has_session_cluster(file) and file != "tests/test_howtos.py"
        return "cluster" if is_first or file in ALSO_FIRST else "other clusters"
    if file.startswith("tests/actors/engine/"):
        return "engine"
    return "sources" if file in SOURCES else file


@functools.cache
def has_cluster(file: str) -> bool:
    return "mark.cluster" in (ROOT / file).read_text()


@functools.cache
def has_session_cluster(file: str) -> bool:
    """True if its tests share a cluster, which stays up until its worker ends."""
    return has_cluster(file) and re.search(r"\b(live|tide): ", (ROOT / file).read_text()) is not None


def turn(item: pytest.Item) -> tuple[int, bool]:
    """Returns a test's place among the groups, and within its group: a cluster that stays is started last."""
    file = item.nodeid.partition("::")[0]
    group = shared(file)
    return FIRST.index(group) if group in FIRST else len(FIRST), has_session_cluster(file)


FIRST = (
    "tests/soak/test_page_memory.py",
    "cluster",
    "other clusters",
    "engine",
    "tests/sdk/bench/load/test_against_vllm.py",
    "tests/actors/serving/test_vllm_members.py",
    "tests/kernels/test_quantized_processors.py",
    "tests/kernels/test_other_processors.py",
)
"""The groups that take longest, in the order in which workers take them: one that begins last leaves the other workers
without work. The page's takes an hour, and little CPU."""
ALSO_FIRST = (
    "tests/actors/gang/test_groups_cluster.py",
    "tests/actors/trainer/runners/test_ray_train.py",
    "tests/autoscaler/test_ray_gcs.py",
    "tests/control/bootstrap/test_replica_roots.py",
    "tests/live/test_full_disk.py",
    "tests/pipelines/runners/test_gang.py",
)
"""Files with a Ray or a cluster of their own that the first of the two groups has time for."""
SOURCES = ("tests/test_dependencies.py", "tests/test_floors.py", "tests/test_house.py")
"""They read all Python files, each once in a process."""


SLOW = (
    "tests/actors/engine/backends/remote/test_direct_output.py",
    "tests/actors/engine/backends/remote/test_fair_admission.py",
    "tests/actors/engine/backends/test_vllm.py",
    "tests/actors/engine/model/parallel/test_shard.py::test_two_members_compute_the_logits_of_one",
    "tests/actors/engine/model/parallel/test_shard.py::test_two_stages_compute_the_logits_of_one_to_the_bit",
    "tests/actors/engine/test_tensor_parallel.py",
    "tests/actors/serving/test_engine_members.py",
    "tests/actors/engine/model/test_layer_stream.py",
    "tests/actors/engine/model/test_tuned_models.py",
    "tests/actors/engine/model/vision/test_llava.py::test_prompts_with_images_that_are_evicted",
    "tests/actors/engine/model/vision/test_llava.py::test_two_images_never_share_a_block",
    "tests/actors/engine/test_combinations.py",
    "tests/actors/trainer/parallel/test_parameter_offload.py::test_no_bit_of_a_run_depends_on_where_its_weights_are",
    "tests/actors/trainer/parallel/test_parameter_offload.py::test_a_model_of_twice_the_memory_trains_from_the_disk",
    "tests/actors/trainer/run_log/test_object_store.py::test_a_run_in_a_bucket_that_is_killed",
    "tests/actors/trainer/run_log/test_object_store.py::test_a_gang_whose_first_rank_dies_goes_on_in_the_bucket",
    "tests/actors/engine/test_hostile_requests.py",
    "tests/actors/engine/test_larger_than_memory.py",
    "tests/actors/engine/test_pipeline_parallel.py",
    "tests/actors/engine/test_resume_at_any_token.py::test_cut_after_any_token_it_ends_as_if_it_had_not_been",
    "tests/actors/engine/test_speculation_changes_nothing.py::test_answers_are_those_without_speculation[chunks]",
    "tests/actors/engine/test_speculation_changes_nothing.py::test_answers_are_those_without_speculation[recompute]",
    "tests/actors/engine/test_speculation_changes_nothing.py::test_answers_are_those_without_speculation[swap]",
    "tests/actors/gang/test_groups_cluster.py",
    "tests/actors/gang/test_script.py",
    "tests/actors/models/quantized/gguf/test_gguf_models.py",
    "tests/actors/models/quantized/gguf/test_smollm2.py",
    "tests/actors/models/quantized/test_compressed_tensors.py",
    "tests/actors/models/quantized/test_engine_options.py",
    "tests/actors/models/quantized/test_packed_formats.py",
    "tests/actors/models/test_hostile_directory.py",
    "tests/actors/serving/batch/",
    "tests/actors/serving/http/test_heads.py",
    "tests/actors/serving/http/test_limits.py",
    "tests/actors/serving/ray_serve/test_serve_cluster.py",
    "tests/actors/serving/test_fuzz.py",
    "tests/actors/serving/test_vllm_engine.py",
    "tests/actors/serving/tools/test_random_schemas.py",
    "tests/actors/trainer/checkpoint/test_async_save.py",
    "tests/actors/trainer/checkpoint/test_hostile_checkpoint.py",
    "tests/actors/trainer/checkpoint/test_reshard.py",
    "tests/actors/trainer/checkpoint/test_snapshots.py",
    "tests/actors/trainer/elastic/test_elastic.py",
    "tests/actors/trainer/hf/test_finetune.py",
    "tests/actors/trainer/model/test_compiled_training.py",
    "tests/actors/trainer/model/test_distillation.py::test_a_student_comes_nearer_to_its_teacher_and_a_cache_changes_nothing",
    "tests/actors/trainer/model/test_fake_quantize.py::test_a_resume_is_bit_equal_before_and_after_the_start_step",
    "tests/actors/trainer/model/test_fake_quantize.py::test_two_ranks_follow_one_process_in_each_layout",
    "tests/actors/trainer/optim/test_optimizers.py",
    "tests/actors/trainer/parallel/test_document_layouts.py",
    "tests/actors/trainer/parallel/test_layouts.py",
    "tests/actors/trainer/parallel/test_parity.py",
    "tests/actors/trainer/parallel/test_replica_check.py",
    "tests/actors/trainer/run_log/test_profiler.py",
    "tests/actors/trainer/runners/test_ray_train.py",
    "tests/actors/trainer/test_gpu_benchmark.py",
    "tests/actors/trainer/test_predicted_memory.py",
    "tests/actors/trainer/test_techniques.py",
    "tests/autoscaler/nodes/exporter/test_exporter.py",
    "tests/autoscaler/providers/hosts/test_ssh.py",
    "tests/autoscaler/providers/test_cloud.py",
    "tests/autoscaler/providers/test_kuberay.py::test_whatever_happens_pods_and_purchases_agree_in_the_end",
    "tests/autoscaler/test_invariants.py",
    "tests/autoscaler/test_ray_gcs.py",
    "tests/control/api/services/test_training_plan.py",
    "tests/control/api/test_fuzz.py",
    "tests/control/backup/test_drill.py",
    "tests/control/backup/test_remote_repositories.py::test_a_cluster_is_backed_up_to_a_remote_store",
    "tests/control/backup/test_remote_repositories.py::test_a_copy_goes_from_a_remote_store",
    "tests/control/backup/test_restore.py",
    "tests/control/backup/test_run.py",
    "tests/control/backup/test_runbooks.py",
    "tests/control/bootstrap/head/test_heads_real.py",
    "tests/control/bootstrap/test_hosts_real.py",
    "tests/control/bootstrap/test_local_real.py",
    "tests/control/bootstrap/test_monitoring_real.py",
    "tests/control/bootstrap/test_owner_watch.py",
    "tests/control/bootstrap/test_ray_up_real.py",
    "tests/control/bootstrap/test_replica_roots.py",
    "tests/control/bootstrap/test_slurm_real.py",
    "tests/control/reconcile/test_clock_steps.py",
    "tests/control/reconcile/test_hostile_specs.py",
    "tests/control/reconcile/test_quarantine.py",
    "tests/control/reconcile/test_two_controllers.py",
    "tests/control/supervision/test_log_rotation.py",
    "tests/control/test_controller.py::test_killed_at_any_call_it_loses_no_job_leaks_no_node_and_books_nothing_twice",
    "tests/control/doctor/test_machine.py",
    "tests/control/test_full_disk.py",
    "tests/control/test_job_ends.py",
    "tests/control/test_rollouts.py",
    "tests/core/state/tenancy/test_spending.py",
    "tests/core/state/test_store.py::test_more_ids_than_a_statement_can_name_are_read_booked_and_committed[postgresql]",
    "tests/dashboards/rules/test_evaluation.py",
    "tests/dashboards/rules/test_rule_files.py",
    "tests/dashboards/web/test_browser.py",
    "tests/deploy/test_terraform.py::test_the_head_has_the_rights_that_it_uses_and_no_others",
    "tests/gateway/batches/",
    "tests/gateway/rollouts/test_feedback.py::test_in_an_a_b_test_a_judgement_is_of_its_users_group_through_any_gateway",
    "tests/gateway/tenancy/test_bills.py",
    "tests/kernels/test_library.py",
    "tests/kernels/test_other_processors.py",
    "tests/kernels/test_quantized_processors.py",
    "tests/kernels/triton/test_interpreter.py",
    "tests/kernels/triton/test_resources.py",
    "tests/live/",
    "tests/pipelines/cleaning/corpus/test_near_duplicates.py",
    "tests/pipelines/compress/prune/",
    "tests/pipelines/compress/quantize/",
    "tests/pipelines/compress/test_distill.py",
    "tests/pipelines/compress/test_killed_recipe.py",
    "tests/pipelines/runners/test_gang.py",
    "tests/pipelines/writers/test_shards.py::test_documents_that_are_not_kept_leave_no_trace",
    "tests/pipelines/writers/test_shards.py::test_the_chunks_that_tokens_come_in_leave_no_trace",
    "tests/pipelines/writers/test_shards.py::test_the_index_beside_each_shard_holds_the_ends_of_the_documents_that_end_in_it",
    "tests/registry/rollout/test_ab_test.py",
    "tests/sdk/bench/load/test_against_vllm.py",
    "tests/simulate/test_live.py",
    "tests/sizing/search/test_plans.py",
    "tests/test_howtos.py::test_a_driver_holds_a_gang",
    "tests/test_howtos.py::test_a_file_of_requests_is_answered",
    "tests/test_howtos.py::test_a_key_is_made_used_and_ended",
    "tests/test_howtos.py::test_a_run_outlives_a_spot_notice",
    "tests/test_howtos.py::test_a_script_runs_on_a_gang",
    "tests/test_howtos.py::test_a_trained_model_becomes_an_eight_bit_endpoint_with_its_gate",
    "tests/test_howtos.py::test_a_training_is_planned_and_its_gang_chosen",
    "tests/test_howtos.py::test_a_version_is_rolled_out_and_taken_back",
    "tests/test_howtos.py::test_adapters_are_served_beside_their_base_model",
    "tests/test_howtos.py::test_an_alert_acts",
    "tests/test_howtos.py::test_the_example_of_the_api_page_runs",
    "tests/workflows/test_flow_cluster.py",
    "tests/gateway/test_images.py",
)
"""The files that `./dev test` leaves to `./dev test --slow`. tests/test_howtos.py is the one path through data,
training and serving that it keeps."""

ENGINE_OF_OTHERS = "[vllm"
"""Tests of the conformance suite with this parameter wait for vLLM's start, which takes half a minute."""


def is_slow(file: str) -> bool:
    """Returns whether all tests of a file are left to `./dev test --slow`."""
    return any(file == name or (name.endswith("/") and file.startswith(name)) for name in SLOW)


@functools.cache
def has_slow(file: str) -> bool:
    """Returns whether a file may have tests that are left to `./dev test --slow`, by its text: nothing is imported."""
    if is_slow(file) or any(name.startswith(f"{file}::") for name in SLOW):
        return True
    beside = (ROOT / file).with_name("conftest.py")
    texts = [each.read_text() for each in (ROOT / file, beside) if each.exists() and each != Path(__file__)]
    return any(word in text for text in texts for word in ("mark.slow", '"vllm"'))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares each worker the imports of files without a test for it, which take most of a minute of CPU."""
    if collection_path.suffix != ".py":
        return None
    file, marks = str(collection_path.relative_to(ROOT)), config.getoption("markexpr")  # those of ./dev
    is_left_out = (marks == "slow and not soak" and not has_slow(file)) or (
        marks == "not soak and not slow" and is_slow(file)
    )
    return is_left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, what takes longest begins first."""
    for item in items:
        if item.nodeid.startswith(SLOW) or ENGINE_OF_OTHERS in item.nodeid:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") is not None and not has_slow(item.nodeid.partition("::")[0]):
            raise pytest.UsageError(f"./dev test --slow would not collect {item.nodeid}: has_slow must find its file.")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows with a failure what the cluster logged: its folder is gone when somebody asks."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("live")
    if report.failed and cluster is not None:
        report.sections.append(("the cluster's logs", last_log_lines(cluster)))
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shared(nodeid.partition("::")[0])

    return Sharing(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_session() -> Iterator[None]:
    yield
    _, alive = psutil.wait_procs(started_here(), timeout=60)
    left = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in alive if process.is_running()]
    for process in alive:
        process.kill()
    assert not left, "the tests left processes behind:\n" + "\n".join(left)
