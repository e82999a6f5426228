"""How HCCL and gloo find their peers: timeouts, ports and network interfaces."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from ulysses.launch.doctor_finding import Advice, Fault, Finding
from ulysses.launch.environment import CONNECT_TIMEOUT

_SHORT_CONNECT_TIMEOUT = 300  # seconds; torch_npu warns below it, too
_FIRST_PORT, _NUM_PORTS, _LAST_PORT = 60000, 32, 65535  # 16 ports before CANN 8.2
_EXEC_TIMEOUT, _EVENT_TIMEOUT = 1836, 1868  # seconds, CANN's defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the rules need to know of a machine: interface names, and ports given to anybody."""

    interfaces: tuple[str, ...] = ()
    lent_ports: frozenset[int] = frozenset()


def this_host() -> Host:
    """The host that this process runs on; without Linux's /proc no port counts as lent."""
    settings = Path("/proc/sys/net/ipv4")
    lent: set[int] = set()
    if (ports := settings / "ip_local_port_range").is_file():
        first, last = map(int, ports.read_text().split())
        lent = set(range(first, last + 1))
    if (ports := settings / "ip_local_reserved_ports").is_file():
        for part in filter(None, ports.read_text().strip().split(",")):
            ends = [int(end) for end in part.split("-")]
            lent -= set(range(ends[0], ends[-1] + 1))
    names = tuple(name for _, name in socket.if_nameindex())
    return Host(interfaces=names, lent_ports=frozenset(lent))


def network_findings(environ: Mapping[str, str], host: Host) -> list[Finding]:
    """What keeps HCCL's processes from meeting, or makes them wait without end."""
    return [*_timeouts(environ), *_ports(environ, host.lent_ports)]


def interface_findings(environ: Mapping[str, str], interfaces: Sequence[str]) -> list[Finding]:
    """Variables that name an interface which is not there; gloo's matter on a CPU, too."""
    found: list[Finding] = []
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = environ.get(name)
        if value is None:
            continue
        exact = not name.startswith("HCCL")
        if not _matching(f"={value}" if exact else value, interfaces):
            found.append(
                Fault(
                    f"{name}={value}: no such network interface; here are {', '.join(interfaces)}",
                    f"name one of these in {name}, or unset it",
                )
            )
    if value := environ.get("HCCL_IF_IP"):
        try:
            ip_address(value)
        except ValueError:
            found.append(
                Fault(f"HCCL_IF_IP={value}: not an IP address", "unset it, or give the host's")
            )
    return found


def hccl_interface(environ: Mapping[str, str], interfaces: Sequence[str]) -> str:
    """The interface by which HCCL's processes meet, in the order in which HCCL chooses one."""
    if address := environ.get("HCCL_IF_IP"):
        return f"that of {address}"
    named = _matching(environ.get("HCCL_SOCKET_IFNAME", ""), interfaces)
    rank = {"docker": 1, "lo": 2}
    ordered = sorted(named, key=lambda name: (rank.get(name.rstrip("0123456789"), 0), name))
    return ordered[0] if ordered else "none"


def _matching(pattern: str, interfaces: Sequence[str]) -> list[str]:
    """HCCL's syntax: `eth,bond` are beginnings, `=eth0` is a name, `^` before it all excludes."""
    excludes = pattern.startswith("^")
    exact = pattern.removeprefix("^").startswith("=")
    words = pattern.removeprefix("^").removeprefix("=").split(",")
    return [
        name
        for name in interfaces
        if excludes != any(name == word if exact else name.startswith(word) for word in words)
    ]


def _timeouts(environ: Mapping[str, str]) -> Iterator[Finding]:
    name = "HCCL_CONNECT_TIMEOUT"
    if name not in environ:
        yield Advice(
            f"{name} is not set: ranks that start over 120 s apart don't meet",
            f"set it to {CONNECT_TIMEOUT}, as `ulysses launch` does",
        )
    elif _number(environ, name, 0) < _SHORT_CONNECT_TIMEOUT:
        yield Advice(
            f"{name}={environ[name]}: ranks that load weights or compile start further apart",
            f"set it to {CONNECT_TIMEOUT}",
        )
    execution = _number(environ, "HCCL_EXEC_TIMEOUT", _EXEC_TIMEOUT)
    event = _number(environ, "HCCL_EVENT_TIMEOUT", _EVENT_TIMEOUT)
    if execution == 0:
        yield Advice(
            "HCCL_EXEC_TIMEOUT=0: a collective that a rank missed waits for ever",
            f"unset it ({_EXEC_TIMEOUT} s), or give seconds",
        )
    elif 0 < event <= execution:
        yield Fault(
            f"HCCL_EVENT_TIMEOUT={event}, HCCL_EXEC_TIMEOUT={execution}: events must outlast "
            "collectives",
            f"set HCCL_EVENT_TIMEOUT={execution + 32}",
        )


def _ports(environ: Mapping[str, str], lent: frozenset[int]) -> Iterator[Finding]:
    if "HCCL_HOST_SOCKET_PORT_RANGE" in environ:  # the other variable is then ignored
        return
    name = "HCCL_IF_BASE_PORT"
    first = _number(environ, name, _FIRST_PORT)
    ports = range(first, first + _NUM_PORTS)
    said = f"HCCL's ports {ports[0]}-{ports[-1]} ({name}={environ.get(name, 'not set')})"
    if ports[-1] > _LAST_PORT:
        yield Fault(f"{said} end beyond {_LAST_PORT}", f"set {name}={_FIRST_PORT} or lower")
    if _number(environ, "MASTER_PORT", 0) in ports:
        yield Fault(
            f"{said} hold MASTER_PORT={environ['MASTER_PORT']}", "choose another MASTER_PORT"
        )
    if lent.intersection(ports):
        yield Advice(
            f"{said} are among those that the system lends to any program",
            f"sysctl -w net.ipv4.ip_local_reserved_ports={ports[0]}-{ports[-1]}",
        )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """The variable's value, or the default for what is no number, which another rule tells."""
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else default
