"""Whatever is traded for memory and speed, two ranks follow one process's curve, each as closely as it promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.actors.trainer.technique_ranks import Run, out_of_memory, overflow, paused, runs, went_on

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.model import apply
from raytide.actors.trainer.model.float8 import convert
from raytide.actors.trainer.optim import registry
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.trainer import Trainer
from raytide.core.errors import ConfigError, TrainError
from raytide.core.specs.optim import OuterSpec
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import ModelSpec, OptimSpec, TrainSpec

RunRanks = Callable[..., list[Any]]
EXACT: dict[str, dict[str, Any]] = {
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "disk": {"activations": "disk", "offload_min_bytes": 1024},
    "optimizer": {"optimizer": "disk"},
    "chunk": {"loss_chunk": 7},
    "compile": {"compile": True, "compile_backend": "aot_eager"},
    "compile-full-disk": {
        "compile": True,
        "compile_backend": "aot_eager",
        "checkpointing": "full",
        "activations": "disk",
        "offload_min_bytes": 1024,
    },
}


def alone(spec: TrainSpec) -> list[float]:
    losses: list[float] = []
    train_local(spec.model_copy(update={"out": spec.out + "-alone"}), on_step=lambda result: losses.append(result.loss))
    return losses


def with_(spec: TrainSpec, name: str, **changes: Any) -> TrainSpec:
    known = {key: value for key, value in spec.model_dump().items() if key not in changes}
    return TrainSpec.parse({**known, **changes, "out": f"{spec.out}-{name}"}, where=name)


def far(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_two_ranks_with_each_technique_follow_one_process(spec: TrainSpec, run_ranks: RunRanks) -> None:
    spec = with_(spec, "base", steps=4)
    specs = {name: with_(spec, name, memory=memory) for name, memory in EXACT.items()}
    for axis, name in (("tensor", "selective"), ("tensor", "disk"), ("pipeline", "full"), ("pipeline", "chunk")):
        specs[f"{axis}-{name}"] = with_(spec, f"{axis}-{name}", layout={axis: 2}, memory=EXACT[name])
    specs["auto"] = with_(spec, "auto", micro_batch="auto")
    specs["fp16"] = with_(spec, "fp16", precision="fp16")
    wanted, found = alone(spec), run_ranks(2, runs, specs)[0]
    assert len(wanted) == 4
    for name, run in found.items():
        assert far(run.losses, wanted) <= (1e-3 if name == "fp16" else 5e-6), name
    assert found["fp16"].losses != wanted
    assert found["auto"].micro_batch == 3


def test_replicas_that_compress_learn_alike_and_send_less(spec: TrainSpec, run_ranks: RunRanks) -> None:
    spec = with_(spec, "base", steps=60, layout=Parallelism(replicate=2), optim=OptimSpec(lr=3e-3, warmup_steps=2))
    kinds = {"bf16": {}, "int8": {}, "topk": {"topk_ratio": 0.1}, "powersgd": {"powersgd_rank": 2}}
    specs = {kind: with_(spec, kind, memory={"compression": kind, **more}) for kind, more in kinds.items()}
    specs["none"] = spec
    by_rank: list[dict[str, Run]] = run_ranks(2, runs, specs)
    found, plain = by_rank[0], by_rank[0]["none"].losses
    assert far(found["bf16"].losses[:10], plain[:10]) <= 5e-4
    assert plain[-1] < plain[0] - 1.5
    for kind in kinds:
        assert by_rank[1][kind].losses == found[kind].losses
        assert sum(found[kind].losses[-5:]) <= 1.1 * sum(plain[-5:]), kind
    weights = 96 * 32 + 2 * (32 * 32 * 3 + 3 * 32 * 128 + 64) + 32
    fp32_bytes = 60 * 4 * weights  # 2 (n - 1) / n of the buffer, for n of 2
    assert found["bf16"].sent_bytes == fp32_bytes // 2
    assert found["int8"].sent_bytes < 0.27 * fp32_bytes
    assert found["topk"].sent_bytes < 0.21 * fp32_bytes
    assert found["powersgd"].sent_bytes < 0.2 * fp32_bytes


def test_what_compression_left_out_goes_with_the_checkpoint(spec: TrainSpec, run_ranks: RunRanks) -> None:
    spec = with_(spec, "base", layout=Parallelism(replicate=2), optim=OptimSpec(lr=3e-3, warmup_steps=2))
    kinds = {"int8": {}, "topk": {}, "powersgd": {"powersgd_rank": 2}}
    specs = {kind: with_(spec, kind, memory={"compression": kind, **more}) for kind, more in kinds.items()}
    for by_kind in run_ranks(2, went_on, specs):
        for kind, (on, again) in by_kind.items():
            assert on == again, kind


def test_replicas_that_train_apart_are_equal_when_they_meet_and_learn_alike(
    spec: TrainSpec, run_ranks: RunRanks
) -> None:
    """Each meeting compares the replicas' weights and would end the run."""
    spec = with_(spec, "base", steps=62, layout=Parallelism(replicate=2), optim=OptimSpec(lr=3e-3, warmup_steps=2))
    apart = {"replica_check_every": 1, "optim": {"lr": 3e-3, "warmup_steps": 2, "outer": {"every": 5}}}
    specs = {
        "together": spec,
        "adamw": with_(spec, "adamw", **apart),
        "int8": with_(spec, "int8", **apart, memory={"compression": "int8"}),
        "adamw8bit": with_(spec, "8bit", **{**apart, "optim": {**apart["optim"], "name": "adamw8bit"}}),
    }
    mine, other = run_ranks(2, runs, specs)
    plain = mine["together"].losses
    for name in ("adamw", "int8", "adamw8bit"):
        assert mine[name].losses == other[name].losses
        assert mine[name].losses[:1] == plain[:1] and mine[name].losses[2:] != plain[2:]
        assert sum(mine[name].losses[-5:]) <= 1.1 * sum(plain[-5:]), name
    assert 0 < mine["int8"].sent_bytes < 0.06 * 62 * 4 * (96 * 32 + 2 * (32 * 32 * 3 + 3 * 32 * 128 + 64) + 32)


