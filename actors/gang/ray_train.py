"""Runs any of Ray Train's trainers inside a lease, if its `scaling_config` comes from `raytide.scaling_config`.

`fit()` then waits in raytide's queue. Each worker runs in the placement group of one member, and the lease ends with
`fit()`. Ray Train itself creates no placement group and requests no nodes. In processes that use such a
`scaling_config`, raytide replaces three parts of Ray Train: `fit`, the scaling policy and the worker group. The
training loop, its checkpoints and its restarts (`FailureConfig`) are unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import ray
from ray.train import ScalingConfig
from ray.util.placement_group import PlacementGroup

from raytide.actors.gang.gang import Gang
from raytide.actors.gang.lease_watch import LeaseWatch, ready_members, settled_members
from raytide.actors.gang.placement_groups import placement_group_of
from raytide.core.errors import UsageError
from raytide.core.objects.gang import GangClient, Member
from raytide.core.ray_internals import ray_train

_train = ray_train()
_ScalingPolicy: Any = _train.ScalingPolicy
_WorkerGroup: Any = _train.WorkerGroup
_GroupHandle: Any = _train.PlacementGroupHandle
_plain_fit = _train.trainers.DataParallelTrainer.fit
_plain_policy = _train.trainers.create_scaling_policy

_WAIT_S = 0.2
"""The pause between two polls of an incomplete lease: Ray Train's loop would poll without one."""

Hold = Callable[[], Gang]
"""A function that submits the gang and returns it. The lease is held inside the `with` block of the returned gang."""


