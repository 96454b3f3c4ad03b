"""Batches as jobs: the spec of the model that answers the rows, and the command of the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raytide.control.client import ApiClient
from raytide.core.errors import DataError, NotFoundError
from raytide.core.io.storage import is_local
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import GangSpec

__all__ = ["batch_command", "batch_model"]


def batch_model(client: ApiClient, model: str, engine: Mapping[str, object], gang: GangSpec) -> ServeSpec:
    """Returns how a job of a batch runs `model`: a directory that the nodes read, or an endpoint's name, whose
    directory and engine options it takes over.
    """
    resources = dict(gang.shapes[0].resources)
    if Path(model).is_dir():
        return ServeSpec.parse(
            {"name": "batch", "model": str(Path(model).resolve()), "engine": dict(engine), "resources": resources},
            where="batch",
        )
    try:
        spec = client.endpoint(model).endpoint.spec
    except NotFoundError:
        raise DataError(
            f"{model} is neither a directory nor an endpoint.", hint="`raytide serve` lists the endpoints."
        ) from None
    options = {**spec.engine, **engine}
    return ServeSpec.parse(
        {"name": "batch", "model": spec.model, "engine": options, "resources": resources}, where="batch"
    )


def batch_command(source: str | Path, out: str | Path, spec: ServeSpec) -> tuple[str, ...]:
    """Returns the command of the job, with absolute paths."""
    for each in (str(source), str(out)):
        if not is_local(each):
            raise DataError(f"{each} is not a path.", hint="Name files on storage that all nodes read.")
    if Path(out).resolve() == Path(source).resolve():
        raise DataError(f"{out} is the input, too.", hint="Name another output.")
    module = "raytide.actors.serving.batch"
    return ("python", "-m", module, str(Path(source).resolve()), str(Path(out).resolve()), spec.model_dump_json())
