"""For each alert, samples at which it fires, and samples near them at which it does not.

Samples are written as `promtool test rules` reads them, one a minute: `0+2x9` is 0, 2 ... 18, and `1x5` is 1 six times.
"""

from __future__ import annotations

from dataclasses import dataclass

Samples = dict[str, str]


@dataclass(frozen=True, slots=True)
class AlertCase:
    alert: str
    at_min: int
    """The time at which both cases are judged, in minutes."""
    fires: Samples
    labels: dict[str, str]
    summary: str
    quiet: Samples


CHAT = {"endpoint": "chat"}
REPLICA = {"endpoint": "chat", "replica": "r1"}
PROBE = {"endpoint": "chat", "probe": "hello"}
JOB = {"job": "job-1", "team": "red"}
GPU = {"node": "node-1", "gpu": "0"}
TYPE = {"type": "l4"}
TEAM = {"team": "red"}


def text(labels: dict[str, str], **more: str) -> str:
    return ",".join(f'{label}="{value}"' for label, value in {**labels, **more}.items())


def requests(**outcomes: str) -> Samples:
    return {
        f"raytide_requests_total{{{text(CHAT, outcome=outcome, code='')}}}": values
        for outcome, values in outcomes.items()
    }


def buckets(histogram: str, labels: dict[str, str], **bounds: str) -> Samples:
    """`le_0_5` is the bucket of what is at most 0.5; `le_Inf` that of everything."""
    return {
        f"{histogram}_bucket{{{text(labels, le=bound[3:].replace('_', '.').replace('Inf', '+Inf'))}}}": values
        for bound, values in bounds.items()
    }


def one(metric: str, labels: dict[str, str], values: str, **more: str) -> Samples:
    return {f"{metric}{{{text(labels, **more)}}}": values}


def promised(missed: str, met: str) -> Samples:
    return {
        **one("raytide_slo_error_budget_ratio", CHAT, "0.01x500"),
        **one("raytide_slo_requests_total", CHAT, missed, met="false"),
        **one("raytide_slo_requests_total", CHAT, met, met="true"),
    }


FIRST_TOKEN, INTER_TOKEN = "raytide_time_to_first_token_seconds", "raytide_inter_token_seconds"
SLO = one("raytide_slo_first_token_seconds", CHAT, "0.5x30")

CLIENT = (
    AlertCase(
        "UserThumbsDownRatioHigh",
        70,
        {
            **one("raytide_feedback_total", CHAT, "0+1x90", thumb="up"),
            **one("raytide_feedback_total", CHAT, "0+1x90", thumb="down"),
        },
        CHAT,
        "50% of the last hour's feedback on chat is negative",
        {
            **one("raytide_feedback_total", CHAT, "0x60 1x30", thumb="up"),
            **one("raytide_feedback_total", CHAT, "0x60 2x30", thumb="down"),
        },
    ),
    AlertCase(
        "SyntheticProbeFailing",
        10,
        one("raytide_probe_success", PROBE, "1x5 0x10"),
        PROBE,
        "The probe hello of chat gets no answer",
        one("raytide_probe_success", PROBE, "1x5 0 1 0 1 0 1x10"),
    ),
    AlertCase(
        "SyntheticAnswerWrong",
        10,
        {**one("raytide_probe_success", PROBE, "1x20"), **one("raytide_probe_answer_right", PROBE, "1x5 0x20")},
        PROBE,
        "The probe hello of chat gets a wrong answer",
        {**one("raytide_probe_success", PROBE, "0x20"), **one("raytide_probe_answer_right", PROBE, "0x20")},
    ),
    AlertCase(
        "SyntheticLatencyHigh",
        40,
        buckets("raytide_probe_seconds", PROBE, le_10="0+1x60", le_30="0+2x60", le_Inf="0+2x60"),
        PROBE,
        "One in ten answers to the probe hello of chat takes 26s or more",
        buckets("raytide_probe_seconds", PROBE, le_10="0+2x60", le_30="0+2x60", le_Inf="0+2x60"),
    ),
)

