"""Build the libraries that stand for CANN under the torch_npu wheel; start programs on them.

    python tests/simulated_npu/build.py                               # build, print the folder
    python tests/simulated_npu/build.py python train.py               # build, then run on the NPUs
    python tests/simulated_npu/build.py torchrun --nproc-per-node 4 train.py

The interpreter must have torch and torch_npu installed (`tests/simulated_npu/setup` makes a virtual
environment with both). The first build takes a minute or two; its results are kept in
$SIMNPU_CACHE, by default ~/.cache/simnpu, by the sources, torch, torch_npu and the compiler.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from stubs import write_stubs

SOURCES = Path(__file__).resolve().parent
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# A library is made of the sources whose names start so; every other source belongs to libopapi.
PREFIXES = {"ascendcl": "runtime_", "hccl": "hccl_", "acl_op_compiler": "compiler_"}
# torch_npu loads these by name and uses nothing of them on the paths that are simulated.
EMPTY = ["ge_runner", "graph", "acl_tdt_channel", "fmk_parser", "ascend_protobuf", "atb"]


def package_folder(name: str) -> Path:
    """Folder of an installed package, which is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"{name} is not installed for {sys.executable}; run tests/simulated_npu/setup and use "
            ".venv-npu/bin/python"
        )
    return Path(spec.submodule_search_locations[0])


def cache_root() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "simnpu"
    return Path(os.environ.get("SIMNPU_CACHE", default))


