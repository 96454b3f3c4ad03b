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
from raytide.dashboards.grafana.panels import Board, Panel, Query, by_labels, events, gauge, rates, stat, values
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
    """Returns a metric of Ray's own agents."""
    return Query(sum_by(Selector(metric, (Matcher("node", "=~", "$node"),)), by), by_labels(by))


TRAINING = Board(
    "raytide-training",
    "raytide / Training",
    ("job", "team"),
    (
        (
            "Progress",
            (
                Panel("Loss", "short", (gauge(training.JOB_LOSS, *_JOB),)),
                Panel("Step", "short", (gauge(training.JOB_STEP, *_JOB),)),
                Panel("Tokens per second", "suffix: tok/s", (gauge(training.JOB_TOKENS_PER_SECOND, *_JOB),)),
            ),
        ),
        (
            "Efficiency",
            (
                Panel(
                    "Model FLOPs utilization",
                    "percentunit",
                    (gauge(training.JOB_MFU, *_JOB),),
                    empty="no training on devices of known speed",
                ),
                Panel("Step time", "s", (gauge(training.JOB_STEP_SECONDS, *_JOB),)),
                Panel(
                    "Waiting for data",
                    "percentunit",
                    (gauge(training.JOB_DATA_WAIT, *_JOB),),
                    bound=0.2,
                    empty="no training",
                ),
            ),
        ),
        (
            "Safety",
            (
                Panel("Since the last step", "s", (gauge(training.JOB_LAST_STEP_AGE, *_JOB),), bound=300),
                Panel(
                    "Age of the last checkpoint",
                    "s",
                    (gauge(training.JOB_CHECKPOINT_AGE, *_JOB),),
                    bound=7200,
                    empty="no checkpoint yet",
                ),
                Panel("Restarts", "short", (gauge(training.JOB_RESTARTS, *_JOB),)),
                Panel(
                    "Reported by the jobs themselves",
                    "short",
                    (gauge(training.JOB_REPORT, *_JOB, "name"),),
                    empty="no job reports values of its own",
                ),
            ),
        ),
    ),
)

CAPACITY = Board(
    "raytide-capacity",
    "raytide / Capacity and spot",
    ("node",),
    (
        (
            "Fleet",
            (
                Panel("GPUs by use", "short", (values(infrastructure.GPUS, "use"),), is_stacked=True),
                Panel(
                    "Nodes by type, market and state",
                    "short",
                    (values(infrastructure.NODES, "type", "market", "state"),),
                    is_stacked=True,
                ),
                Panel(
                    "Price",
                    "currencyUSD",
                    (values(cost.NODE_PRICE, "type", "market"),),
                    is_stacked=True,
                    description="Dollars an hour.",
                ),
            ),
        ),
        (
            "Spot and launches",
            (
                Panel("Spot notices", "ops", (events(infrastructure.SPOT_NOTICES, "type"),)),
                Panel("Lost nodes", "ops", (events(infrastructure.NODES_LOST, "type", "market"),)),
                Panel(
                    "Failed launches",
                    "short",
                    (
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
                    ),
                    bound=3,
                ),
            ),
        ),
        (
            "GPUs",
            (
                Panel("Utilization", "percent", (gauge(gpu.GPU_UTIL, *_GPU),)),
                Panel("Memory used", "mbytes", (gauge(gpu.FB_USED, *_GPU),)),
                Panel(
                    "Temperature",
                    "celsius",
                    (
                        gauge(gpu.GPU_TEMP, *_GPU),
                        Query(average_by(select(gpu.GPU_TEMP)), "mean"),
                    ),
                    bound=90,
                ),
                Panel("Power", "watt", (gauge(gpu.POWER_USAGE, *_GPU), Query(sum_by(select(gpu.POWER_USAGE)), "all"))),
                Panel("SM clock", "rotmhz", (gauge(gpu.SM_CLOCK, *_GPU),)),
                Panel(
                    "Memory errors",
                    "short",
                    (
                        Query(
                            max_by(OverTime("increase", select(gpu.ECC_DBE), 3600), *_GPU),
                            "double-bit {{node}} {{gpu}}",
                        ),
                        Query(max_by(select(gpu.XID_ERRORS), *_GPU), "XID {{node}} {{gpu}}"),
                    ),
                    bound=1,
                ),
            ),
        ),
    ),
)

