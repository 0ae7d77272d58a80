"""The parameter structs: kernels_src/params.cuh, parsed as text, against the bytes that Python packs."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from fused_logp_hub import _params

HEADER = Path(__file__).resolve().parent.parent / "kernels_src" / "params.cuh"
# Size, and so alignment, of what the structs are made of; any pointer is 8 bytes.
SIZES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8, "u8": 1, "double": 8, "float": 4}
# struct's codes that Python may pack for each, one a scalar.
CODES = {
    "u8": "B",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "double": "d",
    "float": "f",
    "pointer": "Q",
}


@pytest.fixture(scope="module")
def header() -> str:
    if not HEADER.exists():
        pytest.skip(f"{HEADER} is not there: these tests run without the sources")
    return re.sub(r"//[^\n]*", "", HEADER.read_text(encoding="utf-8"))


def fields_of(header: str, name: str) -> list[tuple[str, str]]:
    """(type, field) in order; a pointer's type is "pointer"."""
    body = re.search(rf"struct {name} \{{(.*?)\}};", header, re.DOTALL)
    assert body, f"no struct {name}"
    fields = []
    for declaration in filter(None, (d.strip() for d in body[1].split(";"))):
        kind, pointer, field = re.fullmatch(
            r"(?:const )?(\w+)\s*(\*?)\s+?(\w+)", declaration.replace("*", "* ")
        ).groups()
        fields.append(("pointer" if pointer else kind, field))
    return fields


def scalars_of(header: str, name: str) -> list[tuple[str, str]]:
    """(scalar type, field) with nested structs taken apart."""
    scalars = []
    for kind, field in fields_of(header, name):
        if kind == "pointer" or kind in SIZES:
            scalars.append((kind, field))
        else:
            scalars += [(inner, field) for inner, _ in scalars_of(header, kind)]
    return scalars


def offsets(kinds: list[str]) -> tuple[list[int], int]:
    """Where a C compiler puts each scalar, and the size of the whole."""
    at, result, widest = 0, [], 1
    for kind in kinds:
        size = SIZES.get(kind, 8)
        at += -at % size
        result.append(at)
        at, widest = at + size, max(widest, size)
    return result, at + -at % widest


STRUCTS = [
    ("LogpParams", tuple((name, "Q") for name in _params.LOGP_ADDRESSES) + _params.LOGP_CONSTANTS, _params.LOGP),
    ("RowMaskParams", _params.ROW_MASK_FIELDS, _params.ROW_MASK),
]


@pytest.mark.parametrize(("name", "packed", "layout"), STRUCTS, ids=[s[0] for s in STRUCTS])
class TestStruct:
    def test_fields(self, header, name, packed, layout):
        """The same names in the same order."""
        assert [field for field, _ in packed] == [field for _, field in fields_of(header, name)]

    def test_types(self, header, name, packed, layout):
        """Each scalar packed as what it is: width, sign, and kind of number."""
        ours = [(code, field) for field, codes in packed for code in codes]
        assert ours == [(CODES[kind], field) for kind, field in scalars_of(header, name)]

    def test_offsets(self, header, name, packed, layout):
        """Python packs without padding, so the C struct may have none, inside or at its end."""
        kinds = [kind for kind, _ in scalars_of(header, name)]
        expected, size = offsets(kinds)
        codes = "".join(codes for _, codes in packed)
        assert [struct.calcsize("=" + codes[:i]) for i in range(len(codes))] == expected
        assert layout.size == size


def test_constants_are_packed_by_name():
    """Each where the struct has it, 0 where nothing is said; the addresses come before all of them."""
    packed = _params.logp_constants(grad_logp_rows=(7, -8), num_rows=9, tiles_per_block=3)
    values = struct.unpack("=" + "".join(codes for _, codes in _params.LOGP_CONSTANTS), packed)
    names = [name for name, codes in _params.LOGP_CONSTANTS for _ in codes]
    assert {(n, v) for n, v in zip(names, values, strict=True) if v} == {
        ("grad_logp_rows", 7), ("grad_logp_rows", -8), ("num_rows", 9), ("tiles_per_block", 3),
    }  # fmt: skip
    addresses = tuple(range(1, len(_params.LOGP_ADDRESSES) + 1))
    whole = _params.LOGP.pack(*addresses, packed)
    assert struct.unpack_from(f"={len(addresses)}Q", whole) == addresses
    assert whole.endswith(packed)
    with pytest.raises(AssertionError, match=r"no such fields: num_columns$"):
        _params.logp_constants(num_columns=1)


@pytest.mark.parametrize("value", [*range(1, 70), 127, 128, 1000, 65537, 2**30 + 1, 2**31 - 1])
def test_divisor(value):
    """What `divide` in row.cuh computes from it, in 32 bits, is the quotient of every number below 2^31."""
    given, multiplier, shift = _params.divisor(value)
    assert given == value
    assert 0 <= multiplier < 2**32
    multiples = (k * value + d for k in (0, 1, 2, 3, 1000, (2**31 - 1) // value) for d in (-1, 0, 1))
    for n in (n for n in (*multiples, 2**31 - 1) if 0 <= n < 2**31):
        total = n + (n * multiplier >> 32)
        assert total < 2**32
        assert total >> shift == n // value


def test_dtype_codes(header):
    enum = re.search(r"enum DType : i32 \{(.*?)\}", header)[1]
    codes = {name.strip()[1:].lower(): int(value) for name, value in (item.split("=") for item in enum.split(","))}
    assert codes == _params.DTYPE_CODES


def test_the_buffer_holds_every_struct():
    """One buffer a thread serves all kernels; kernel parameters may not exceed 4 KiB."""
    largest = max(layout.size for layout in (_params.LOGP, _params.ROW_MASK))
    assert largest <= _params.MAX_PARAMS_BYTES <= 4096


def test_limits_that_kernels_and_python_share(header):
    """Ids a row, the size of shared arrays; of a backward's blocks those that a multiprocessor runs at once."""
    from build_tools.kernel_table import load_table
    from fused_logp_hub import _checks

    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(HEADER.parent.glob("*.cu*")))
    assert int(re.search(r"kMaxIds = (\d+);", sources)[1]) == _checks.MAX_IDS
    rows = {kernel.symbols[0]: kernel.row for kernel in load_table().kernels}
    for name, constant, shape in (
        ("backward", "kBackwardBlocks", "SteadyShape"),
        ("backward_eager", "kEagerBlocks", "EagerShape"),
    ):
        row = rows[f"logp_{name}_bf16"]
        assert int(re.search(rf"{constant} =[^;]*: (\d+);", sources)[1]) == row["resident_blocks"]
        threads, vectors = re.search(rf"{shape} = BackwardShape<(\d+), (\d+),", sources).groups()
        assert int(threads) == row["threads"]
        assert int(threads) * int(vectors) * 16 == row["tile_bytes"]
