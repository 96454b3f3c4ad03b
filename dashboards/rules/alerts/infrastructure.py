"""Alert rules on nodes, GPUs, spot markets and launches."""

from functools import partial

from raytide.core.telemetry.catalogue import gpu, infrastructure, ray
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.expressions import (
    Aggregation,
    Arithmetic,
    Condition,
    OverTime,
    PredictLinear,
    SetOperation,
    max_by,
    ratio,
    select,
    sum_by,
)

_GPU = ("node", "gpu")
_CLOCK = max_by(select(gpu.SM_CLOCK), *_GPU)
_NVLINKS = max_by(select(gpu.NVLINKS), *_GPU)
_SKEW = max_by(select(infrastructure.NODE_CLOCK_SKEW), "node")
_EVICTED = ("node", "Name")
_EVICTIONS = select(ray.WORKER_EVICTIONS)
_EVICTED_NOW = max_by(_EVICTIONS, *_EVICTED)
_IS_NEW = Condition(
    sum_by(OverTime("count", _EVICTIONS, 3600), *_EVICTED),
    "==",
    sum_by(OverTime("count", _EVICTIONS, 600), *_EVICTED),
)
"""All values of a counter are of the last minutes. Ray's begin at their first count, which an increase does not see."""

_FREE_GPUS = SetOperation(
    sum_by(select(infrastructure.GPUS, use=("idle", "starting"))),
    "or",
    Arithmetic(sum_by(select(infrastructure.GPUS)), "*", 0),
)
"""The number of free GPUs: 0 if no series exists, as all are held."""

_rule = partial(AlertRule, layer="infrastructure")

