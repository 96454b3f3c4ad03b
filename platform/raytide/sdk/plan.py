"""Makes plans without a cluster: what a training or an endpoint needs on the node types of a cluster.yaml."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raytide.core.config import load_yaml
from raytide.core.errors import CapacityError, ConfigError, NotFoundError
from raytide.core.io import html
from raytide.core.io.token_dataset import MANIFEST, parse_manifest
from raytide.core.money import MICRO
from raytide.core.objects.cluster_config import ClusterConfig, load_cluster
from raytide.core.objects.node import NodeType
from raytide.core.specs.train import MemorySpec, Precision, TrainSpec
from raytide.sizing.calibration import Corrections
from raytide.sizing.devices import device_of
from raytide.sizing.model_shape import MODELS, ModelShape
from raytide.sizing.scaling.laws import BESIROGLU
from raytide.sizing.search.fixes import misfit
from raytide.sizing.search.plans import Objective, PlanSearch, SearchOptions, TrainingPlan, search_plans
from raytide.sizing.serving import ReplicaPlan, ServingLoad, plan_replicas
from raytide.sizing.workload import TrainWorkload

if TYPE_CHECKING:
    from raytide.actors.models.quantized.quantization_config import Quantization

COLUMNS = ("nodes", "layout", "step", "MFU", "time", "cost", "energy", "memory", "limited by")
SERVING_COLUMNS = ("replicas", "each", "slots", "first token", "next token", "requests/s", "cost/h", "limited by")
_TOKENS_PER_STEP = 1 << 20
"""The global batch of a model that is planned by its name alone."""
_SEQ_LEN = 4096


@dataclass(frozen=True)
class PlanReport:
    """The plans of a training, best first. A notebook shows them as a table."""

    workload: TrainWorkload
    search: PlanSearch
    node_types: tuple[NodeType, ...]

    @property
    def best(self) -> TrainingPlan:
        """The best plan. Raises CapacityError if no plan fits. The error states the cheapest change that would make the
        nearest plan fit.
        """
        if self.search.plans:
            return self.search.plans[0]
        raise CapacityError(f"no plan fits {self.workload.model.name}: {self.miss}", hint=self.fix)

    @property
    def miss(self) -> str:
        """The reason why even the closest plan does not fit. Empty if a plan fits."""
        if self.search.plans or not self.search.misses:
            return "" if self.search.plans else "no node type has GPUs that the planner knows."
        found = self._misfit()
        return "its memory is a little short." if found is None else f"it needs {found.reason}."

    @property
    def fix(self) -> str:
        """The cheapest change that would make a plan fit. The change is for the plan that comes closest to fitting."""
        found = self._misfit() if self.search.misses else None
        if found is not None and found.fixes:
            return f"{found.fixes[0].describe()}."
        return "Use a smaller model, or add a node type with more GPU memory."

    def rows(self, most: int = 5) -> list[tuple[str, ...]]:
        return [_row(plan) for plan in self.search.plans[:most]]

    def json(self) -> dict[str, Any]:
        model = self.workload.model
        return {
            "model": {"name": model.name, "parameters": model.parameters, "layers": model.layers},
            "tokens": self.workload.tokens_per_step * self.workload.steps,
            "steps": self.workload.steps,
            "plans": [plan.json() for plan in self.search.plans],
            "unknown_node_types": list(self.search.unknown),
            "miss": self.miss,
            "fix": "" if self.search.plans else self.fix,
        }

    def _misfit(self) -> Any:
        nearest = min(self.search.misses, key=lambda each: each.memory_share)
        small = replace(nearest.strategy, micro_batch=1)
        return misfit(self.workload, small, nearest.node_type, nearest.device, nearest.devices, self.node_types)

    def _repr_html_(self) -> str:
        title = f"{self.workload.model.name}: {self.workload.tokens_per_step * self.workload.steps:.3g} tokens"
        return html.framed(html.table(title, COLUMNS, self.rows()))


@dataclass(frozen=True)
class ServingReport:
    """The replicas that a load needs on each node type, the cheapest node type first."""

    model: ModelShape
    plans: tuple[ReplicaPlan, ...]

    def rows(self, most: int = 5) -> list[tuple[str, ...]]:
        return [
            (
                str(plan.replicas),
                f"{plan.gpus} x {plan.device.name}",
                str(plan.slots),
                f"{plan.ttft_s * 1e3:.0f} ms",
                f"{plan.tpot_s * 1e3:.1f} ms",
                f"{plan.requests_per_s:.2f}",
                f"${plan.usd_per_h:,.2f}",
                plan.binding,
            )
            for plan in self.plans[:most]
        ]

    def json(self) -> dict[str, Any]:
        return {"model": self.model.name, "plans": [plan.json() for plan in self.plans]}

    def _repr_html_(self) -> str:
        return html.framed(html.table(self.model.name, SERVING_COLUMNS, self.rows()))


def plan(
    source: str | Path | TrainSpec,
    *,
    cluster_file: str | Path = "cluster.yaml",
    by: Objective = "cost",
    hours: float | None = None,
    tokens: float | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    corrections: Corrections | None = None,
) -> PlanReport:
    """Returns ranked plans of a training on the node types of a cluster.yaml. It needs neither a cluster nor torch.

    - `source` is a TrainSpec or its YAML file, a model directory or its `config.json`, or the name of a known model,
      such as `llama-3-8b`.
    - `tokens` is the number of tokens to train on if `source` is only a model. By default it is compute-optimal for the
      model's size.
    - `hours` is the longest that the run should take. Plans that take longer are ranked after all others.
    - `corrections` were measured on a cluster's runs. `ApiClient.corrections()` returns them.
    """
    config = load_cluster(cluster_file)
    workload, memory = _workload(source, tokens, seq_len, global_batch, precision)
    watts = config.settings.energy.watts_per_core
    learned = corrections or Corrections()
    options = SearchOptions(objective=by, base=memory, hours=hours, watts_per_core=watts, corrections=learned)
    return PlanReport(workload, search_plans(workload, config.node_types, options), config.node_types)


def plan_workload(spec: TrainSpec) -> tuple[TrainWorkload, MemorySpec]:
    """Returns the training workload of a spec, and the spec's memory options. The workload has the model's sizes."""
    return TrainWorkload.from_spec(spec, _model_of(spec)), spec.memory


def plan_serving(model: str | Path, load: ServingLoad, *, cluster_file: str | Path = "cluster.yaml") -> ServingReport:
    """Returns the replicas that a load needs on each node type of a cluster.yaml, the cheapest node type first. Node
    types that cannot hold a replica are left out.

    Raises CapacityError if no node type can hold a replica.
    """
    shape, config = model_named(model), load_cluster(cluster_file)
    found: list[ReplicaPlan] = []
    for node_type in _cheapest_of_each(config):
        device = device_of(node_type)
        gpus = int(node_type.resources.get("GPU", 0.0))
        for size in (1, 2, 4, 8):
            if device is None or size > gpus:
                continue
            price = node_type.price_micro_usd_h / MICRO / gpus
            if (able := plan_replicas(shape, load, device, size, price)) is not None:
                found.append(able)
    if not found:
        raise CapacityError(
            f"no node type serves {shape.name} within its SLO on one node.",
            hint="Allow more time, a smaller model, or add a node type with more GPU memory.",
        )
    return ServingReport(shape, tuple(sorted(found, key=lambda each: (each.usd_per_h, each.gpus * each.replicas))))


def model_named(source: str | Path) -> ModelShape:
    """Returns the sizes of a model. `source` is a known name, a GGUF file, or a Hugging Face `config.json` or its
    folder.

    Raises NotFoundError for anything else.
    """
    from raytide.actors.models.quantized.gguf.gguf_config import gguf_config
    from raytide.actors.models.quantized.gguf.gguf_file import GgufFile, is_gguf
    from raytide.actors.models.quantized.gguf.packaged_models import packaged_path

    if str(source) in MODELS:
        return MODELS[str(source)]
    source = packaged_path(str(source)) or source
    if is_gguf(source):
        file = GgufFile(Path(source))
        shape = _shape(gguf_config(file), str(source), Path(source).stem)
        return replace(shape, weight_bytes=file.tensor_bytes / shape.parameters)
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise NotFoundError(
            f"{source} is neither a file nor a known model.", hint=f"Known models: {', '.join(sorted(MODELS))}."
        )
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} is not a model's config.json: {error}.", hint="Check the path.") from None
    return _shape(body, str(path), Path(source).name if Path(source).is_dir() else path.parent.name or path.stem)


def _workload(
    source: str | Path | TrainSpec,
    tokens: float | None,
    seq_len: int | None,
    global_batch: int | None,
    precision: Precision | None,
) -> tuple[TrainWorkload, MemorySpec]:
    if isinstance(source, TrainSpec) or Path(source).suffix in (".yaml", ".yml"):
        spec = source if isinstance(source, TrainSpec) else TrainSpec.parse(load_yaml(source), where=str(source))
        changes = {"seq_len": seq_len, "global_batch": global_batch, "precision": precision}
        spec = spec.model_copy(update={name: value for name, value in changes.items() if value is not None})
        return plan_workload(spec)
    model = model_named(source)
    length = seq_len or _SEQ_LEN
    batch = global_batch or max(1, _TOKENS_PER_STEP // length)
    wanted = tokens or _optimal_tokens(model.parameters)
    steps = max(1, round(wanted / (batch * length)))
    return TrainWorkload(model, length, batch, steps, precision or "bf16"), MemorySpec()


def _optimal_tokens(parameters: int) -> float:
    """Returns the number of tokens D for which this model size N is compute-optimal, by Besiroglu's fit of the loss
    L(N, D): there N * dL/dN equals D * dL/dD."""
    law = BESIROGLU
    slope = law.parameter_exponent * law.parameter_factor / parameters**law.parameter_exponent
    return float((law.data_exponent * law.data_factor / slope) ** (1.0 / law.data_exponent))


def _model_of(spec: TrainSpec) -> ModelShape:
    """Returns the sizes of a spec's model, with the dataset's vocabulary if that can be read here."""
    given, vocab = spec.model.config, spec.model.vocab_size
    data = next(iter(spec.datasets), "")
    manifest = Path(data) / MANIFEST
    if vocab is None and data and manifest.is_file():
        vocab = parse_manifest(manifest.read_bytes(), str(manifest)).vocab_size
    if spec.init_from is not None:
        folders = [Path(spec.init_from), Path(spec.init_from) / "model"]
        found = next((folder for folder in folders if (folder / "config.json").is_file()), folders[0])
        return replace(model_named(found), name=spec.name)
    if isinstance(given, str):
        return replace(model_named(given), name=spec.name)
    if isinstance(given, dict):
        body = {**({} if vocab is None else {"vocab_size": vocab}), **given}
        return _shape(body, f"{spec.name}: model.config", spec.name)
    if vocab is None:
        raise ConfigError(
            f"{spec.name}: the vocabulary is that of {data or 'its tokenizer'}, which is not here.",
            hint="Set model.vocab_size.",
        )
    return _shape(spec.model.hf_config(vocab, 0), spec.name, spec.name)


def _shape(config: dict[str, Any], where: str, name: str) -> ModelShape:
    from raytide.actors.models.architecture import model_shape
    from raytide.actors.models.families import architecture_of
    from raytide.actors.models.quantized.quantization_config import read_quantization

    body = dict(config)
    body.setdefault("eos_token_id", 0)
    shape = model_shape(architecture_of(body, where), name)
    quantization = read_quantization(body, where)
    return shape if quantization is None else replace(shape, weight_bytes=_mean_bytes(shape, quantization))


def _mean_bytes(shape: ModelShape, quantization: Quantization) -> float:
    """Returns the mean bytes of a weight. The layers' matrices are in the quantization's scheme, with scales of 2
    bytes; all other weights are in bfloat16. The bytes of several schemes are averaged.
    """
    matrices = sum(weight.numel for weight in shape.weights(range(shape.layers)) if weight.is_hidden)
    each = [scheme.bits / 8 + (2 / scheme.group_size if scheme.group_size else 0.0) for scheme in quantization.schemes]
    if not each:
        return shape.weight_bytes
    rest = shape.parameters - matrices
    return (matrices * sum(each) / len(each) + 2.0 * rest) / shape.parameters


def _cheapest_of_each(config: ClusterConfig) -> Sequence[NodeType]:
    """Returns the cheapest node type for each combination of GPU kind and number of GPUs."""
    found: dict[tuple[str, float], NodeType] = {}
    for node_type in sorted(config.node_types, key=lambda each: each.price_micro_usd_h):
        device = device_of(node_type)
        if device is not None and not device.is_cpu and node_type.max_nodes:
            found.setdefault((device.name, node_type.resources["GPU"]), node_type)
    return list(found.values())


def _row(plan: TrainingPlan) -> tuple[str, ...]:
    devices: Literal[""] | str = f" x {plan.devices} GPU" if not plan.device.is_cpu else ""
    return (
        f"{plan.nodes} x {plan.node_type.name}{devices}",
        plan.layout_text,
        f"{plan.step.total:.3g} s",
        f"{plan.step.mfu:.1%}",
        f"{plan.hours:,.1f} h",
        f"${plan.usd:,.0f}" if plan.usd >= 100 else f"${plan.usd:,.2f}",
        f"{plan.kwh:,.0f} kWh" if plan.kwh >= 10 else f"{plan.kwh:,.2f} kWh",
        f"{plan.memory_share:.0%}" if plan.memory_share else "-",
        plan.binding,
    )
