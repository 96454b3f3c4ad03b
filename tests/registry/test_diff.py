from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raytide.core.specs.model_version import Lineage, ModelVersion, ModelVersionSpec
from raytide.registry.lineage import FieldChange, differences


def version(number: int = 1, config: dict[str, object] | None = None, **fields: object) -> ModelVersion:
    given = {"name": "chat", "location": "/m", "sha256": "a" * 64, "lineage": Lineage(config=config or {}), **fields}
    return ModelVersion(ModelVersionSpec.model_validate(given), number, "ana", float(number))


def test_each_field_that_differs_is_named_by_its_path() -> None:
    before = version(1, {"optim": {"lr": 1e-3, "name": "adamw"}, "steps": 10}, metrics={"ppl": 3.0})
    after = version(2, {"optim": {"lr": 1e-4, "name": "adamw"}, "seed": 1}, metrics={"ppl": 2.5})
    assert differences(before, after) == (
        FieldChange("lineage.config.optim.lr", 1e-3, 1e-4),
        FieldChange("lineage.config.seed", None, 1),
        FieldChange("lineage.config.steps", 10, None),
        FieldChange("metrics.ppl", 3.0, 2.5),
    )


_VALUES = st.one_of(st.none(), st.integers(-9, 9), st.text("ab", max_size=2), st.lists(st.integers(0, 3), max_size=2))
_CONFIGS = st.dictionaries(st.text("xy", min_size=1, max_size=2), _VALUES | st.dictionaries(st.just("z"), _VALUES))


@given(a=_CONFIGS, b=_CONFIGS)
def test_a_diff_turned_round_swaps_its_sides(a: dict[str, object], b: dict[str, object]) -> None:
    there, back = differences(version(1, a), version(2, b)), differences(version(2, b), version(1, a))
    assert [(x.field, x.after, x.before) for x in there] == [(x.field, x.before, x.after) for x in back]
    assert differences(version(1, a), version(2, a)) == ()
