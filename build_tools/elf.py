"""Reads what the gate needs from a cubin: who can load it, which kernels it has, what they use.

A cubin is a 64-bit little-endian ELF file for machine 190 (CUDA). Parsed here, not by cuobjdump,
because a machine that builds with NVRTC has no CUDA toolkit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from build_tools.errors import CompressedImageError, NotACubinError

EM_CUDA = 190
OSABI_OFFSET = 7
ABI_OFFSET = 8
FLAGS_OFFSET = 48

_CONTAINERS = {
    bytes.fromhex("50ed55ba"): "a CUDA fat binary",
    bytes.fromhex("28b52ffd"): "a zstd stream",
    bytes.fromhex("1f8b"): "a gzip stream",
}
_SHT_SYMTAB = 2
_SHT_NOBITS = 8
_SHF_COMPRESSED = 0x800
_STT_FUNC = 2
_STO_CUDA_ENTRY = 0x10
# Attributes of the .nv.info section: (format 4, attribute, size, symbol index, value).
_FORMAT_SIZED = 4
_ATTR_FRAME_SIZE = 0x11
_ATTR_MIN_STACK_SIZE = 0x12


@dataclass(frozen=True)
class Cubin:
    """What one cubin says of itself. `stacks`: bytes of local memory a thread of a kernel needs."""

    osabi: int
    abi: int
    architecture: int
    entries: tuple[str, ...]
    stacks: dict[str, int]


@dataclass(frozen=True)
class _Section:
    name_offset: int
    kind: int
    flags: int
    offset: int
    size: int
    link: int


def parse_cubin(image: bytes) -> Cubin:
    """Returns what `image` says of itself.

    Raises:
        CompressedImageError: it is a fat binary or compressed stream, or has a compressed section.
        NotACubinError: it is anything else than one whole ELF file for CUDA.
    """
    for magic, what in _CONTAINERS.items():
        if image.startswith(magic):
            raise CompressedImageError(f"image: expected a bare cubin, got {what}. Compile with -cubin, not -fatbin.")
    if image[:6] != b"\x7fELF\x02\x01":
        raise NotACubinError(
            f"image: expected a 64-bit little-endian ELF file, got one starting with "
            f"{image[:6].hex() or 'nothing'}. Compile with -cubin."
        )
    try:
        return _parse(image)
    except (struct.error, IndexError, ValueError) as error:
        raise NotACubinError(
            f"image: expected a whole ELF file, got {len(image)} bytes that end early or point "
            f"outside ({error}). Build it again."
        ) from error


def _parse(image: bytes) -> Cubin:
    machine = _u16(image, 18)
    if machine != EM_CUDA:
        raise NotACubinError(
            f"image: expected ELF machine {EM_CUDA} (CUDA), got {machine}. Compile with -cubin, not to a host object."
        )
    abi = image[ABI_OFFSET]
    flags = struct.unpack_from("<I", image, FLAGS_OFFSET)[0]
    # ABI 8 moved the architecture one byte up to make room for more properties below it.
    architecture = (flags >> 8 if abi >= 8 else flags) & 0xFF

    # Compilers write the program headers last: without this a file cut short there would pass.
    (program_headers,) = struct.unpack_from("<Q", image, 32)
    end = program_headers + _u16(image, 54) * _u16(image, 56)
    if end > len(image):
        raise ValueError(f"program headers end at byte {end}")

    sections = list(_sections(image))
    names = sections[_u16(image, 62)]
    symbols: list[tuple[str, bool]] = []
    info: list[tuple[int, int, int]] = []
    for section in sections:
        name = _string(image, names, section.name_offset)
        if section.flags & _SHF_COMPRESSED:
            raise CompressedImageError(
                f"image: expected plain sections, got a compressed {name}. Compile uncompressed."
            )
        if section.kind == _SHT_SYMTAB:
            symbols = list(_symbols(image, section, sections[section.link]))
        elif name == ".nv.info":
            info = list(_info(image[section.offset : section.offset + section.size]))

    stacks: dict[str, int] = {}
    for attribute, index, value in info:
        if attribute in (_ATTR_FRAME_SIZE, _ATTR_MIN_STACK_SIZE):
            name = symbols[index][0]
            stacks[name] = max(value, stacks.get(name, 0))
    return Cubin(
        osabi=image[OSABI_OFFSET],
        abi=abi,
        architecture=architecture,
        entries=tuple(sorted(name for name, is_entry in symbols if is_entry)),
        stacks=stacks,
    )


def _u16(image: bytes, offset: int) -> int:
    return int(struct.unpack_from("<H", image, offset)[0])


def _sections(image: bytes) -> Iterator[_Section]:
    (start,) = struct.unpack_from("<Q", image, 40)
    entry_size, count = _u16(image, 58), _u16(image, 60)
    for index in range(count):
        name, kind, flags, _, offset, size, link = struct.unpack_from("<IIQQQQI", image, start + index * entry_size)
        if kind != _SHT_NOBITS and offset + size > len(image):
            raise ValueError(f"section {index} ends at byte {offset + size}")
        yield _Section(name, kind, flags, offset, size, link)


def _string(image: bytes, table: _Section, offset: int) -> str:
    start = table.offset + offset
    return image[start : image.index(b"\0", start)].decode()


def _symbols(image: bytes, table: _Section, strings: _Section) -> Iterator[tuple[str, bool]]:
    for offset in range(table.offset, table.offset + table.size, 24):
        name, info, other, section = struct.unpack_from("<IBBH", image, offset)
        is_entry = info & 0xF == _STT_FUNC and bool(other & _STO_CUDA_ENTRY) and section != 0
        yield _string(image, strings, name), is_entry


def _info(data: bytes) -> Iterator[tuple[int, int, int]]:
    offset = 0
    while offset < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if kind != _FORMAT_SIZED:
            continue
        if size == 8:
            index, value = struct.unpack_from("<II", data, offset)
            yield attribute, index, value
        offset += size
