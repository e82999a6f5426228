"""What torch_npu needs when it is loaded and the simulated NPU does not have.

A function becomes one that prints its own name and ends the process: never a silent 0. A table of
virtual functions or of type information becomes zeros. Nothing here is known beforehand; it is the
difference between what the wheel's libraries ask for and what the others define.
"""

import subprocess
from pathlib import Path

# Libraries of every Linux system that the wheel links with.
SYSTEM = ["ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"]


def symbols(library: Path, which: str) -> dict[str, str]:
    """Dynamic symbols without their versions, with the letter that nm gives them."""
    output = subprocess.run(
        ["nm", "-D", which, str(library)], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in output.splitlines()]
    return {row[-1].split("@")[0]: row[-2] for row in rows}


def system_libraries() -> list[Path]:
    """Where this machine keeps SYSTEM, as its dynamic loader knows them."""
    listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(" => ") for line in listing.splitlines() if " => " in line]
    return [Path(path) for name, path in rows if name.split()[0] in SYSTEM and "x86-64" in name]


def missing(wheel: Path, torch_libraries: Path, simulated: list[Path]) -> list[str]:
    asking = [
        *wheel.glob("lib/*.so"),
        *wheel.glob("_C*.so"),
        *wheel.glob("dynamo/torchair/core/*.so"),
    ]
    giving = [*asking, *simulated, *torch_libraries.glob("*.so*"), *system_libraries()]
    defined = {name for library in giving for name in symbols(library, "--defined-only")}
    wanted = {
        name
        for library in asking
        for name, letter in symbols(library, "--undefined-only").items()
        if letter != "w" and not name.startswith(("Py", "_Py"))
    }
    return sorted(wanted - defined)


def write_stubs(target: Path, wheel: Path, torch_libraries: Path, simulated: list[Path]) -> None:
    lines = ["extern void simnpu_unimplemented(const char*);"]
    for name in missing(wheel, torch_libraries, simulated):
        if name.startswith(("_ZTV", "_ZTI")):
            lines.append(f"void* {name}[64];")
        else:
            lines.append(f'long {name}(void) {{ simnpu_unimplemented("{name}"); return 0; }}')
    target.write_text("\n".join(lines) + "\n")
