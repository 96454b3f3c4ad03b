"""All dashboards: serving, training, capacity and spot, queue, cost, nodes and data."""

from raytide.core.telemetry.catalogue import (
    application,
    control,
    cost,
    gpu,
    infrastructure,
    queue,
    training,
)
from raytide.dashboards.grafana.panels import (
    Board,
    Query,
    by_labels,
    events,
    gauge,
    panel,
    rates,
    row,
    stacked,
    stat,
    values,
)
from raytide.dashboards.grafana.serving_board import SERVING
from raytide.dashboards.rules.expressions import (
    Matcher,
    OverTime,
    Rate,
    Selector,
    average_by,
    max_by,
    ratio,
    select,
    sum_by,
)

_JOB, _GPU = ("job", "team"), ("node", "gpu")


def _meter(meter: str) -> Query:
    return Query(max_by(select(infrastructure.NODE_USE, meter=meter), "node"), "{{node}}")


def _ray(metric: str, by: str) -> Query:
    """Returns the query of a metric of Ray's own agents, summed by the label `by`."""
    return Query(sum_by(Selector(metric, (Matcher("node", "=~", "$node"),)), by), by_labels(by))


TRAINING = Board(
    "raytide-training",
    "raytide / Training",
    ("job", "team"),
    (
        row(
            "Progress",
            panel("Loss", "short", gauge(training.JOB_LOSS, *_JOB)),
            panel("Step", "short", gauge(training.JOB_STEP, *_JOB)),
            panel("Tokens per second", "suffix: tok/s", gauge(training.JOB_TOKENS_PER_SECOND, *_JOB)),
        ),
        row(
            "Efficiency",
            panel(
                "Model FLOPs utilization",
                "percentunit",
                gauge(training.JOB_MFU, *_JOB),
                empty="no training on devices of known speed",
            ),
            panel("Step time", "s", gauge(training.JOB_STEP_SECONDS, *_JOB)),
            panel(
                "Waiting for data", "percentunit", gauge(training.JOB_DATA_WAIT, *_JOB), bound=0.2, empty="no training"
            ),
        ),
        row(
            "Safety",
            panel("Since the last step", "s", gauge(training.JOB_LAST_STEP_AGE, *_JOB), bound=300),
            panel(
                "Age of the last checkpoint",
                "s",
                gauge(training.JOB_CHECKPOINT_AGE, *_JOB),
                bound=7200,
                empty="no checkpoint yet",
            ),
            panel("Restarts", "short", values(training.JOB_RESTARTS, *_JOB)),
            panel(
                "Reported by the jobs themselves",
                "short",
                gauge(training.JOB_REPORT, *_JOB, "name"),
                empty="no job reports values of its own",
            ),
        ),
    ),
)

CAPACITY = Board(
    "raytide-capacity",
    "raytide / Capacity and spot",
    ("node",),
    (
        row(
            "Fleet",
            stacked("GPUs by use", "short", values(infrastructure.GPUS, "use")),
            stacked(
                "Nodes by type, market and state", "short", values(infrastructure.NODES, "type", "market", "state")
            ),
            stacked("Price", "currencyUSD", values(cost.NODE_PRICE, "type", "market"), description="Dollars an hour."),
        ),
        row(
            "Spot and launches",
            panel("Spot notices", "ops", events(infrastructure.SPOT_NOTICES, "type")),
            panel("Lost nodes", "ops", events(infrastructure.NODES_LOST, "type", "market")),
            panel(
                "Failed launches",
                "short",
                Query(
                    sum_by(Rate(select(infrastructure.LAUNCH_FAILURES), 300), "type", "zone"),
                    "per second {{type}} {{zone}}",
                    is_rare=True,
                ),
                Query(
                    max_by(select(infrastructure.POOL_FAILURES), "type", "zone"),
                    "in a row {{type}} {{zone}}",
                    is_rare=True,
                ),
                bound=3,
            ),
        ),
        row(
            "GPUs",
            panel("Utilization", "percent", gauge(gpu.GPU_UTIL, *_GPU)),
            panel("Memory used", "mbytes", gauge(gpu.FB_USED, *_GPU)),
            panel(
                "Temperature",
                "celsius",
                gauge(gpu.GPU_TEMP, *_GPU),
                Query(average_by(select(gpu.GPU_TEMP)), "mean"),
                bound=90,
            ),
            panel("Power", "watt", gauge(gpu.POWER_USAGE, *_GPU), Query(sum_by(select(gpu.POWER_USAGE)), "all")),
            panel("SM clock", "rotmhz", gauge(gpu.SM_CLOCK, *_GPU)),
            panel(
                "Memory errors",
                "short",
                Query(max_by(OverTime("increase", select(gpu.ECC_DBE), 3600), *_GPU), "double-bit {{node}} {{gpu}}"),
                Query(max_by(select(gpu.XID_ERRORS), *_GPU), "XID {{node}} {{gpu}}"),
                bound=1,
            ),
        ),
    ),
)

