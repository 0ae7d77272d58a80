"""What the build hook keeps of a compilation, and when it compiles again."""

import pytest

pytest.importorskip("build_tools", reason="the build tools are not part of the wheel")

from build_tools.cache import CachedCompiler
from build_tools.compilers import Compilation
from build_tools.errors import CompilerError


class CountingCompiler:
    """Its image is the source and the architecture."""

    name, version, folders, packages = "counting", "1.0", (), (("headers", "1.0"),)

    def __init__(self):
        self.count = 0

    def compile(self, source, include_dirs, architecture, flags):
        self.count += 1
        if b"error" in source.read_bytes():
            raise CompilerError("source: expected it to compile")
        return Compilation(source.read_bytes() + architecture.encode() + b"\0\xff", f"log {self.count}")


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.cu").write_text("a")
    (folder / "b.cu").write_text("b")
    (folder / "common.cuh").write_text("common")
    return folder


@pytest.fixture
def compile_all(sources, tmp_path):
    """Compiles in a new process's cache; returns the compilations and how many the compiler was asked for."""

    def compile_all(names=("a.cu", "b.cu"), architecture="sm_90a", flags=("-f",), **attributes):
        compiler = CountingCompiler()
        vars(compiler).update(attributes)
        cached = CachedCompiler(compiler, tmp_path / "kept")
        made = [cached.compile(sources / name, [sources], architecture, flags) for name in names]
        cached.drop_unused()
        return made, compiler.count

    return compile_all


def test_second_build_compiles_nothing(compile_all):
    first, count = compile_all()
    assert count == 2
    assert compile_all() == (first, 0)
    assert first[0].image == b"asm_90a\0\xff"


@pytest.mark.parametrize(
    "change",
    [{"architecture": "sm_80"}, {"flags": ("-g",)}, {"name": "other"}, {"version": "1.1"}, {"packages": ()}],
    ids=lambda change: next(iter(change)),
)
def test_what_decides_the_bytes_compiles_again(compile_all, change):
    compile_all()
    assert compile_all(**change)[1] == 2


@pytest.mark.parametrize("name", ["a.cu", "common.cuh", "new.cuh"])
def test_another_source_compiles_again(compile_all, sources, name):
    compile_all()
    (sources / name).write_text("changed")
    made, count = compile_all()
    assert count == 2
    assert made[0].image == (sources / "a.cu").read_bytes() + b"sm_90a\0\xff"


def test_unused_is_dropped(compile_all, tmp_path):
    compile_all()
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert compile_all(names=["a.cu"])[1] == 0
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert compile_all()[1] == 1


def test_error_is_not_kept(compile_all, sources):
    (sources / "a.cu").write_text("error")
    for _ in range(2):
        with pytest.raises(CompilerError):
            compile_all(names=["a.cu"])


def test_folder_that_cannot_be_written(compile_all, tmp_path):
    (tmp_path / "kept").write_text("a file where the folder should be")
    assert compile_all()[1] == 2
