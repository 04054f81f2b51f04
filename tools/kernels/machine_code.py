"""What the text of a compiled kernel says of it: registers, spills, matrix instructions, work. Text in, figures out."""

import re
from dataclasses import dataclass

# By target, as disassemblers write them; and what they are called in the language above.
MATRIX = {
    "HMMA": "mma",
    "HGMMA": "wgmma",
    "UTCHMMA": "tcgen05",
    "UTCQMMA": "tcgen05",
    "UTCOMMA": "tcgen05",
    "v_mfma": "mfma",
}
_MATRIX = re.compile(rf"(?:{'|'.join(MATRIX)})(?:[._].*)?$")
_PRODUCT = re.compile(rf"{_MATRIX.pattern}|FFMA|v_fma|v_pk_fma")
_SPECIAL = re.compile(r"MUFU|v_(?:exp|log|rcp|rsq|sqrt)_f32")
_SASS = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>[^;]*)")
_AMDGCN = re.compile(r"\s+(?P<opcode>[a-z]\w*)(?P<rest>[^;]*)")
_LABEL = re.compile(r"(\.L\w+):")


@dataclass(frozen=True)
class Work:
    """What a thread executes: instructions, and those among them that are left to the special-function unit."""

    instructions: int = 0
    special: int = 0


@dataclass(frozen=True)
class Figures:
    """Of one compiled kernel.

    Attributes:
        registers: Per thread; on AMD vector registers, accumulators among them.
        spills: Instructions that access what did not fit (NVIDIA), or registers that did not fit (AMD).
        stack: Bytes per thread.
        shared: Bytes per block.
        matrix: The matrix instructions, as the disassembler writes them.
        loop: One turn of the loop that multiplies; of a kernel that does not, of any.
        rest: Everything else, as if all of it were executed: both sides of a branch count.
    """

    registers: int
    spills: int
    stack: int
    shared: int
    matrix: tuple[str, ...]
    loop: Work
    rest: Work


def of_nvidia(resources: str, sass: str, shared: int) -> Figures:
    """From the output of `cuobjdump --dump-resource-usage` and of `nvdisasm -c`."""
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    stack = _number(r"\bSTACK:(\d+)", resources) + _number(r"\bLOCAL:(\d+)", resources)
    matrix, loop, rest = _work(sass, _SASS)
    return Figures(_number(r"\bREG:(\d+)", resources), spills, stack, shared, matrix, loop, rest)


def of_amd(assembly: str, shared: int) -> Figures:
    """From LLVM's assembly, the metadata at its end included."""
    spills = sum(_number(rf"\.{kind}_spill_count:\s*(\d+)", assembly) for kind in ("vgpr", "sgpr"))
    stack = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    matrix, loop, rest = _work(assembly.partition("s_endpgm")[0], _AMDGCN)
    # vgpr_count is the total where the register file is one, as on gfx942: accumulators are in it.
    return Figures(_number(r"\.vgpr_count:\s*(\d+)", assembly), spills, stack, shared, matrix, loop, rest)


def forbidden_operations(ttir: str) -> list[str]:
    """What no kernel may do: results would depend on the order of blocks, or on one vendor's assembly."""
    found = []
    if re.search(r"\btt\.atomic|\batomic_", ttir):
        found.append("atomics")
    if "inline_asm" in ttir:
        found.append("inline assembly")
    return found


def family(matrix: tuple[str, ...]) -> str:
    """mma, wgmma, tcgen05 or mfma, and the instructions; none where float32 is multiplied as it is."""
    names = sorted({name for opcode in matrix for prefix, name in MATRIX.items() if opcode.startswith(prefix)})
    return f"{'/'.join(names)} ({', '.join(matrix)})" if names else "none"


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"kernels: a compiler's report must hold {pattern!r}. Is this version of Triton known?")
    return int(found.group(1))


def _work(text: str, instruction: re.Pattern[str]) -> tuple[tuple[str, ...], Work, Work]:
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label.group(1)] = len(opcodes)
        elif (found := instruction.match(line)) and found["opcode"] not in ("NOP", "s_nop"):
            opcodes.append(found["opcode"])
            goal = re.search(r"\.L\w+", found["rest"])
            if goal and labels.get(goal.group(), len(opcodes)) < len(opcodes) - 1:  # backwards, and not to itself
                loops.append((labels[goal.group()], len(opcodes)))
    matrix = tuple(sorted({opcode for opcode in opcodes if _MATRIX.match(opcode)}))
    start, stop = max(loops, key=lambda ends: _loop_rank(opcodes[ends[0] : ends[1]]), default=(0, 0))
    return matrix, _count(opcodes[start:stop]), _count(opcodes[:start] + opcodes[stop:])


def _loop_rank(opcodes: list[str]) -> tuple[int, int, int]:
    """The most products, in the fewest instructions: what jumps back from afar is a branch out of line."""
    matrix, products = (sum(bool(kind.match(opcode)) for opcode in opcodes) for kind in (_MATRIX, _PRODUCT))
    return matrix, products, -len(opcodes)


def _count(opcodes: list[str]) -> Work:
    return Work(len(opcodes), sum(bool(_SPECIAL.match(opcode)) for opcode in opcodes))