def run(command: list[str]) -> str:
    """Output of a command; its whole complaint when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()[:20]


def local_includes(source: Path, known: dict[Path, str] | None = None) -> dict[Path, str]:
    """Text of a source and of the headers of this folder that it includes, however deep."""
    known = {} if known is None else known
    if source in known or not source.is_file():
        return known
    known[source] = source.read_text()
    for name in re.findall(r'^#include "([^"]+)"', known[source], re.MULTILINE):
        for folder in (source.parent, SOURCES):
            local_includes((folder / name).resolve(), known)
    return known


class Build:
    """One build: the installed packages, the compiler and where the results go."""

    def __init__(self) -> None:
        self.wheel = package_folder("torch_npu")
        self.torch = package_folder("torch")
        self.identity = digest(
            version("torch"), version("torch_npu"), run([COMPILER, "--version"]), *FLAGS
        )
        self.sources = sorted(SOURCES.rglob("*.cpp"))
        texts = {
            path: text for source in self.sources for path, text in local_includes(source).items()
        }
        scripts = [(SOURCES / name).read_text() for name in ("build.py", "stubs.py")]
        self.root = cache_root()
        self.folder = self.root / digest(
            self.identity, *scripts, *(f"{path.name}\n{texts[path]}" for path in sorted(texts))
        )

    def includes(self, source: Path) -> list[str]:
        folders = [self.wheel / "include/third_party/acl/inc", self.wheel / "include"]
        if library_of(source) == "opapi":
            folders += [self.torch / "include", self.torch / "include/torch/csrc/api/include"]
        system = [argument for folder in folders for argument in ("-isystem", str(folder))]
        return [f"-I{SOURCES}", *system]

    def precompiled(self) -> Path:
        """ATen's headers, read once: they take most of the time that an operator's source takes."""
        header = self.root / f"aten-{self.identity}" / "aten.hpp"
        target = header.with_suffix(".hpp.gch")
        if not target.exists():
            header.parent.mkdir(exist_ok=True)
            header.write_text("#include <ATen/ATen.h>\n")
            self.make(target, ["-x", "c++-header", *self.includes(header), str(header)])
        return header

    def compile(self, source: Path) -> Path:
        """Object file of a source, from the cache where nothing that it includes has changed."""
        key = digest(self.identity, *local_includes(source).values())
        target = self.root / "objects" / f"{source.stem}-{key}.o"
        if not target.exists():
            first = ["-include", str(self.precompiled())] if library_of(source) == "opapi" else []
            self.make(target, [*first, *self.includes(source), "-c", str(source)])
        return target

    def make(self, target: Path, arguments: list[str]) -> None:
        unfinished = target.with_suffix(".unfinished")
        run([COMPILER, *FLAGS, *arguments, "-o", str(unfinished)])
        unfinished.rename(target)

    def link(self, folder: Path, library: str, objects: Iterable[Path], *needs: str) -> Path:
        name = f"lib{library}.so"
        command = [COMPILER, "-shared", "-o", str(folder / name), f"-Wl,-soname,{name}"]
        command += [*map(str, objects), f"-L{folder}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
        run([*command, *needs])
        return folder / name

    def link_all(self, folder: Path, objects: dict[str, list[Path]]) -> None:
        """Every library; libascendcl last of the first three, because it holds their stubs too."""
        # A first libascendcl without stubs, for the others to link with and to say what is missing.
        first = self.link(folder, "ascendcl", objects["ascendcl"])
        needs = [f"-l:{first.name}"]
        hccl = self.link(folder, "hccl", objects["hccl"], *needs)
        compiler = self.link(folder, "acl_op_compiler", objects["acl_op_compiler"], *needs)
        stubs = folder / "stubs.c"
        write_stubs(stubs, self.wheel, self.torch / "lib", [first, hccl, compiler])
        c_compiler = [COMPILER, "-x", "c", "-w", "-fno-builtin", "-fPIC", "-c", str(stubs)]
        run([*c_compiler, "-o", str(folder / "stubs.o")])
        self.link(folder, "ascendcl", [*objects["ascendcl"], folder / "stubs.o"])
        for library in EMPTY:
            self.link(folder, library, [])
        torch_libraries = [f"-L{self.torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        self.link(folder, "opapi", objects.get("opapi", []), *needs, *torch_libraries)

    def result(self) -> Path:
        """Folder like a CANN installation, built if need be; one process builds, others wait."""
        (self.root / "objects").mkdir(parents=True, exist_ok=True)
        with open(self.root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.folder.exists():
                return self.folder
            if any(library_of(source) == "opapi" for source in self.sources):
                self.precompiled()
            with ThreadPoolExecutor(os.cpu_count()) as workers:
                compiled = list(workers.map(self.compile, self.sources))
            objects: dict[str, list[Path]] = {}
            for source, target in zip(self.sources, compiled, strict=True):
                objects.setdefault(library_of(source), []).append(target)
            unfinished = Path(tempfile.mkdtemp(dir=self.root))
            try:
                # The folders of a CANN installation that torch_npu looks for when it is imported.
                for name in ("lib64", "opp", "runtime", "compiler"):
                    (unfinished / name).mkdir()
                install = unfinished / "ascend_toolkit_install.info"
                install.write_text("version=8.3.RC1\n")
                self.link_all(unfinished / "lib64", objects)
                unfinished.rename(self.folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        return self.folder


def library_of(source: Path) -> str:
    for library, prefix in PREFIXES.items():
        if source.name.startswith(prefix):
            return library
    return "opapi"


def environment() -> dict[str, str]:
    """This process's environment, changed so that a program started with it has simulated NPUs.

    What the caller has set already stays, but for the paths.
    """
    home = Build().result()
    libraries = [str(home / "lib64"), os.environ.get("LD_LIBRARY_PATH", "")]
    # What CANN's set_env.sh sets, as far as torch_npu reads it.
    paths = {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "SIMNPU_HOME": str(home),
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
    }
    defaults = {
        # torch_npu would run operators on a thread of its own, where a failure shows later.
        "TASK_QUEUE_ENABLE": "0",
        # A rank that waits for ever should fail within a test's patience (CANN: 1836 s).
        "HCCL_EXEC_TIMEOUT": "60",
        # torch_npu warns below 300.
        "HCCL_CONNECT_TIMEOUT": "300",
    }
    return {**defaults, **os.environ, **paths}


def main(command: list[str]) -> None:
    changed = environment()
    if not command:
        print(changed["ASCEND_HOME_PATH"])
        return
    # Tools of the interpreter's own virtual environment, torchrun above all, come first.
    changed["PATH"] = f"{Path(sys.executable).parent}:{changed['PATH']}"
    os.execvpe(command[0], command, changed)


if __name__ == "__main__":
    main(sys.argv[1:])
