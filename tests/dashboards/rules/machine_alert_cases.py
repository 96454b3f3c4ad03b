"""The cases of alerts about single machines, the audit log and certificates; see alert_cases."""

from tests.dashboards.rules.alert_cases import GPU, AlertCase, one

NODE = {"node": "node-1"}
EVICTED = {"node": "node-1", "Name": "hog"}
EVICTIONS = "ray_memory_manager_worker_eviction_total"
SPILLED = "ray_spill_manager_objects_bytes"
PROXY = {"address": "llm.example.com:443"}

MACHINES = (
    AlertCase(
        "NvlinkDegraded",
        10,
        one("raytide_gpu_nvlinks", GPU, "18x5 17x10"),
        GPU,
        "GPU 0 of node-1 lost an NVLink in the last day, or one had to recover in the last hour",
        {
            **one("raytide_gpu_nvlinks", GPU, "12x20"),
            **one("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", GPU, "7x20"),
        },
    ),
    AlertCase(
        "HostClockSkew",
        10,
        one("raytide_node_clock_skew_seconds", NODE, "-4x20"),
        NODE,
        "The clock of node-1 differs from the controller's by -4 seconds",
        one("raytide_node_clock_skew_seconds", NODE, "-4x6 0x1 1.5x20"),
    ),
    AlertCase(
        "HostOomKillDetected",
        5,
        one("raytide_node_oom_kills_total", NODE, "0x2 1x10"),
        NODE,
        "The kernel of node-1 ended processes for lack of memory",
        one("raytide_node_oom_kills_total", NODE, "9x10"),
    ),
    AlertCase(
        "ObjectStoreSpilling",
        15,
        one(SPILLED, NODE, "6442450944x20", State="Spilled", WorkerId=""),
        NODE,
        "6GiB of objects of node-1 are on disk, because they do not fit into Ray's object store",
        one(SPILLED, NODE, "6442450944x20", State="Pinned", WorkerId=""),
    ),
    AlertCase(
        "RayOomKills",
        30,
        one(EVICTIONS, EVICTED, "_x25 1x10", Type="MemoryManager.TaskEviction.Total"),
        EVICTED,
        "Ray ended workers of hog on node-1, whose memory ran out",
        one(EVICTIONS, EVICTED, "_ 3x60", Type="MemoryManager.TaskEviction.Total"),
    ),
    AlertCase(
        "AuditLogGap",
        3,
        one("raytide_audit_missing_entries", {}, "0 0 2 2"),
        {},
        "2 entries of the audit log are missing",
        one("raytide_audit_missing_entries", {}, "2 0 0 0"),
    ),
    AlertCase(
        "CertExpiringSoon",
        70,
        one("raytide_certificate_left_seconds", PROXY, "1000000-60x80"),
        PROXY,
        "The certificate of llm.example.com:443 expires in 11d 12h 36m 40s",
        one("raytide_certificate_left_seconds", PROXY, "1300000-60x80"),
    ),
)