QUEUE = Board(
    "raytide-queue",
    "raytide / Queue",
    ("team",),
    (
        row(
            "Jobs",
            stacked("Jobs by state", "short", values(queue.JOBS, "state")),
            stacked("Jobs by team", "short", values(queue.JOBS, "team")),
            stacked("Jobs by kind", "short", values(queue.JOBS, "kind")),
            panel(
                "Waiting for nodes", "s", gauge(queue.GANG_PENDING, *_JOB), bound=1800, empty="no job waits for nodes"
            ),
            stacked("Members by state", "short", values(queue.LEASE_MEMBERS, "state")),
            stacked("GPUs by use", "short", values(infrastructure.GPUS, "use")),
        ),
        row(
            "Controller",
            panel("Duration of a tick", "s", gauge(control.TICK_SECONDS)),
            panel("Ticks", "ops", rates(control.TICKS)),
            panel(
                "Errors and quarantined records",
                "short",
                Query(sum_by(Rate(select(control.ERRORS), 300)), "failed calls per second"),
                Query(max_by(select(control.QUARANTINED), "kind"), "quarantined {{kind}}"),
            ),
        ),
    ),
)

COST = Board(
    "raytide-cost",
    "raytide / Cost",
    ("team", "endpoint"),
    (
        row(
            "Spend",
            stat("Price an hour", "currencyUSD", sum_by(select(cost.NODE_PRICE))),
            stat("Booked", "currencyUSD", sum_by(select(cost.BOOKED))),
            stat(
                "Idle GPUs",
                "percentunit",
                ratio(sum_by(select(infrastructure.GPUS, use="idle")), sum_by(select(infrastructure.GPUS))),
                bound=0.5,
            ),
            stacked("Price by type and market", "currencyUSD", values(cost.NODE_PRICE, "type", "market")),
            stacked(
                "Booked by kind",
                "currencyUSD",
                values(cost.BOOKED, "kind"),
                description="In total so far. Lost work moves from its job to waste.",
            ),
            stacked("GPUs by use", "short", values(infrastructure.GPUS, "use")),
        ),
        row(
            "Budgets and units",
            panel(
                "Budget used", "percentunit", gauge(cost.BUDGET_USED, "team"), bound=0.8, empty="no team has a budget"
            ),
            panel(
                "Budget forecast",
                "percentunit",
                gauge(cost.BUDGET_FORECAST, "team"),
                bound=1,
                empty="no team has a budget",
            ),
            panel(
                "Dollars per million tokens",
                "currencyUSD",
                gauge(cost.USD_PER_MTOKEN, "endpoint"),
                empty="no endpoint generates tokens",
            ),
            stacked("Tokens by team", "suffix: tok/s", rates(application.TOKENS, "team")),
            stacked("Tokens by endpoint", "suffix: tok/s", rates(application.TOKENS, "endpoint", "kind")),
            stacked("Power", "watt", values(infrastructure.NODE_POWER, "source")),
        ),
    ),
)

NODES = Board(
    "raytide-nodes",
    "raytide / Nodes and data",
    ("node",),
    (
        row(
            "Use",
            panel("CPU", "percentunit", _meter("cpu"), bound=0.95),
            panel("Memory", "percentunit", _meter("memory"), bound=0.95),
            panel("Disk", "percentunit", _meter("disk"), bound=0.9),
            panel("Network", "Bps", values(infrastructure.NODE_NETWORK, "node", "direction")),
            panel("Disk traffic", "Bps", values(infrastructure.NODE_DISK, "node", "direction")),
            panel("Power", "watt", values(infrastructure.NODE_POWER, "node", "source")),
        ),
        row(
            "Ray's object store",
            stacked("Memory by location", "bytes", _ray("ray_object_store_memory", "Location")),
            stacked("Used by node", "bytes", _ray("ray_object_store_used_memory", "node")),
            panel("Free disk by node", "bytes", _ray("ray_node_disk_free", "node")),
        ),
        row(
            "The cluster itself",
            panel("Pages that answer", "short", Query(sum_by(Selector("up"), "job"), "{{job}}")),
            panel("Free disk of the run folder", "bytes", gauge(infrastructure.DISK_FREE)),
            panel("Trouble", "short", gauge(control.TROUBLE, "what"), bound=1),
        ),
    ),
)

BOARDS = (SERVING, TRAINING, CAPACITY, QUEUE, COST, NODES)