def test_a_resume_of_replicas_that_train_apart_is_bit_equal(spec: TrainSpec, run_ranks: RunRanks) -> None:
    optim = {"lr": 3e-3, "warmup_steps": 2, "outer": {"every": 3}}
    spec = with_(spec, "base", layout=Parallelism(replicate=2), optim=optim)
    for by_kind in run_ranks(2, went_on, {"apart": spec}):
        on, again = by_kind["apart"]
        assert on == again


def test_a_pause_brings_replicas_that_train_apart_together(spec: TrainSpec, run_ranks: RunRanks) -> None:
    optim = {"lr": 3e-3, "warmup_steps": 2, "outer": {"every": 4}}
    spec = with_(spec, "base", layout=Parallelism(replicate=2), optim=optim)
    mine, other = run_ranks(2, paused, spec)
    assert mine.steps == 6
    assert mine == other


@pytest.mark.parametrize(
    ("every", "steps"), [(5, [5, 10, 15, 20, 23]), (7, [10, 15, 23]), (10, [10, 20, 23]), (100, [23]), (0, [])]
)
def test_what_is_due_while_replicas_are_apart_waits_for_their_meeting(every: int, steps: list[int]) -> None:
    spec = TrainSpec(
        dataset="d", out="o", steps=23, layout=Parallelism(replicate=2), optim=OptimSpec(outer=OuterSpec(every=5))
    )
    assert [step for step in range(1, 24) if spec.is_due(every, step)] == steps


def test_an_overflow_on_one_rank_is_skipped_on_all_and_halves_the_scale(spec: TrainSpec, run_ranks: RunRanks) -> None:
    spec = with_(spec, "fp16", precision="fp16", steps=6, checkpoint_every=4)
    for first, unchanged, rest in run_ranks(2, overflow, spec):
        assert first.verdicts == ["applied", "applied", "skipped", "applied"]
        assert first.loss_scales == [65536.0, 65536.0, 32768.0, 32768.0]
        assert unchanged
        assert rest.loss_scales == [32768.0, 32768.0]


def test_an_overflow_that_no_scale_cures_ends_the_run(spec: TrainSpec) -> None:
    spec = with_(spec, "fp16", precision="fp16")
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        trainer.loss_scale.value = 1.0
        trainer.model_parts[0].norm.weight.register_post_accumulate_grad_hook(
            lambda weight: weight.grad.mul_(torch.inf)
        )
        with pytest.raises(TrainError, match="overflows in fp16"):
            trainer.step()


