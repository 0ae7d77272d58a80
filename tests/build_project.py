"""A small project with this one's build but its own kernels: compiles in a second, not a minute."""

import shutil

import pytest

from build_tools.build import build
from build_tools.compilers import select_compiler
from build_tools.errors import CompilerError
from build_tools.kernel_table import ROOT, TABLE_PATH, load_table

# A module for each ABI, kernels with and without a dtype, and a key that only the manifest knows.
ROWS = """
[[modules]]
name = "plain"
source = "plain.cu"
architectures = ["sm_80", "sm_100f"]

[[modules]]
name = "special"
source = "special.cu"
architectures = ["sm_90a"]

[[kernels]]
op = "scale"
name = "fast"
module = "special"
symbol = "scale_fast_{dtype}"
dtypes = ["float32"]
alignment = 16
threads = 64
shared_memory = 0
items_per_block = 64
lanes = 4

[[kernels]]
op = "mark"
name = "mark"
module = "plain"
symbol = "mark"
dtypes = ["any"]
alignment = 1
threads = 32
shared_memory = 0
items_per_block = 32
"""
SOURCES = {
    "common.cuh": "#include <cuda_bf16.h>\n__device__ inline float twice(float x) { return x + x; }",
    "plain.cu": 'extern "C" __global__ void mark(int* a) { a[threadIdx.x] = 1; }',
    "special.cu": '#include "common.cuh"\n'
    'extern "C" __global__ void scale_fast_f32(float* a) { a[threadIdx.x] = twice(a[0]); }',
}


def table_text():
    """This project's table with the small project's modules and kernels."""
    text = TABLE_PATH.read_text(encoding="utf-8")
    return text[: text.index("[[modules]]")] + ROWS


def make_project(root):
    shutil.copytree(ROOT / "build_tools", root / "build_tools")
    for name in (".gitignore", "pyproject.toml", "hatch_build.py", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    files = {
        "README.md": "",
        "fused_logp_hub/__init__.py": "",
        "fused_logp_hub/_version.py": '__version__ = "1.2.3"\n',
        "build_tools/kernels.toml": table_text(),
        **{f"kernels_src/{name}": text for name, text in SOURCES.items()},
    }
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def compiler_or_skip(table, choice):
    """The compiler; skips only where it is not installed at all."""
    try:
        return select_compiler(table, choice)
    except CompilerError as error:
        if "got none" not in str(error):
            raise
        pytest.skip(str(error))


def build_project(root, out, choice="nvrtc", **options):
    table = load_table(root / "build_tools" / "kernels.toml")
    compiler = compiler_or_skip(table, choice)
    return build(table, compiler, out, source_dir=root / "kernels_src", root=root, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