ALERTS = (
    _rule(
        "GpuEccUncorrectable",
        "critical",
        SetOperation(
            Condition(max_by(OverTime("increase", select(gpu.ECC_DBE), 3600), *_GPU), ">", 0),
            "or",
            Condition(max_by(OverTime("increase", select(gpu.UNCORRECTABLE_REMAPPED_ROWS), 3600), *_GPU), ">", 0),
        ),
        0,
        "GPU {gpu} of {node} had uncorrectable memory errors in the last hour",
        "Results may be wrong: drain the node, and have the GPU replaced if it happens again after a reset.",
        "quarantine_node",
    ),
    _rule(
        "GpuRowRemapFailure",
        "critical",
        Condition(max_by(select(gpu.ROW_REMAP_FAILURE), *_GPU), ">", 0),
        0,
        "GPU {gpu} of {node} cannot remap a bad memory row",
        "The GPU must be replaced: quarantine the node.",
        "quarantine_node",
    ),
    _rule(
        "GpuXidError",
        "warning",
        Condition(max_by(select(gpu.XID_ERRORS), *_GPU), ">", 0),
        0,
        "GPU {gpu} of {node} reports XID error {value}",
        "NVIDIA's list of XID errors says whether the application, the driver or the GPU is at fault; replace the node "
        "if it is the GPU.",
        "replace_node",
    ),
    _rule(
        "GpuOverTemp",
        "warning",
        Condition(max_by(select(gpu.GPU_TEMP), *_GPU), ">", 90),
        300,
        "GPU {gpu} of {node} has {value} degrees Celsius",
        "It will slow down or switch itself off: check its cooling, move its work.",
        "replace_node",
    ),
    _rule(
        "HostOutOfMemory",
        "warning",
        Condition(max_by(select(infrastructure.NODE_USE, meter="memory"), "node"), ">", 0.95),
        300,
        "{node} uses {value:percent} of its memory",
        "Ray kills workers when it runs out: give the job more memory for each member, or fewer workers.",
    ),
    _rule(
        "HostOutOfDiskSpace",
        "critical",
        Condition(max_by(select(infrastructure.NODE_USE, meter="disk"), "node"), ">", 0.9),
        300,
        "The disk of {node} is {value:percent} full",
        "Remove old runs and model caches, or use a node type with a larger disk.",
    ),
    _rule(
        "HostDiskMayFillIn24Hours",
        "warning",
        Condition(
            max_by(PredictLinear(select(infrastructure.NODE_USE, meter="disk"), 6 * 3600, 86400), "node"), ">", 1
        ),
        1800,
        "The disk of {node} will be full within a day at the rate of the last six hours",
        "Find what grows: checkpoints, datasets, logs or spilled objects.",
    ),
    _rule(
        "NodeLost",
        "warning",
        Condition(sum_by(OverTime("increase", select(infrastructure.NODES_LOST), 600), "type", "market"), ">", 0),
        0,
        "A {market} node of type {type} was lost",
        "Spot nodes end; an on-demand node should not: `raytide nodes` and the provider's console say why.",
    ),
    _rule(
        "SpotInterruptionNotice",
        "info",
        Condition(sum_by(OverTime("increase", select(infrastructure.SPOT_NOTICES), 300), "type"), ">", 0),
        0,
        "The provider takes back a spot node of type {type}",
        "Nothing: its work moves. Jobs that cannot bear it should run on demand.",
    ),
    _rule(
        "SpotPreemptionRateHigh",
        "warning",
        Condition(sum_by(OverTime("increase", select(infrastructure.NODES_LOST, market="spot"), 3600), "type"), ">", 5),
        0,
        "{value} spot nodes of type {type} were lost in an hour",
        "Allow other types or zones, or run on demand until the market is calm.",
    ),
    _rule(
        "ScaleUpFailing",
        "warning",
        Condition(max_by(select(infrastructure.POOL_FAILURES), "type", "zone"), ">=", 3),
        300,
        "The last {value} launches of {type} in {zone} failed",
        "Quota, capacity or credentials: `raytide autoscaler explain` has the provider's answer.",
    ),
    _rule(
        "DrainTimeoutExceeded",
        "warning",
        Condition(sum_by(select(infrastructure.NODES, state="draining"), "type", "market"), ">", 0),
        3600,
        "Nodes of type {type} have been draining for an hour",
        "`raytide nodes` names them and what still runs there.",
    ),
    _rule(
        "GpuThrottling",
        "warning",
        SetOperation(
            Condition(ratio(_CLOCK, max_by(OverTime("max", select(gpu.SM_CLOCK), 86400), *_GPU)), "<", 0.7),
            "and",
            Condition(max_by(select(gpu.GPU_UTIL), *_GPU), ">", 80),
        ),
        600,
        "GPU {gpu} of {node} works at {value:percent} of its clock under load",
        "Heat or a power limit: compare its temperature and power with its neighbours'.",
    ),
    _rule(
        "GpuIdleAllocated",
        "warning",
        Condition(
            Aggregation("count", Condition(max_by(OverTime("avg", select(gpu.GPU_UTIL), 1800), *_GPU), "<", 5)),
            ">",
            _FREE_GPUS,
        ),
        600,
        "{value} GPUs did nothing for half an hour, more than are free",
        "A job or replica holds GPUs that it does not use: see the nodes' use and `raytide ps`.",
    ),
    _rule(
        "HostHighCpuLoad",
        "info",
        Condition(max_by(OverTime("avg", select(infrastructure.NODE_USE, meter="cpu"), 900), "node"), ">", 0.95),
        900,
        "{node} has used {value:percent} of its CPUs for half an hour",
        "If GPUs there wait for data, the node type has too few CPUs for them.",
    ),
    _rule(
        "NvlinkDegraded",
        "warning",
        SetOperation(
            Condition(_NVLINKS, "<", max_by(OverTime("max", select(gpu.NVLINKS), 86400), *_GPU)),
            "or",
            Condition(max_by(OverTime("increase", select(gpu.NVLINK_RECOVERY_ERRORS), 3600), *_GPU), ">", 0),
        ),
        0,
        "GPU {gpu} of {node} lost an NVLink in the last day, or one had to recover in the last hour",
        "Collectives there are slow or fail: `nvidia-smi nvlink -s` shows it; reset the GPU, or replace the node.",
        "replace_node",
    ),
    _rule(
        "HostClockSkew",
        "warning",
        SetOperation(Condition(_SKEW, ">", 2), "or", Condition(_SKEW, "<", -2)),
        300,
        "The clock of {node} differs from the controller's by {value} seconds",
        "Start its time service (chrony, systemd-timesyncd): signatures, tokens and deadlines depend on it.",
    ),
    _rule(
        "HostOomKillDetected",
        "warning",
        Condition(max_by(OverTime("increase", select(infrastructure.NODE_OOM_KILLS), 1800), "node"), ">", 0),
        0,
        "The kernel of {node} ended processes for lack of memory",
        "`dmesg` there names them: give the job more memory for each member, or fewer workers.",
    ),
    _rule(
        "ObjectStoreSpilling",
        "info",
        Condition(max_by(select(ray.SPILLED_BYTES, State="Spilled"), "node"), ">", 5e9),
        600,
        "{value:bytes}B of objects of {node} are on disk, because they do not fit into Ray's object store",
        "Read fewer blocks at once, drop references earlier (`ray memory` lists them), or use larger nodes.",
    ),
    _rule(
        "RayOomKills",
        "warning",
        SetOperation(
            Condition(max_by(OverTime("increase", _EVICTIONS, 600), *_EVICTED), ">", 0),
            "or",
            SetOperation(_EVICTED_NOW, "and", _IS_NEW),
        ),
        0,
        "Ray ended workers of {Name} on {node}, whose memory ran out",
        "Give them more memory (memory of a task, more for each member), or run fewer on a node at once.",
    ),
)
