"""NVRTC as a Compiler, called by ctypes in the library that its PyPI distribution brings."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path, PurePath

from build_tools.compilers import Compilation
from build_tools.errors import CompilerError
from build_tools.kernel_table import CompilerPin


class Nvrtc:
    """The NVRTC of the distributions that `pin` names. A Compiler."""

    name = "nvrtc"

    def __init__(self, pin: CompilerPin) -> None:
        distribution = _find(str(pin.distribution))
        # metadata, not nvrtcVersion: that one says 12.9 and leaves out the 86.
        self.version = distribution.version
        headers = [_find(name) for name in pin.header_distributions]
        self.folders = tuple(_include_folder(found) for found in headers)
        self.packages = tuple((found.name, found.version) for found in (distribution, *headers))
        library = _file(distribution, lambda path: path.name.startswith("libnvrtc.so"))
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise CompilerError(
                f"nvrtc: expected a library this machine can load, got {error}. Reinstall {pin.distribution}."
            ) from error
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(
        self, source: Path, include_dirs: Sequence[Path], architecture: str, flags: Sequence[str]
    ) -> Compilation:
        options = [
            f"--gpu-architecture={architecture}",
            "--ptxas-options=-v",
            *flags,
            *(f"-I{folder}" for folder in [*include_dirs, *self.folders]),
        ]
        program = ctypes.c_void_p()
        # The bare name: the path would stand in the messages and in __FILE__.
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            0,
            None,
            None,
        )
        try:
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), array)
            log = self._get(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                raise CompilerError(
                    f"{source.name}: expected it to compile for {architecture}, got "
                    f"{self._error(status)}. Its message:\n{log}"
                )
            return Compilation(self._get(program, "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise CompilerError(f"nvrtc: expected {function} to succeed, got {self._error(status)}. Reinstall NVRTC.")

    def _error(self, status: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(status)
        return text.decode()


def _find(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise CompilerError(
            f"nvrtc: expected the distribution {name}, got none. Install it as pyproject.toml "
            "pins it, or set FUSED_LOGP_HUB_COMPILER=nvcc."
        ) from error


def _file(distribution: metadata.Distribution, wanted: Callable[[PurePath], bool]) -> Path:
    return Path(str(distribution.locate_file(_relative(distribution, wanted))))


def _include_folder(distribution: metadata.Distribution) -> Path:
    header = _relative(distribution, lambda path: "include" in path.parts)
    folder = PurePath(*header.parts[: header.parts.index("include") + 1])
    return Path(str(distribution.locate_file(folder)))


def _relative(distribution: metadata.Distribution, wanted: Callable[[PurePath], bool]) -> PurePath:
    for path in distribution.files or ():
        if wanted(path):
            return path
    raise CompilerError(
        f"nvrtc: expected {distribution.name} to list the files it installed, got none that fits. "
        "Reinstall it with pip."
    )
