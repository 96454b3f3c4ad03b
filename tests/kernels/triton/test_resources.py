"""Compiled ahead of time, each kernel fits its GPUs, spills nothing, and the table of the page is true."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raytide.kernels.triton.support import is_installed

if not is_installed():
    pytest.skip("Triton is not installed; ./dev setup installs it", allow_module_level=True)

import triton
from tests.kernels.triton import resources
from tests.kernels.triton.resources import Resources
from triton import knobs

Found = dict[tuple[str, str, str], Resources]

MOST_SHARED = {"sm_80": 99 * 1024, "sm_90": 99 * 1024, "gfx942": 64 * 1024}
"""Bytes: the smallest limit among the GPUs of an architecture's family, which is that of the consumer cards."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    assert request.config.cache is not None
    with knobs.cache.scope():
        knobs.cache.dir = str(request.config.cache.mkdir("triton"))
        yield resources.measured()


def test_nothing_spills_and_shared_memory_suffices(found: Found) -> None:
    assert {key: each for key, each in found.items() if each.spilled} == {}
    assert {key: each for key, each in found.items() if each.shared_bytes > MOST_SHARED[key[2]]} == {}


def test_attention_and_products_use_matrix_instructions(found: Found) -> None:
    products = {key: each for key, each in found.items() if key[1] in ("attention_kernel", "product_kernel")}
    assert len(products) == 7 * len(resources.TARGETS)
    assert {key: each for key, each in products.items() if not each.matrix_instructions} == {}


def test_the_page_has_the_table_of_this_triton(found: Found) -> None:
    written = resources.PAGE.read_text(encoding="utf-8").partition(resources.MARK)[2]
    if f"Triton {triton.__version__}:" not in written:
        pytest.skip(f"the table is not of the installed Triton {triton.__version__}")
    assert written.strip() == resources.table(found).strip(), "tests/kernels/triton/resources.py writes it anew"