def test_fp8_products_learn_like_bf16(spec: TrainSpec) -> None:
    spec = with_(spec, "base", steps=12, global_batch=3, micro_batch=3)
    bf16, fp8 = alone(with_(spec, "bf16", precision="bf16")), alone(with_(spec, "fp8", precision="fp8"))
    assert bf16 != fp8
    assert far(bf16, fp8) < 0.05
    assert fp8[-1] < fp8[0] - 0.3


def test_fp8_of_a_linear_layer_is_near_its_product_and_gradients() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 48)
    inputs = torch.randn(5, 7, 32, requires_grad=True)  # 35 rows are filled up to 48
    wanted = layer(inputs)
    wanted.square().sum().backward()
    grads = [inputs.grad, layer.weight.grad, layer.bias.grad]
    inputs.grad = None
    layer.zero_grad()
    assert convert(layer) == 1
    got = layer(inputs)
    got.square().sum().backward()
    for exact, close in zip([wanted, *grads], [got, inputs.grad, layer.weight.grad, layer.bias.grad], strict=True):
        assert 0 < (exact - close).norm() < 0.08 * exact.norm()


@pytest.mark.parametrize("where", ["forward", "backward", "second micro"])
def test_out_of_memory_alone_halves_the_microbatch_and_changes_nothing_else(spec: TrainSpec, where: str) -> None:
    """Global batch 6: 6 at once, then 3. A broken backward pass leaves nothing behind."""
    spec = with_(spec, "auto", steps=4, micro_batch="auto", optim={"name": "adamw8bit", "lr": 3e-3})
    wanted, losses = alone(spec), []
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        if where == "second micro":
            trainer.micro_batch = 3
        for _ in range(2):
            result = trainer.step()
            assert result is not None
            losses.append(result.loss)
        inject(trainer, where)
        for _ in range(2):
            result = trainer.step()
            assert result is not None
            losses.append(result.loss)
        assert result.micro_batch == (2 if where == "second micro" else 3)
    assert far(losses, wanted) <= 5e-6


