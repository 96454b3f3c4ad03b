"""Batch jobs: the spec of the model that answers the rows, and the command of the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raytide.control.client import ApiClient
from raytide.core.errors import DataError, NotFoundError
from raytide.core.io.storage import is_local
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import GangSpec
from raytide.core.specs.model_version import SCHEME
from raytide.sdk.registry.models import ModelRegistry

RETRIES = 3
"""The most restarts of a job whose process was killed, for example when out of memory. Each restart continues where the
job stopped.
"""


def batch_model(client: ApiClient, model: str, engine: Mapping[str, object], gang: GangSpec) -> ServeSpec:
    """Returns the spec of the model that a batch job runs. `model` is one of these:
    - a directory that the nodes can read
    - a registered model (`registry:NAME@ALIAS`)
    - the name of an endpoint, whose model, current weights and engine options are used
    """
    options, weights = dict(engine), ""
    if model.startswith(SCHEME):
        location = ModelRegistry(client).get(model).spec.location
    elif Path(model).is_dir():
        location = str(Path(model).resolve())
    else:
        try:
            served = client.endpoint(model).endpoint.spec
        except NotFoundError:
            raise DataError(
                f"{model} is neither a directory nor an endpoint.", hint="`raytide serve` lists the endpoints."
            ) from None
        location, weights, options = served.model, served.weights, {**served.engine, **engine}
    resources = dict(gang.shapes[0].resources)
    fields = {"name": "batch", "model": location, "weights": weights, "engine": options, "resources": resources}
    return ServeSpec.parse(fields, where="batch")


def batch_command(source: str | Path, out: str | Path, spec: ServeSpec) -> tuple[str, ...]:
    """Returns the command of a batch job, with absolute paths."""
    for each in (str(source), str(out)):
        if not is_local(each):
            raise DataError(f"{each} is not a path.", hint="Name files on storage that all nodes read.")
    if Path(out).resolve() == Path(source).resolve():
        raise DataError(f"{out} is the input, too.", hint="Name another output.")
    module = "raytide.actors.serving.batch"
    return ("python", "-m", module, str(Path(source).resolve()), str(Path(out).resolve()), spec.model_dump_json())