class LeasedScaling(ScalingConfig):
    """Ray Train's ScalingConfig, extended by the gang for which `fit` waits."""

    def __init__(self, hold: Hold, client: GangClient, num_workers: int | tuple[int, int], **fields: Any) -> None:
        super().__init__(num_workers=num_workers, **fields)  # type: ignore[arg-type]  # its v2 takes a pair
        self.hold, self.client, self.job_id = hold, client, ""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without `hold`: the copy in Ray Train's controller holds no lease."""
        return {name: value for name, value in self.__dict__.items() if name != "hold"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _install()  # else a `fit` here would be Ray Train's own, without a lease


def scaling(
    hold: Hold, client: GangClient, num_workers: int | tuple[int, int], resources: dict[str, float]
) -> LeasedScaling:
    """Returns the `scaling_config`. Each worker is a member of the gang. `resources` are the resources of one
    worker.
    """
    _install()
    use_gpu = resources.get("GPU", 0) > 0
    return LeasedScaling(hold, client, num_workers, use_gpu=use_gpu, resources_per_worker=dict(resources))


def _install() -> None:
    _train.trainers.DataParallelTrainer.fit = _fit
    _train.trainers.create_scaling_policy = _policy


def _fit(trainer: Any) -> Any:
    config = trainer.scaling_config
    if not isinstance(config, LeasedScaling):
        return _plain_fit(trainer)
    if not hasattr(config, "hold"):
        raise UsageError(
            "this scaling_config was made in another process, and cannot wait for a lease here.",
            hint="Call `raytide.scaling_config` in the process that calls `fit()`.",
        )
    with config.hold() as gang:
        config.job_id = gang.job_id
        return _plain_fit(trainer)


def _policy(config: ScalingConfig) -> Any:
    return LeasePolicy(config) if isinstance(config, LeasedScaling) else _plain_policy(config)


class LeasePolicy(_ScalingPolicy):  # type: ignore[misc]
    """Ray Train's scaling policy for a lease: one worker for each member. `fit` creates it, and it lives in Ray Train's
    controller.
    """

    def __init__(self, config: LeasedScaling) -> None:
        super().__init__(config)
        self._client, self._job_id = config.client, config.job_id
        self._watch: LeaseWatch | None = None

    def after_controller_start(self, train_run_context: object) -> None:
        """Starts to watch the lease. Ray Train calls this method in the controller's process, before the controller
        makes any workers.
        """
        self._watch = LeaseWatch(self._client, self._job_id)
        LeasedWorkers.policy = self
        _train.TrainController.worker_group_cls = LeasedWorkers

    async def before_controller_shutdown(self) -> None:
        self.before_controller_abort()

    def before_controller_abort(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def make_decision_for_non_running_worker_group(self) -> Any:
        members = self.members(settled_members)
        if not members:
            time.sleep(_WAIT_S)
            return _train.NoopDecision()
        return self._resize(len(members))

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: object) -> Any:
        """Returns the decision to restart with more workers if members have joined. In the first
        `elastic_resize_monitor_interval_s` seconds after a start, always returns the decision to do nothing. If a
        member leaves, Ray Train restarts by itself.
        """
        age_s = time.monotonic() - worker_group_state.start_time
        members = self.members(settled_members)
        if age_s < self.scaling_config.elastic_resize_monitor_interval_s:
            return _train.NoopDecision()
        if len(members) <= worker_group_state.num_workers:
            return _train.NoopDecision()
        return self._resize(len(members))

    def members(self, choose: Callable[[Any], list[Member]]) -> list[Member]:
        """Returns the members that the function `choose` selects from the present lease. Raises LeaseLostError if the
        lease is over.
        """
        assert self._watch is not None, "the controller has started"
        lease = self._watch.latest()
        return [] if lease is None else choose(lease)

    def _get_num_workers_for_resource_request(self) -> int:
        return 0

    def _resize(self, workers: int) -> Any:
        return _train.ResizeDecision(workers, dict(self.scaling_config.resources_per_worker))


class LeasedWorkers(_WorkerGroup):  # type: ignore[misc]
    """Places each worker in the placement group of its own member."""

    policy: ClassVar[LeasePolicy]
    """The policy of this process, which controls one run."""

    def _create_placement_group(self, scaling_config: ScalingConfig, worker_group_context: Any) -> Any:
        members = self.policy.members(ready_members)
        self._groups = [placement_group_of(member) for member in members[: worker_group_context.num_workers]]
        return LeasedGroups(self._groups, worker_group_context.num_workers)

    def _create_workers(
        self,
        num_workers: int,
        placement_group: PlacementGroup,
        resources_per_worker: dict[str, float],
        placement_group_bundle_indices: list[int] | None = None,
        starting_world_rank: int = 0,
        world_size: int | None = None,
        replica_group_size: int | None = None,
    ) -> list[Any]:
        make = super()._create_workers
        members = placement_group_bundle_indices or list(range(num_workers))
        with ThreadPoolExecutor(len(members)) as pool:  # each waits for its worker to start
            futures = [pool.submit(make, 1, self._groups[member], resources_per_worker, [0]) for member in members]
        made = [worker for future in futures if future.exception() is None for worker in future.result()]
        if len(made) < len(members):
            for worker in made:
                ray.kill(worker.actor)  # its placement group stays for the next attempt
            raise next(error for future in futures if (error := future.exception()) is not None)
        for worker, member in zip(made, members, strict=True):
            worker.placement_group_bundle_index = member
        ranked: list[Any] = self._assign_worker_ranks(made, starting_world_rank, world_size, replica_group_size)
        return ranked


class LeasedGroups(_GroupHandle):  # type: ignore[misc]
    """The members' placement groups, in the form that Ray Train expects. Ray Train does not create or remove these
    groups. The lease does.
    """

    def __init__(self, groups: Sequence[PlacementGroup], wanted: int) -> None:
        self._groups, self._wanted = groups, wanted

    @property
    def placement_group(self) -> PlacementGroup:
        return self._groups[0]

    def ready(self) -> Any:
        return ray.put(self._groups[0])

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Returns False if a member has left since Ray Train chose the number of workers. Ray Train then chooses the
        number again.
        """
        return len(self._groups) == self._wanted

    def shutdown(self) -> None:
        """Does nothing: Ray Train has already killed the workers, and the lease removes the groups."""
