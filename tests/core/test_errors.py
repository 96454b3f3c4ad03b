from __future__ import annotations

import pickle

import pytest

from raytide.core import errors
from raytide.core.errors import CapacityError, RaytideError, UsageError, from_json

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, RaytideError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_the_wire_and_pickling_as_its_own_class(cls: type[RaytideError]) -> None:
    error = cls("job-7 broke.", hint="Mend it.")
    for copy in (from_json(error.to_json()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is cls
        assert (copy.message, copy.hint, str(copy)) == ("job-7 broke.", "Mend it.", "job-7 broke. Mend it.")


def test_codes_are_unique_and_exit_codes_are_those_of_the_cli() -> None:
    assert len({c.code for c in CLASSES}) == len(CLASSES)
    assert {c.exit_code for c in CLASSES} == {1, 2, 3, 4, 5}
    assert (CapacityError.exit_code, CapacityError.http_status) == (2, 400)
    assert issubclass(CapacityError, UsageError)


def test_the_docstring_draws_every_class() -> None:
    drawn = errors.__doc__ or ""
    for cls in CLASSES:
        line = next(line for line in drawn.splitlines() if line.strip("│├└─ ").startswith(f"{cls.__name__} "))
        code, exit_code, status = line.split(cls.__name__)[1].split()[:3]
        assert (code, int(exit_code), int(status)) == (cls.code, cls.exit_code, cls.http_status)


def test_a_class_without_a_code_of_its_own_is_its_parent_to_others() -> None:
    class DetailError(UsageError):
        pass

    assert type(from_json(DetailError("no.").to_json())) is UsageError


def test_an_unknown_code_is_still_an_error() -> None:
    assert type(from_json({"code": "from_the_future", "message": "x"})) is RaytideError
    assert str(from_json({})) == "unknown error"
