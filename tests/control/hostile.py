"""Well-formed specs and reports as somebody would send them who wants the control plane to fail."""

from __future__ import annotations

import random
from typing import Any

Json = dict[str, Any]

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, -1, 0.5, 1e-300, 5e-324, 1e-9, 1e-4, 1.5e-4, 1e300, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, 10**40,
    4096, 4097, 100_000, 1_000_000, 1e9, True, "1", "1e-5", None,
)  # fmt: skip
WORDS: tuple[str, ...] = (
    "", "x", "!\ud800", "\udfff", "\0", "a\nb", "\x1b[2J", "!in(", "in(a,b)", "!in()", "in(" + "a," * 3000 + ")",
    "🦀" * 40, "A" * 300, "'; drop table jobs; --", "../../etc/passwd", "job-1", "unmanaged", "ray.io/node-id",
    "default", "\u202e",
    "NaN", "{}", "%s%n", "ray.io/market-type", "spot",
)  # fmt: skip
RESOURCES = ("CPU", "GPU", "memory", "object_store_memory", "node:127.0.0.1", "H100", "x", "")
REASONABLE = {"CPU": 1.0}


class Sender:
    """Draws requests: (method, path, body). About half of them are sane but for one or two fields."""

    def __init__(self, seed: int, model: str, chat: str) -> None:
        self.r, self.model, self.chat = random.Random(seed), model, chat

    def request(self, jobs: int, endpoints: list[str]) -> tuple[str, str, Any]:
        kind = self.r.choices(
            ("job", "endpoint", "report", "release", "budget", "stop", "delete"), (8, 4, 3, 1, 1, 3, 1)
        )[0]
        job = f"job-{self.r.randint(1, max(1, jobs))}"
        match kind:
            case "job":
                return "POST", "/v1/jobs", self.job()
            case "endpoint":
                return "POST", "/v1/endpoints", self.endpoint(endpoints)
            case "report":
                return "POST", f"/v1/jobs/{job}/report", self.report()
            case "release":
                return "POST", f"/v1/jobs/{job}/release", {"error": self.any()}
            case "budget":
                return (
                    "PUT",
                    f"/v1/jobs/{job}/budget?usd={self.r.choice(('1e-9', '1e300', '1e9', '5', '-1', 'nan'))}",
                    None,
                )
            case "stop":
                return "POST", f"/v1/jobs/{job}/stop", None
            case _:
                return "DELETE", f"/v1/endpoints/{self.r.choice(endpoints or ['none'])}", None

    def any(self, depth: int = 0) -> Any:
        r = self.r
        match r.randint(0, 7 if depth < 4 else 1):
            case 0 | 2 | 3:
                return r.choice(WORDS)
            case 1 | 4 | 5:
                return r.choice(NUMBERS)
            case 6:
                return [self.any(depth + 1) for _ in range(r.randint(0, 4))]
            case _:
                return {r.choice(WORDS): self.any(depth + 1) for _ in range(r.randint(0, 4))}

    def maybe(self, *sane: Any) -> Any:
        """One of the values that are allowed, extremes among them; now and then any other."""
        odds = self.r.random()
        return self.any() if odds < 0.01 else self.r.choice(NUMBERS) if odds < 0.05 else self.r.choice(sane)

    def word(self, *sane: str) -> str:
        return self.r.choice(WORDS) if self.r.random() < 0.05 else self.r.choice(sane)

    def amounts(self) -> Any:
        r = self.r
        if r.random() < 0.5:
            return REASONABLE
        if r.random() < 0.1:
            return {r.choice(RESOURCES): self.any() for _ in range(r.randint(0, 3))}
        some = {
            "CPU": self.maybe(1e-4, 0.5, 2, 1),
            "GPU": self.maybe(0, 1e-4, 0.3, 1, 8),
            "memory": self.maybe(0, 1, 1e9),
        }
        return {name: some[name] for name in r.sample(sorted(some), r.randint(1, 3))}

    def labels(self) -> Any:
        r = self.r
        if r.random() < 0.7:
            return {}
        if r.random() < 0.2:
            return {r.choice(WORDS): r.choice(WORDS) for _ in range(r.randint(1, 3))}
        return {self.word("team", "ray.io/market-type"): self.word("!spot", "in(spot,on-demand)", "!in()", "x")}

    def shape(self) -> Json:
        r = self.r
        most = r.choice((1, 1, 2, 3, 64, 1000, 4096))
        shape: Json = {"members": self.maybe(most), "resources": self.amounts(), "labels": self.labels()}
        if r.random() < 0.5:
            shape["min_members"] = self.maybe(1, most)
        if r.random() < 0.2:
            shape["together"] = self.word("ray.io/availability-zone", "ray.io/market-type", "rack")
        return shape

    def job(self) -> Json:
        r = self.r
        kind = r.choice(("gang", "gang", "script", "train", "data"))
        shapes = [self.shape() for _ in range(r.choice((1, 1, 1, 2, 16)))]
        if kind == "data":
            shapes = [{"members": 1, "resources": {"CPU": 1}}]
        job: Json = {"kind": kind, "name": self.word("job"), "gang": {"shapes": shapes}}
        job["config"] = {
            "gang": {"what": r.choice((1, self.any()))},
            "script": {"command": ["true"], "nproc_per_node": self.maybe(1, 1024), "grace_s": self.maybe(0, 3600)},
            "train": {"out": "/nowhere", "steps": self.maybe(1, 2**60), "chat": {"file": self.chat, "tokenizer": "t"}},
            "data": {"inputs": [self.word("a")], "out": "/nowhere", "shard_tokens": self.maybe(1, 2**60)},
        }[kind]
        options = {
            "priority": self.word("low", "normal", "high"),
            "preemptible": r.random() < 0.5,
            "budget_usd": self.maybe(5e-324, 1e-9, 5.0, 1e9),
            "soft_budget_usd": self.maybe(5e-324, 1e-9, 1.0, 1e9),
            "deadline": r.choice(("8h", "1s", "36525d", "9999-12-31T00:00:00Z", self.maybe(1.0, 1e9))),
            "estimate_h": self.maybe(5e-324, 1.0, 1e6, 1e300),
            "labels": self.labels(),
            "max_restarts": self.maybe(0, 10_000),
            "heartbeat_timeout_s": self.maybe(1e6, 3e9),
        }
        for name in r.sample(sorted(options), r.randint(0, 4)):
            job[name] = options[name]
        if r.random() < 0.3 and "budget_usd" in job:
            job["budget_per"] = "month"
        if r.random() < 0.2:
            job["gang"]["form_timeout_s"] = self.maybe(5e-324, 1e-9, 3e9)
        return job

    def endpoint(self, endpoints: list[str]) -> Json:
        r = self.r
        low = r.choice((1, 1, 2, 1000))
        replicas: Json = {"min": self.maybe(low), "max": self.maybe(low, 1024)}
        if r.random() < 0.6:
            replicas |= {"slo_ttft_s": self.maybe(1e-3, 2.0, 86400.0), "slo_target": self.maybe(1e-3, 0.5, 0.99999)}
        if r.random() < 0.5:
            speed = {
                "prefill_tps": self.maybe(1e-3, 1e9),
                "slots": self.maybe(1, 100_000),
                "tpot_ms": self.maybe(1e-3, 1e6),
            }
            replicas["speed"] = {self.word("cpu2", "gpu8", "cpu1.spot"): speed}
        delays = {name: self.maybe(0, 1e-3, 3e9) for name in ("upscale_delay_s", "downscale_delay_s")}
        targets = {"target_ongoing": self.maybe(1e-3, 1e6), "target_kv": self.maybe(1e-3, 1.0)}
        replicas |= {"cold_start_s": self.maybe(1e-3, 86400.0), **delays, **targets}
        name = self.word(f"e{r.randint(1, 8)}", *endpoints[:3])
        spec: Json = {"name": name, "model": self.model, "replicas": replicas, "resources": self.amounts()}
        if r.random() < 0.3:
            spec["members"] = self.maybe(1, 2, 64)
        if r.random() < 0.3:
            spec |= {"labels": self.labels(), "max_ongoing": self.maybe(1, 100_000), "priority": self.word("low")}
        return spec

    def report(self) -> Json:
        names = ("step", "steps", "lost_s", "lost_at_s", "left_s", "redo_s", "settled", "error", "stage", *WORDS)
        return {self.r.choice(names): self.any(3) for _ in range(self.r.randint(0, 6))}