QUEUE = Board(
    "raytide-queue",
    "raytide / Queue",
    ("team",),
    (
        (
            "Jobs",
            (
                Panel("Jobs by state", "short", (values(queue.JOBS, "state"),), is_stacked=True),
                Panel("Jobs by team", "short", (values(queue.JOBS, "team"),), is_stacked=True),
                Panel("Jobs by kind", "short", (values(queue.JOBS, "kind"),), is_stacked=True),
                Panel(
                    "Waiting for nodes",
                    "s",
                    (gauge(queue.GANG_PENDING, *_JOB),),
                    bound=1800,
                    empty="no job waits for nodes",
                ),
                Panel("Members by state", "short", (values(queue.LEASE_MEMBERS, "state"),), is_stacked=True),
                Panel("GPUs by use", "short", (values(infrastructure.GPUS, "use"),), is_stacked=True),
            ),
        ),
        (
            "Controller",
            (
                Panel("Duration of a tick", "s", (gauge(control.TICK_SECONDS),)),
                Panel("Ticks", "ops", (rates(control.TICKS),)),
                Panel(
                    "Errors and quarantined records",
                    "short",
                    (
                        Query(sum_by(Rate(select(control.ERRORS), 300)), "failed calls per second"),
                        Query(max_by(select(control.QUARANTINED), "kind"), "quarantined {{kind}}"),
                    ),
                ),
            ),
        ),
    ),
)

COST = Board(
    "raytide-cost",
    "raytide / Cost",
    ("team", "endpoint"),
    (
        (
            "Spend",
            (
                stat("Price an hour", "currencyUSD", sum_by(select(cost.NODE_PRICE))),
                stat("Booked", "currencyUSD", sum_by(select(cost.BOOKED))),
                stat(
                    "Idle GPUs",
                    "percentunit",
                    ratio(sum_by(select(infrastructure.GPUS, use="idle")), sum_by(select(infrastructure.GPUS))),
                    bound=0.5,
                ),
                Panel(
                    "Price by type and market",
                    "currencyUSD",
                    (values(cost.NODE_PRICE, "type", "market"),),
                    is_stacked=True,
                ),
                Panel(
                    "Booked by kind",
                    "currencyUSD",
                    (Query(sum_by(OverTime("increase", select(cost.BOOKED), 300), "kind"), "{{kind}}"),),
                    is_stacked=True,
                ),
                Panel("GPUs by use", "short", (values(infrastructure.GPUS, "use"),), is_stacked=True),
            ),
        ),
        (
            "Budgets and units",
            (
                Panel(
                    "Budget used",
                    "percentunit",
                    (gauge(cost.BUDGET_USED, "team"),),
                    bound=0.8,
                    empty="no team has a budget",
                ),
                Panel(
                    "Budget forecast",
                    "percentunit",
                    (gauge(cost.BUDGET_FORECAST, "team"),),
                    bound=1,
                    empty="no team has a budget",
                ),
                Panel(
                    "Dollars per million tokens",
                    "currencyUSD",
                    (gauge(cost.USD_PER_MTOKEN, "endpoint"),),
                    empty="no endpoint generates tokens",
                ),
                Panel("Tokens by team", "suffix: tok/s", (rates(application.TOKENS, "team"),), is_stacked=True),
                Panel(
                    "Tokens by endpoint",
                    "suffix: tok/s",
                    (rates(application.TOKENS, "endpoint", "kind"),),
                    is_stacked=True,
                ),
                Panel("Power", "watt", (values(infrastructure.NODE_POWER, "source"),), is_stacked=True),
            ),
        ),
    ),
)

NODES = Board(
    "raytide-nodes",
    "raytide / Nodes and data",
    ("node",),
    (
        (
            "Use",
            (
                Panel("CPU", "percentunit", (_meter("cpu"),), bound=0.95),
                Panel("Memory", "percentunit", (_meter("memory"),), bound=0.95),
                Panel("Disk", "percentunit", (_meter("disk"),), bound=0.9),
                Panel("Network", "Bps", (values(infrastructure.NODE_NETWORK, "node", "direction"),)),
                Panel("Disk traffic", "Bps", (values(infrastructure.NODE_DISK, "node", "direction"),)),
                Panel("Power", "watt", (values(infrastructure.NODE_POWER, "node", "source"),)),
            ),
        ),
        (
            "Ray's object store",
            (
                Panel("Memory by location", "bytes", (_ray("ray_object_store_memory", "Location"),), is_stacked=True),
                Panel("Used by node", "bytes", (_ray("ray_object_store_used_memory", "node"),), is_stacked=True),
                Panel("Free disk by node", "bytes", (_ray("ray_node_disk_free", "node"),)),
            ),
        ),
        (
            "The cluster itself",
            (
                Panel("Pages that answer", "short", (Query(sum_by(Selector("up"), "job"), "{{job}}"),)),
                Panel("Free disk of the run folder", "bytes", (gauge(infrastructure.DISK_FREE),)),
                Panel("Trouble", "short", (gauge(control.TROUBLE, "what"),), bound=1),
            ),
        ),
    ),
)

BOARDS = (SERVING, TRAINING, CAPACITY, QUEUE, COST, NODES)
