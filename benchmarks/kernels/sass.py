"""What a kernel's machine code says of it: registers, local memory, and the instructions of its innermost loops."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernels.toolchain import disassembly, resource_usage

_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
# Access widths in bits by the suffix of an instruction; none of them: 32.
_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)$")


@dataclass(frozen=True)
class Loop:
    """An innermost loop. ops: instructions of one turn by opcode with modifiers, as LDG.E.NA.128."""

    ops: Counter[str]

    @property
    def instructions(self) -> int:
        return self.ops.total()

    @property
    def exponentials(self) -> int:
        return self.ops["MUFU.EX2"]

    def widths(self, *opcodes: str) -> Counter[int]:
        """Accesses of one turn by bits, of opcodes such as LDG and STS."""
        found: Counter[int] = Counter()
        for op, count in self.ops.items():
            if op.split(".")[0] in opcodes:
                suffix = _WIDTH.search(op)
                found[int(suffix.group(1).lstrip("US")) if suffix else 32] += count
        return found

    def bytes(self, *opcodes: str) -> int:
        """That one thread moves in one turn."""
        return sum(bits // 8 * count for bits, count in self.widths(*opcodes).items())


@dataclass(frozen=True)
class Kernel:
    """registers: of a thread. stack: bytes of a thread. local_accesses: instructions that spill or index local memory.

    double: instructions on float64. straight: instructions outside innermost loops.
    """

    registers: int
    stack: int
    local_accesses: int
    double: int
    straight: int
    loops: tuple[Loop, ...]


def kernels_of(cubin: Path) -> dict[str, Kernel]:
    """Kernels of a cubin by symbol."""
    usage = _usage(resource_usage(cubin))
    return {symbol: _kernel(text, *usage[symbol]) for symbol, text in _functions(disassembly(cubin)).items()}


def _usage(text: str) -> dict[str, tuple[int, int]]:
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", text)
    return {symbol: (int(registers), int(stack)) for symbol, registers, stack in found}


def _functions(text: str) -> dict[str, list[str]]:
    functions: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if heading := re.match(r"\.text\.(\S+):", line):
            lines = functions.setdefault(heading.group(1), [])
        elif line.startswith("//---------------------"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return functions


def _kernel(lines: list[str], registers: int, stack: int) -> Kernel:
    ops: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in lines:
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(ops)
        elif instruction := _INSTRUCTION.search(line):
            op, operands = instruction.groups()
            if op.split(".")[0] == "BRA" and (target := _TARGET.search(operands)):
                jumps.append((len(ops), target.group(1)))
            ops.append(op)
    spans = {(labels[target], at) for at, target in jumps if labels[target] <= at}
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    loops = tuple(Loop(Counter(ops[first : last + 1])) for first, last in sorted(inner))
    families = Counter(op.split(".")[0] for op in ops)
    return Kernel(
        registers=registers,
        stack=stack,
        local_accesses=families["LDL"] + families["STL"],
        double=sum(families[name] for name in ("DADD", "DMUL", "DFMA", "DSETP")),
        straight=len([op for op in ops if op != "NOP"]) - sum(loop.instructions for loop in loops),
        loops=loops,
    )
