"""Every reason for which a build stops.

BuildError
├── TableError               kernels.toml is not what the build expects
├── CompilerError            no compiler, not the pinned version, or the source does not compile
├── HubExportError           a wheel that cannot be written in the layout of the kernels hub
├── ReleaseError             tag, version and changelog do not agree
└── GateError                it compiled, and must not ship
    ├── CompilerWarningError   the compiler warned
    ├── NotACubinError         not a whole ELF file for a CUDA device
    ├── CompressedImageError   a fat binary, or compressed: drivers before 550 refuse zstd
    ├── ElfAbiError            not the OSABI and ABI of the rule, on which drivers depend
    ├── ArchitectureError      machine code for another architecture than the file's name says
    ├── MissingSymbolError     a kernel that kernels.toml lists is not there
    ├── UnlistedSymbolError    a kernel that kernels.toml does not list is there
    ├── MissingReportError     the compiler did not say what a kernel uses
    ├── SpillError             registers spilled to memory
    ├── LocalMemoryError       a stack frame, so local memory
    ├── UnlaunchableError      more registers than a block may hold
    ├── BuildPathError         a folder of the build machine stands in the bytes
    ├── WheelSizeError         the wheel is over the limit
    ├── WheelContentsError     the wheel holds something else than the manifest says
    └── WheelTagError          the wheel's name does not say which machines it is for
"""


class BuildError(Exception):
    """Base of all errors of the build."""


class TableError(BuildError):
    pass


class CompilerError(BuildError):
    pass


class HubExportError(BuildError):
    pass


class ReleaseError(BuildError):
    pass


class GateError(BuildError):
    pass


class CompilerWarningError(GateError):
    pass


class NotACubinError(GateError):
    pass


class CompressedImageError(GateError):
    pass


class ElfAbiError(GateError):
    pass


class ArchitectureError(GateError):
    pass


class MissingSymbolError(GateError):
    pass


class UnlistedSymbolError(GateError):
    pass


class MissingReportError(GateError):
    pass


class SpillError(GateError):
    pass


class LocalMemoryError(GateError):
    pass


class UnlaunchableError(GateError):
    pass


class BuildPathError(GateError):
    pass


class WheelSizeError(GateError):
    pass


class WheelContentsError(GateError):
    pass


class WheelTagError(GateError):
    pass
