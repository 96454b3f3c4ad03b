"""Alert rules on training jobs, and on gangs that wait."""

from functools import partial

from raytide.core.telemetry.catalogue import queue, training
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.expressions import (
    Arithmetic,
    Condition,
    OverTime,
    SetOperation,
    max_by,
    ratio,
    select,
    sum_by,
)

_JOB = ("job", "team")
_LOSS = max_by(select(training.JOB_LOSS), *_JOB)
_STEP_AGE = max_by(select(training.JOB_LAST_STEP_AGE), *_JOB)
_STEP_SECONDS = max_by(select(training.JOB_STEP_SECONDS), *_JOB)

_rule = partial(AlertRule, layer="training")

ALERTS = (
    _rule(
        "TrainingStalled",
        "critical",
        SetOperation(
            Condition(_STEP_AGE, ">", 300), "and", Condition(_STEP_AGE, ">", Arithmetic(_STEP_SECONDS, "*", 10))
        ),
        60,
        "{job} has made no step for {value:seconds}, ten times as long as a step takes",
        "A member hangs, or waits for data or storage: `raytide logs` shows each rank's last lines.",
    ),
    _rule(
        "LossNaN",
        "critical",
        Condition(max_by(select(training.JOB_LOSS_FINITE), *_JOB), "==", 0),
        0,
        "The loss of {job} is NaN or infinite",
        "Stop it, lower the learning rate, and start again from a checkpoint before it.",
    ),
    _rule(
        "LossSpike",
        "warning",
        Condition(ratio(_LOSS, max_by(OverTime("avg", select(training.JOB_LOSS), 3600), *_JOB)), ">", 2),
        120,
        "The loss of {job} is {value} times its mean of the last hour",
        "If it does not come back: skip the data it saw then, lower the learning rate, or clip gradients.",
    ),
    _rule(
        "MfuDropped",
        "warning",
        Condition(
            ratio(
                max_by(OverTime("avg", select(training.JOB_MFU), 600), *_JOB),
                max_by(OverTime("avg", select(training.JOB_MFU), 6 * 3600), *_JOB),
            ),
            "<",
            0.7,
        ),
        600,
        "{job} computes at {value:percent} of its usual efficiency",
        "A slow node holds up the others: compare the clocks and temperatures of its GPUs.",
    ),
    _rule(
        "CheckpointStale",
        "warning",
        Condition(max_by(select(training.JOB_CHECKPOINT_AGE), *_JOB), ">", 7200),
        0,
        "The last checkpoint of {job} is {value:seconds} old",
        "Is its storage full or slow? A lost node would cost all work since.",
    ),
    _rule(
        "RestartLoop",
        "warning",
        Condition(sum_by(OverTime("increase", select(training.JOB_RESTARTS), 3600), *_JOB), ">", 3),
        0,
        "{job} restarted {value} times in an hour",
        "`raytide logs` shows the error it ends with; lost spot nodes do not count as restarts.",
    ),
    _rule(
        "DataStarvation",
        "warning",
        Condition(max_by(select(training.JOB_DATA_WAIT), *_JOB), ">", 0.2),
        600,
        "{job} waits {value:percent} of its time for data",
        "Give it more loader workers, larger shards, or a dataset nearer to its nodes.",
    ),
    _rule(
        "GangPendingTooLong",
        "warning",
        Condition(max_by(select(queue.GANG_PENDING), *_JOB), ">", 1800),
        0,
        "{job} of team {team} has waited {value:seconds} for its nodes",
        "`raytide why JOB` says what it waits for: quota, budget, capacity or its place in the queue.",
    ),
    _rule(
        "CheckpointWriteFailing",
        "critical",
        Condition(max_by(select(training.JOB_CHECKPOINT_FAILING), *_JOB), ">", 0),
        0,
        "The last checkpoint of {job} could not be written",
        "The run's events have the error: a full disk, permissions, an unreachable store. Older ones are intact.",
    ),
    _rule(
        "StragglerRank",
        "warning",
        Condition(max_by(select(training.JOB_STRAGGLER), *_JOB, "rank"), ">", 1.5),
        600,
        "Rank {rank} of {job} needs {value} times as long as the others for its own part of a step",
        "All ranks wait for it: compare its node's clocks, temperature, data and other work; replace the node.",
    ),
)
