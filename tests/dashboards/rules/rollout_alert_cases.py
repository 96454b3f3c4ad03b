"""The cases of alerts about rollouts, batches, adapters and the ranks of a training; see alert_cases."""

from tests.dashboards.rules.alert_cases import CHAT, JOB, AlertCase, Samples, one

CANARY = {"endpoint": "chat", "criterion": "errors"}
BATCH = {"batch": "batch_1", "team": "red"}


def shadowed(other: str, equal: str) -> Samples:
    return {
        **one("raytide_shadow_answers_total", CHAT, other, equal="false"),
        **one("raytide_shadow_answers_total", CHAT, equal, equal="true"),
    }


def batch(left: str, done: str) -> Samples:
    return {**one("raytide_batch_left_seconds", BATCH, left), **one("raytide_batch_done_ratio", BATCH, done)}


ROLLOUTS = (
    AlertCase(
        "CanaryRegression",
        3,
        one("raytide_canary_regression_ratio", CANARY, "_ _ 0.125x3"),
        CANARY,
        "The canary of chat was rolled back: its errors exceed the champion's by 12.5%",
        one("raytide_canary_regression_ratio", CANARY, "0.125x1 stale _x3"),
    ),
    AlertCase(
        "ShadowDivergenceHigh",
        70,
        shadowed(other="0+3x80", equal="0+7x80"),
        CHAT,
        "30% of the shadowed answers of chat differ from the champion's",
        shadowed(other="0+1x80", equal="0+9x80"),
    ),
    AlertCase(
        "BatchJobExpiringSoon",
        10,
        batch("9600-60x20", "0.5x20"),
        BATCH,
        "The batch batch_1 of team red expires in 2h 30m 0s, and is not done",
        batch("9600-60x20", "0.5x5 1x20"),
    ),
    AlertCase(
        "LoraLoadFailing",
        10,
        one("raytide_adapters", CHAT, "2x20", state="failed"),
        CHAT,
        "2 adapters on the replicas of chat cannot be loaded",
        {
            **one("raytide_adapters", CHAT, "0x2 1x2 0x20", state="failed"),
            **one("raytide_adapters", CHAT, "2x20", state="loading"),
        },
    ),
    AlertCase(
        "CheckpointWriteFailing",
        3,
        one("raytide_job_checkpoint_failing", JOB, "0 0 1 1"),
        JOB,
        "The last checkpoint of job-1 could not be written",
        one("raytide_job_checkpoint_failing", JOB, "1 1 0 0"),
    ),
    AlertCase(
        "StragglerRank",
        15,
        one("raytide_job_straggler_ratio", JOB, "1.8x20", rank="3"),
        {**JOB, "rank": "3"},
        "Rank 3 of job-1 needs 1.8 times as long as the others for its own part of a step",
        {
            **one("raytide_job_straggler_ratio", JOB, "1.8x8 _x12", rank="3"),
            **one("raytide_job_straggler_ratio", JOB, "_x8 1.8x12", rank="1"),
        },
    ),
)