APPLICATION = (
    AlertCase(
        "ErrorBudgetBurnFast",
        90,
        promised(missed="0+2x120", met="0+8x120"),
        CHAT,
        "chat misses its promised first token 20 times as often as it may: a month's budget lasts two days",
        promised(missed="0+2x60 120x60", met="0+8x120"),
    ),
    AlertCase(
        "ErrorBudgetBurnSlow",
        400,
        promised(missed="0+2x450", met="0+23x450"),
        CHAT,
        "chat has missed its promised first token 8 times as often as it may for hours",
        promised(missed="0+1x450", met="0+19x450"),
    ),
    AlertCase(
        "Http5xxHigh",
        10,
        requests(error="0+1x20", ok="0+9x20"),
        CHAT,
        "10% of the requests of chat fail with a server error",
        requests(error="0x20", invalid="0+9x20", ok="0+1x20"),
    ),
    AlertCase(
        "TtftP99AboveSlo",
        20,
        {**SLO, **buckets(FIRST_TOKEN, CHAT, le_0_5="0+90x30", le_1="0+100x30", le_Inf="0+100x30")},
        CHAT,
        "One in a hundred requests of chat waits 950ms or more for its first token",
        {**SLO, **buckets(FIRST_TOKEN, CHAT, le_0_5="0+100x30", le_1="0+100x30", le_Inf="0+100x30")},
    ),
    AlertCase(
        "TpotP99High",
        20,
        buckets(INTER_TOKEN, CHAT, le_0_5="0+90x30", le_1="0+100x30", le_Inf="0+100x30"),
        CHAT,
        "One in a hundred tokens of chat takes 950ms or more",
        buckets(INTER_TOKEN, CHAT, le_0_5="0+100x30", le_1="0+100x30", le_Inf="0+100x30"),
    ),
    AlertCase(
        "QueueTimeHigh",
        20,
        buckets("raytide_queue_seconds", CHAT, le_5="0+80x30", le_10="0+100x30", le_Inf="0+100x30"),
        CHAT,
        "One in ten requests of chat waits 7.5s or more in its engine's queue",
        buckets("raytide_queue_seconds", CHAT, le_5="0+95x30", le_10="0+100x30", le_Inf="0+100x30"),
    ),
    AlertCase(
        "AdmissionRejectionsHigh",
        10,
        requests(rejected="0+1x20", ok="0+9x20"),
        CHAT,
        "chat rejects 10% of its requests for lack of capacity",
        requests(rejected="0+1x20", ok="0+99x20"),
    ),
    AlertCase(
        "RateLimited429Surge",
        20,
        one("raytide_rate_limited_total", TEAM, "0+120x30", limit="requests"),
        TEAM,
        "2 requests of team red are refused each second by a limit",
        one("raytide_rate_limited_total", TEAM, "0+30x30", limit="requests"),
    ),
    AlertCase(
        "ClientAbortsHigh",
        30,
        requests(aborted="0+3x40", ok="0+7x40"),
        CHAT,
        "Clients of chat give up on 30% of their requests",
        requests(aborted="0+1x40", ok="0+9x40"),
    ),
    AlertCase(
        "NoHealthyReplicas",
        15,
        {**one("raytide_replicas_ready", CHAT, "1x5 0x20"), **one("raytide_replicas_target", CHAT, "1x30")},
        CHAT,
        "chat has no ready replica, and should have one",
        {**one("raytide_replicas_ready", CHAT, "0x30"), **one("raytide_replicas_target", CHAT, "0x30")},
    ),
    AlertCase(
        "ReplicaUnreachable",
        8,
        one("up", REPLICA, "1x5 0x10", job="raytide-replica", instance="10.0.0.1:7"),
        REPLICA,
        "Replica r1 of chat does not answer: it hangs, or its node is cut off",
        {
            **one("up", REPLICA, "1x20", job="raytide-replica", instance="10.0.0.1:7"),
            **one("up", {}, "0x20", job="raytide-gateway", instance="10.0.0.1:8"),
        },
    ),
    AlertCase(
        "ReplicaFlapping",
        9,
        one("raytide_replica_restarts_total", CHAT, "0+1x5 5x5"),
        CHAT,
        "Replicas of chat ended 5 times in half an hour without being asked to",
        one("raytide_replica_restarts_total", CHAT, "0+1x2 2x8"),
    ),
    AlertCase(
        "ScaleUpThrashing",
        13,
        one("raytide_replicas_target", CHAT, "1 2 1 2 1 2 1 2 1 2 1 2 1 2"),
        CHAT,
        "The target number of replicas of chat changed 13 times in half an hour",
        one("raytide_replicas_target", CHAT, "1+1x9 10x9"),
    ),
)