def test_a_halved_microbatch_grows_back_and_changes_nothing_else(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytide.actors.trainer.types.GROW_AFTER", 2)
    spec = with_(spec, "auto", steps=6, micro_batch="auto")
    wanted, results = alone(spec), []
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        inject(trainer, "forward")
        results = [trainer.step() for _ in range(6)]
    assert [result.micro_batch for result in results if result is not None] == [3, 3, 6, 6, 6, 6]
    assert far([result.loss for result in results if result is not None], wanted) <= 5e-6


@pytest.mark.parametrize("qat", [None, {"scheme": "w4a16", "group": 16}])
def test_an_evaluation_that_runs_out_of_memory_is_repeated_and_no_step_is_lost(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch, qat: object
) -> None:
    held_out = {"dataset": spec.dataset, "every": 2, "batches": 2}
    spec = with_(spec, "auto", steps=3, micro_batch="auto", eval=held_out, qat=qat)
    with process_group.single_process() as mine:
        whole = Trainer(spec, mine)
        wanted = [whole.step() for _ in range(3)]
        whole.close()
        trainer = Trainer(with_(spec, "injected"), mine)
        evaluator = trainer._evaluator
        assert evaluator is not None
        loss, sizes = evaluator.loss, list[int]()

        def full(compute: Any, micro_batch: int) -> float:
            sizes.append(micro_batch)
            if len(sizes) == 1:
                raise torch.OutOfMemoryError("injected")
            return loss(compute, micro_batch)

        monkeypatch.setattr(evaluator, "loss", full)
        results = [trainer.step() for _ in range(3)]
        trainer.close()
    assert sizes == [6, 3, 3]  # due after two steps, repeated, and due at the end
    assert [result.step for result in results if result is not None] == [1, 2, 3]
    for got, one in zip(results, wanted, strict=True):
        assert got is not None and one is not None
        assert got.loss == pytest.approx(one.loss, abs=5e-6)
        assert got.eval_loss == pytest.approx(one.eval_loss, abs=5e-6)


def test_replicas_that_train_apart_meet_where_their_run_ends_early(spec: TrainSpec, run_ranks: RunRanks) -> None:
    """Evaluated after steps 2 and 4, it ends after step 4; the only meeting before that was after step 3."""
    held_out = {"dataset": spec.dataset, "every": 2, "batches": 1, "patience": 1, "min_delta": 100.0}
    optim = {"lr": 3e-3, "warmup_steps": 2, "outer": {"every": 3}}
    spec = with_(spec, "base", layout=Parallelism(replicate=2), optim=optim, eval=held_out)
    for found in run_ranks(2, runs, {"early": spec}):  # save() compares the replicas
        assert len(found["early"].losses) == 4


def inject(trainer: Trainer, where: str) -> None:
    """Run out of memory once, in the second layer."""
    calls = 0

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (2 if where == "second micro" else 1):
            raise torch.OutOfMemoryError("injected")

    layer = trainer.model_parts[0].layers["1"]
    if where == "backward":
        layer.register_forward_hook(lambda module, args, out: out.register_hook(full) and None)
    else:
        layer.register_forward_pre_hook(full)


def test_out_of_memory_in_a_gang_goes_up_and_with_one_sequence_it_ends_the_run(
    spec: TrainSpec, run_ranks: RunRanks
) -> None:
    assert run_ranks(2, out_of_memory, spec) == ["OutOfMemoryError: injected"] * 2
    with process_group.single_process() as mine:
        trainer = Trainer(with_(spec, "one", micro_batch=1), mine)
        inject(trainer, "forward")
        with pytest.raises(TrainError, match="runs out of memory even with a microbatch of one sequence"):
            trainer.step()


@pytest.mark.parametrize("name", list(registry.OPTIMIZERS))
def test_a_resume_with_any_optimiser_is_bit_equal(spec: TrainSpec, name: str) -> None:
    home = "none" if name == "adamw" else "disk"
    spec = with_(spec, name, steps=4, optim={"name": name, "lr": 3e-3}, memory={"optimizer": home})
    whole = alone(spec)
    with process_group.single_process() as mine:
        first = Trainer(spec, mine)
        before = [result.loss for result in (first.step(), first.step()) if result is not None]
        first.flush()
        again = Trainer(spec, mine)
        assert again.restore() == []
        after = [result.loss for result in (again.step(), again.step()) if result is not None]
    assert before + after == whole


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"memory": {"compile": True}, "layout": {"tensor": 2}}, "memory.compile cannot"),
        ({"precision": "fp8", "layout": {"tensor": 2}}, "fp8 cannot be combined with layout.tensor"),
        ({"memory": {"loss_chunk": 8}, "layout": {"tensor": 2}}, "loss_chunk cannot"),
        ({"memory": {"compression": "int8"}}, "compression needs layout.replicate"),
        ({"optim": {"outer": {}}}, "optim.outer needs layout.replicate"),
    ],
)
def test_what_does_not_work_together_is_refused(spec: TrainSpec, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        with_(spec, "refused", **changes)


def test_what_does_nothing_on_this_device_is_refused(spec: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for field in ("activations", "optimizer"):
        there = with_(spec, "there", memory={field: "cpu"})
        with pytest.raises(ConfigError, match="frees no memory when training on a CPU"):
            apply.check_supported(there, cpu)
        apply.check_supported(there, cuda)
    fp8 = with_(spec, "fp8", precision="fp8")
    apply.check_supported(fp8, cpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="an old one"):
        apply.check_supported(fp8, cuda)
    odd = with_(fp8, "odd", model=ModelSpec(dim=24, layers=1, heads=2, ffn_dim=40, max_seq_len=64))
    with process_group.single_process() as mine, pytest.raises(ConfigError, match="multiples of 16"):
        Trainer(odd, mine)


def test_a_sequence_of_steps_reads_one_ahead_and_follows_a_jump() -> None:
    from raytide.actors.trainer.data.dataloader import Prefetch

    read: list[int] = []

    def rows(step: int) -> int:
        read.append(step)
        if step == 9:
            raise OSError("gone")
        return step * 10

    ahead = Prefetch(rows, 10)
    assert [ahead.get(step) for step in (0, 1, 2, 7)] == [0, 10, 20, 70]
    assert ahead.get(8) == 80
    with pytest.raises(OSError, match="gone"):
        ahead.get(9)
    assert read == [0, 1, 2, 3, 7, 8, 9]
