"""The gate refuses what must not ship: every reason is provoked, by a doctored or a bad input."""

import dataclasses
import hashlib
import json
import struct
import zipfile

import pytest

pytest.importorskip("build_tools", reason="the build tools are not part of the wheel")

from build_project import compiler_or_skip

from build_tools import elf, errors, gate, repair
from build_tools.compilers import Compilation
from build_tools.kernel_table import Architecture, Kernel, load_table

TABLE = load_table()
GOOD = """
extern "C" __global__ void scale(float* a) { a[threadIdx.x] *= 2.0f; }
extern "C" __global__ void shared_scale(float* a) {
    __shared__ float tile[64];
    tile[threadIdx.x % 64] = a[threadIdx.x];
    __syncthreads();
    a[threadIdx.x] = tile[(threadIdx.x + 1) % 64];
}
"""
# 200 live values in 64 registers: what 1024 threads a block leave to each.
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(float* a, int n) {
    float r[200];
#pragma unroll
    for (int i = 0; i < 200; ++i) r[i] = a[i * n + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 200; ++i) a[i * 7 * n + threadIdx.x] = r[199 - i] * r[i * 37 % 200];
}
"""
# An array with an index known only at run time cannot live in registers.
LOCAL = """
extern "C" __global__ void local(float* a, int n) {
    float r[64];
    for (int i = 0; i < 64; ++i) r[i] = a[i];
    for (int i = 0; i < 64; ++i) r[(i * n) & 63] += a[i + 1];
    a[threadIdx.x] = r[n & 63];
}
"""
WARNS = 'extern "C" __global__ void warns(float* a) { int unused = 1; a[0] = 1.0f; }'


def kernels(*symbols, threads=256):
    return {symbol: Kernel(symbol, "module", threads, {}) for symbol in symbols}


@pytest.fixture(scope="module")
def compile_text(tmp_path_factory):
    compiler = compiler_or_skip(TABLE, "nvrtc")
    folder = tmp_path_factory.mktemp("sources")

    def compile_text(text, architecture="sm_90a"):
        source = folder / "source.cu"
        source.write_text(text)
        return compiler.compile(source, [folder], architecture, TABLE.flags)

    return compile_text


@pytest.fixture(scope="module")
def good(compile_text):
    return compile_text(GOOD)


def check(compilation, symbols=("scale", "shared_scale"), architecture="sm_90a", **options):
    gate.check_cubin(
        compilation,
        label="module.cubin",
        architecture=Architecture.parse(architecture),
        rule=TABLE.elf_rule("12.9.86", architecture),
        kernels=kernels(*symbols, threads=options.pop("threads", 256)),
        **options,
    )


def doctored(compilation, offset, value):
    image = bytearray(compilation.image)
    image[offset] = value
    return dataclasses.replace(compilation, image=bytes(image))


@pytest.mark.parametrize(
    ("architecture", "osabi", "abi", "number"),
    [("sm_80", 0x33, 7, 80), ("sm_90a", 0x33, 7, 90), ("sm_100f", 0x41, 8, 100)],
)
def test_parser_reads_both_abis(compile_text, architecture, osabi, abi, number):
    compilation = compile_text(GOOD, architecture)
    cubin = elf.parse_cubin(compilation.image)
    assert (cubin.osabi, cubin.abi, cubin.architecture) == (osabi, abi, number)
    assert cubin.entries == ("scale", "shared_scale")
    assert cubin.stacks == {"scale": 0, "shared_scale": 0}
    assert compilation.resources["shared_scale"].static_shared_memory == 256
    assert 0 < compilation.resources["scale"].registers < 64
    check(compilation, architecture=architecture)


def test_wrong_abi(good):
    for offset, value in ((elf.OSABI_OFFSET, 0x41), (elf.ABI_OFFSET, 8)):
        with pytest.raises(errors.ElfAbiError, match=r"module\.cubin: ELF: expected OSABI 0x33"):
            check(doctored(good, offset, value))


def test_wrong_architecture(good, compile_text):
    with pytest.raises(errors.ArchitectureError, match="expected machine code for sm_90, got sm_80"):
        check(doctored(good, elf.FLAGS_OFFSET, 80))
    newer = compile_text(GOOD, "sm_100f")
    with pytest.raises(errors.ArchitectureError, match="expected machine code for sm_120"):
        check(newer, architecture="sm_120")


def test_missing_and_unlisted_symbol(good):
    with pytest.raises(errors.MissingSymbolError, match="expected absent, got none"):
        check(good, ("scale", "shared_scale", "absent"))
    with pytest.raises(errors.UnlistedSymbolError, match="got shared_scale"):
        check(good, ("scale",))


def test_spill(compile_text):
    with pytest.raises(errors.SpillError, match=r"spills: expected no spill, got [1-9]"):
        check(compile_text(SPILLS), ("spills",))


def test_local_memory_is_seen_in_the_report_and_in_the_image(compile_text):
    compilation = compile_text(LOCAL)
    with pytest.raises(errors.LocalMemoryError, match="local: expected no local memory, got"):
        check(compilation, ("local",))
    for used in compilation.resources.values():
        used.stack = 0
    with pytest.raises(errors.LocalMemoryError):
        check(compilation, ("local",))


def test_every_finding_is_told(compile_text):
    with pytest.raises(errors.MissingSymbolError, match=r"absent(.|\n)*spills: expected no spill"):
        check(compile_text(SPILLS), ("absent", "spills"))


def test_compiler_warning(compile_text):
    with pytest.raises(errors.CompilerWarningError, match="unused"):
        check(compile_text(WARNS), ("warns",))


def test_report_without_the_kernel(good):
    with pytest.raises(errors.MissingReportError, match="scale: expected ptxas to report"):
        check(Compilation(good.image, ""))


def test_more_registers_than_a_block_has(good):
    with pytest.raises(errors.UnlaunchableError, match="expected at most 65536 registers a block"):
        check(good, threads=16384)


def test_build_folder_in_the_bytes(good, tmp_path):
    check(good, folders=[tmp_path])
    leaky = dataclasses.replace(good, image=good.image + bytes(tmp_path / "source.cu"))
    with pytest.raises(errors.BuildPathError, match="expected no folder of the build machine"):
        check(leaky, folders=[tmp_path])


@pytest.mark.parametrize(
    ("start", "what"),
    [("50ed55ba", "a CUDA fat binary"), ("28b52ffd", "a zstd stream"), ("1f8b", "a gzip stream")],
)
def test_container(good, start, what):
    image = bytes.fromhex(start) + good.image
    with pytest.raises(errors.CompressedImageError, match=f"got {what}"):
        check(dataclasses.replace(good, image=image))


def test_compressed_section(good):
    (sections,) = struct.unpack_from("<Q", good.image, 40)
    flags_of_section_1 = sections + 64 + 8
    with pytest.raises(errors.CompressedImageError, match="got a compressed"):
        check(doctored(good, flags_of_section_1 + 1, 0x08))


def test_not_a_cubin(good):
    machine_x86_64 = doctored(good, 18, 62)
    with pytest.raises(errors.NotACubinError, match=r"expected ELF machine 190 \(CUDA\), got 62"):
        check(machine_x86_64)
    for image in (b"", b"//\n// Generated by NVIDIA NVVM Compiler\n.version 8.8\n"):
        with pytest.raises(errors.NotACubinError, match="expected a 64-bit little-endian ELF"):
            check(dataclasses.replace(good, image=image))


def test_truncated_cubin(good):
    for size in [*range(6, len(good.image), 509), len(good.image) - 1]:
        with pytest.raises(errors.NotACubinError, match="expected a whole ELF file"):
            check(dataclasses.replace(good, image=good.image[:size]))


@pytest.fixture
def make_wheel(tmp_path):
    def make_wheel(image=b"image", *, manifest=True, recorded=b"image", extra=()):
        path = tmp_path / "p-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("p/cubins/a.cubin", image)
            if manifest:
                row = {"file": "a.cubin", "sha256": hashlib.sha256(recorded).hexdigest()}
                wheel.writestr("p/cubins/manifest.json", json.dumps({"cubins": [row]}))
            for name in extra:
                wheel.writestr(name, b"")
        return path

    return make_wheel


def test_wheel(make_wheel):
    gate.check_wheel(make_wheel())


def test_host_binary_under_another_name(make_wheel):
    image = b"\x7fELF\x02\x01" + bytes(12) + (62).to_bytes(2, "little") + bytes(44)  # 62: x86-64
    with pytest.raises(errors.WheelContentsError, match=r"expected Python and cubins only, got p/cubins/a\.cubin"):
        gate.check_wheel(make_wheel(image, recorded=image))


def test_repair_keeps_what_may_ship(make_wheel, tmp_path):
    wheel = make_wheel()
    tagged = wheel.rename(wheel.with_name("p-1-py3-none-manylinux_2_17_aarch64.whl"))
    assert repair.main([str(tagged), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / tagged.name).read_bytes() == tagged.read_bytes()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("p-1-py3-none-any.whl", {}, "WheelTagError: p-1-py3-none-any.whl: expected a tag py3-none-manylinux_2_17_"),
        ("p-1-py3-none-manylinux_2_17_x86_64.whl", {"manifest": False}, "WheelContentsError: "),
    ],
)
def test_repair_refuses_the_rest(make_wheel, tmp_path, capsys, name, options, message):
    wheel = make_wheel(**options)
    wheel = wheel.rename(wheel.with_name(name))
    assert repair.main([str(wheel), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(message)
    assert not (tmp_path / "out").exists()


def test_oversized_wheel(make_wheel):
    image = bytes(gate.MAX_WHEEL_BYTES + 1)
    with pytest.raises(errors.WheelSizeError, match="expected at most 5000000 bytes"):
        gate.check_wheel(make_wheel(image, recorded=image))


@pytest.mark.parametrize(
    "options",
    [
        {"extra": ["p/kernel.ptx"]},
        {"extra": ["p/native.so"]},
        {"manifest": False},
        {"recorded": b"another"},
        {"extra": ["p/cubins/b.cubin"]},
    ],
)
def test_wheel_with_other_contents(make_wheel, options):
    with pytest.raises(errors.WheelContentsError):
        gate.check_wheel(make_wheel(**options))