MODEL = (
    AlertCase(
        "ReplicaStalled",
        10,
        {
            **one("raytide_requests_running", REPLICA, "3x20", revision="1"),
            **one("raytide_steps_total", REPLICA, "0+100x5 500x20", revision="1"),
        },
        REPLICA,
        "Replica r1 of chat holds 3 requests and has computed no step for two minutes",
        {
            **one("raytide_requests_running", REPLICA, "0x20", revision="1"),
            **one("raytide_steps_total", REPLICA, "500x20", revision="1"),
        },
    ),
    AlertCase(
        "EngineFailing",
        6,
        one("raytide_engine_failures_total", REPLICA, "0x3 1x5"),
        REPLICA,
        "Engine steps of replica r1 of chat failed in the last ten minutes",
        one("raytide_engine_failures_total", REPLICA, "4x10"),
    ),
    AlertCase(
        "KvCacheNearlyFull",
        7,
        one("raytide_kv_use_ratio", REPLICA, "0.97x10"),
        REPLICA,
        "The KV cache of replica r1 of chat is 97% full",
        one("raytide_kv_use_ratio", REPLICA, "0.97x3 0.5x1 0.97x10"),
    ),
    AlertCase(
        "PreemptionsHigh",
        30,
        {**one("raytide_preemptions_total", REPLICA, "0+2x40"), **requests(ok="0+10x40")},
        CHAT,
        "chat preempts 20% of its requests for lack of KV blocks",
        {**one("raytide_preemptions_total", REPLICA, "0+2x40"), **requests(ok="0+100x40")},
    ),
    AlertCase(
        "SpecDecodeAcceptanceLow",
        65,
        {
            **one("raytide_draft_tokens_total", REPLICA, "0+120x70", source="ngram"),
            **one("raytide_accepted_tokens_total", REPLICA, "0+12x70", source="ngram"),
        },
        CHAT,
        "chat accepts 10% of the tokens that are guessed ahead",
        {
            **one("raytide_draft_tokens_total", REPLICA, "0+120x70", source="ngram"),
            **one("raytide_accepted_tokens_total", REPLICA, "0+36x70", source="ngram"),
        },
    ),
    AlertCase(
        "PrefixHitRateCollapsed",
        1490,
        {
            **one("raytide_prompt_tokens_total", REPLICA, "0+100x1500"),
            **one("raytide_cached_tokens_total", REPLICA, "0+60x1440 86400x60"),
        },
        CHAT,
        "chat finds 0% of the prefixes in its cache that it found over the last day",
        {
            **one("raytide_prompt_tokens_total", REPLICA, "0+100x1500"),
            **one("raytide_cached_tokens_total", REPLICA, "0+10x1440 14400x60"),
        },
    ),
    AlertCase(
        "ContextOverflowErrorsHigh",
        30,
        {
            **one("raytide_requests_total", CHAT, "0+2x40", outcome="invalid", code="context_length_exceeded"),
            **requests(ok="0+8x40"),
        },
        CHAT,
        "20% of the requests of chat exceed its context",
        {
            **one("raytide_requests_total", CHAT, "0+2x40", outcome="invalid", code="invalid_value"),
            **requests(ok="0+8x40"),
        },
    ),
    AlertCase(
        "StopReasonLengthSurge",
        70,
        {
            **one("raytide_finished_total", CHAT, "0+6x80", reason="length"),
            **one("raytide_finished_total", CHAT, "0+4x80", reason="stop"),
        },
        CHAT,
        "60% of the answers of chat end at their length limit",
        {
            **one("raytide_finished_total", CHAT, "0+3x80", reason="length"),
            **one("raytide_finished_total", CHAT, "0+7x80", reason="stop"),
        },
    ),
    AlertCase(
        "PerplexityDrift",
        1500,
        one("raytide_served_perplexity", CHAT, "5x1400 10x130", revision="2"),
        CHAT,
        "The perplexity of chat's answers is 1.87 times that of the last day",
        one("raytide_served_perplexity", CHAT, "5x1400 6x130", revision="2"),
    ),
)

TRAINING = (
    AlertCase(
        "TrainingStalled",
        15,
        {
            **one("raytide_job_last_step_age_seconds", JOB, "0x5 60+60x20"),
            **one("raytide_job_step_seconds", JOB, "2x30"),
        },
        JOB,
        "job-1 has made no step for 10m 0s, ten times as long as a step takes",
        {
            **one("raytide_job_last_step_age_seconds", JOB, "0x5 60+60x20"),
            **one("raytide_job_step_seconds", JOB, "120x30"),
        },
    ),
    AlertCase(
        "LossNaN",
        3,
        one("raytide_job_loss_finite", JOB, "1 1 0 0"),
        JOB,
        "The loss of job-1 is NaN or infinite",
        one("raytide_job_loss_finite", JOB, "1 0 1 1"),
    ),
    AlertCase(
        "LossSpike",
        64,
        one("raytide_job_loss", JOB, "2x60 9x5"),
        JOB,
        "The loss of job-1 is 3.66 times its mean of the last hour",
        one("raytide_job_loss", JOB, "2x62 9x0 2x5"),
    ),
    AlertCase(
        "MfuDropped",
        400,
        one("raytide_job_mfu_ratio", JOB, "0.4x360 0.2x60"),
        JOB,
        "job-1 computes at 52.93% of its usual efficiency",
        one("raytide_job_mfu_ratio", JOB, "0.4x360 0.35x60"),
    ),
    AlertCase(
        "CheckpointStale",
        2,
        one("raytide_job_checkpoint_age_seconds", JOB, "7300x3"),
        JOB,
        "The last checkpoint of job-1 is 2h 1m 40s old",
        one("raytide_job_checkpoint_age_seconds", JOB, "7100x3"),
    ),
    AlertCase(
        "RestartLoop",
        9,
        one("raytide_job_restarts_total", JOB, "0+1x5 5x5"),
        JOB,
        "job-1 restarted 5 times in an hour",
        one("raytide_job_restarts_total", JOB, "7x10"),
    ),
    AlertCase(
        "DataStarvation",
        15,
        one("raytide_job_data_wait_ratio", JOB, "0.4x30"),
        JOB,
        "job-1 waits 40% of its time for data",
        one("raytide_job_data_wait_ratio", JOB, "0.4x5 0.1x30"),
    ),
    AlertCase(
        "GangPendingTooLong",
        2,
        one("raytide_gang_pending_seconds", JOB, "1900x3"),
        JOB,
        "job-1 of team red has waited 31m 40s for its nodes",
        one("raytide_gang_pending_seconds", JOB, "1700x3"),
    ),
)
