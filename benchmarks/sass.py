"""What a kernel's machine code (SASS) says of its speed, as NVIDIA's disassembler prints it."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);")
LABEL = re.compile(r"^\s*(\.L_x_\d+):")
REGISTER = re.compile(r"\bR(\d+)\b")


class MachineCode(NamedTuple):
    """The code of one kernel.

    Args:
        registers: of a thread.
        spilled_bytes: of a thread, in local memory because registers do not suffice.
        load_rounds: how many times the program waits for rows from memory, a token. Loads between
            which it waits for none are one round.
        barriers: how many times the warps of a program wait for each other, a token.
        instructions: that a warp runs a token.
    """

    registers: int
    spilled_bytes: int
    load_rounds: int
    barriers: int
    instructions: int


class Instruction(NamedTuple):
    """An instruction: its opcode without and with modifiers, and its operands."""

    name: str
    opcode: str
    operands: str


def read_machine_code(binary: Any) -> MachineCode:
    """The code of a kernel that `triton.compile` returned.

    Raises:
        ValueError: triton comes without NVIDIA's disassemblers.
    """
    from triton import knobs

    try:
        tools = knobs.nvidia.nvdisasm.path, knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        raise ValueError(f"{error}; triton's wheel from PyPI has it") from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        listing = _run_tool(tools[0], "-c", str(file))
        usage = _run_tool(tools[1], "--dump-resource-usage", str(file))
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    body = outermost_loop(listing)
    return MachineCode(
        registers=int(registers),
        spilled_bytes=int(stack),
        load_rounds=count_load_rounds(body),
        barriers=sum(instruction.name == "BAR" for instruction in body),
        instructions=len(body),
    )


def _run_tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def outermost_loop(listing: str) -> list[Instruction]:
    """The instructions of the longest loop, which is the one over tokens; of all if none loops."""
    code: list[Instruction] = []
    position: dict[str, int] = {}  # of labels
    for line in listing.splitlines():
        label = LABEL.match(line)
        instruction = INSTRUCTION.search(line)
        if label:
            position[label[1]] = len(code)
        elif instruction:
            opcode, operands = instruction.groups()
            code.append(Instruction(opcode.split(".")[0], opcode, operands))
    longest = code
    length = 0
    for end, instruction in enumerate(code):
        target = re.search(r"\.L_x_\d+", instruction.operands)
        if instruction.name != "BRA" or target is None:
            continue
        begin = position.get(target[0], end)
        if end - begin > length:
            length = end - begin
            longest = code[begin : end + 1]
    return longest


def count_load_rounds(code: list[Instruction]) -> int:
    """How many latencies of memory a warp waits for, if all else takes no time.

    A warp runs its instructions in order. It waits at the first instruction that reads or writes a
    register that a load has yet to fill. What was loaded before that wait arrives meanwhile. Rows
    are loaded 8 or 16 bytes at once. Single numbers do not count: those of a token share a line of
    the cache, and most are there.
    """
    now = 0
    arrival: dict[int, int] = {}  # of the registers that wait for memory
    for name, opcode, operands in code:
        registers = [int(number) for number in REGISTER.findall(operands)]
        if name.startswith("ST"):  # the last operand is as wide as the store
            registers += _wide_register(registers, opcode)
        if name == "LDG":
            registers += _wide_register(registers[:1], opcode)
        for register in registers:
            now = max(now, arrival.pop(register, 0))
        if name == "LDG" and (".64" in opcode or ".128" in opcode):
            for register in _wide_register(registers[:1], opcode):
                arrival[register] = now + 1
    return max([now, *arrival.values()])


def _wide_register(registers: list[int], opcode: str) -> list[int]:
    """The registers of an operand of 64 or 128 bits, given a list that ends with its first one."""
    width = 4 if ".128" in opcode else 2 if ".64" in opcode else 1
    return [register + i for register in registers[-1:] for i in range(width)]
