"""How the doctor's results read: tables, and each thing that is wrong with the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ulysses.launch.doctor_check import ExchangeCheck, KernelCheck, RankReport
from ulysses.launch.doctor_finding import Fault, Finding

_MEND_OPERATOR = (
    "don't use it with these versions: try other versions of CANN and torch_npu, and report the "
    "table above to their vendor"
)
_MEND_KERNEL = "try another version of torch, and report the table above"
_MEND_EXCHANGE = (
    "don't train or serve on these devices together: see links and drivers (npu-smi info, "
    "nvidia-smi topo -m), and try other versions"
)
_MEND_ABSENT = (
    "its error or the place where it stood is above; see that no other job holds the devices or "
    "the ports, or give it longer with --timeout"
)


def show_facts(facts: Sequence[tuple[str, str]], console: Console) -> None:
    """Versions, devices and variables."""
    table = Table(show_header=False)
    for name, value in facts:
        table.add_row(name, escape(value))
    console.print(table)


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """One paragraph each, faults last, where they are read."""
    for finding in sorted(findings, key=lambda finding: isinstance(finding, Fault)):
        word = "[red]WRONG[/]" if isinstance(finding, Fault) else "[yellow]advice[/]"
        console.print(f"{word}: {escape(finding.what)}", soft_wrap=True)
        console.print(f"   mend: {escape(finding.mend)}", soft_wrap=True)


def show_checks(reports: Sequence[RankReport], console: Console) -> None:
    """A table for each operator and one for the exchange, the worst of all ranks in each cell."""
    for operator, seen in _by_operator(reports).items():
        console.print(_kernel_table(operator, [check for _, check in seen]))
    if by_name := _by_name(reports):
        console.print(_exchange_table(by_name))


def rank_faults(reports: Sequence[RankReport], num_ranks: int) -> list[Fault]:
    """What the checks of all ranks say is wrong."""
    faults = [_kernel_fault(name, seen) for name, seen in _by_operator(reports).items()]
    for name, checks in _by_name(reports).items():
        if said := [check.fault for check in checks if check.fault]:
            what = f"{name}, among {num_ranks} processes: {'; '.join(said)}"
            faults.append(Fault(what, _MEND_EXCHANGE))
    return [fault for fault in faults if fault] + _absent(reports, num_ranks)


def _by_operator(reports: Sequence[RankReport]) -> dict[str, list[tuple[int, KernelCheck]]]:
    found: dict[str, list[tuple[int, KernelCheck]]] = {}
    for report in reports:
        for check in report.kernel:
            found.setdefault(check.operator, []).append((report.rank, check))
    return found


def _by_name(reports: Sequence[RankReport]) -> dict[str, list[ExchangeCheck]]:
    found: dict[str, list[ExchangeCheck]] = {}
    for report in reports:
        for check in report.exchange:
            found.setdefault(check.name, []).append(check)
    return found


def _kernel_fault(operator: str, seen: Sequence[tuple[int, KernelCheck]]) -> Fault | None:
    """One fault for an operator, however many checks it failed, with the first of each kind."""
    kinds: dict[str, str] = {}
    for rank, check in seen:
        if check.fault:
            place = f"{check.dtype}, {check.layout}, {check.shows}, {check.sizes}, rank {rank}"
            kinds.setdefault(check.fault.partition(" is off by")[0], f"{place}: {check.fault}")
    if not kinds:
        return None
    wrong = sum(check.fault is not None for _, check in seen)
    mend = _MEND_OPERATOR if operator.startswith("npu_") else _MEND_KERNEL
    told = "\n     ".join(list(kinds.values())[:8])
    return Fault(f"{operator} fails {wrong} of {len(seen)} checks, such as\n     {told}", mend)


def _absent(reports: Sequence[RankReport], num_ranks: int) -> list[Fault]:
    stages: dict[int, str | None] = dict.fromkeys(range(num_ranks), "the imports")
    stages.update((report.rank, report.stage) for report in reports)
    return [
        Fault(f"rank {rank} of {num_ranks} did not get through {stage}", _MEND_ABSENT)
        for rank, stage in stages.items()
        if stage is not None
    ]


def _kernel_table(operator: str, checks: Sequence[KernelCheck]) -> Table:
    columns = list(dict.fromkeys(check.shows for check in checks))
    rows: dict[tuple[str, str], dict[str, list[KernelCheck]]] = {}
    for check in checks:
        row = rows.setdefault((check.dtype, check.layout), {})
        row.setdefault(check.shows, []).append(check)
    title = f"{operator}: largest relative error of {len(checks)} calls"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)  # to fit 80 columns
    for name in ("dtype", "layout", *columns):
        table.add_column(name, justify="right" if name in columns else "left")
    for row_name, row in rows.items():
        table.add_row(*row_name, *(_cell(row.get(name, [])) for name in columns))
    return table


def _cell(checks: Sequence[KernelCheck]) -> str:
    if any(check.fault for check in checks):
        return "[red]WRONG[/]"
    errors = [check.error for check in checks if check.error is not None]
    if errors:
        return f"{max(errors):.0e}"
    return "raises" if checks else ""


def _exchange_table(by_name: Mapping[str, Sequence[ExchangeCheck]]) -> Table:
    table = Table(title="among all processes")
    for name in ("", "slowest", "GB/s a rank", "values"):
        table.add_column(name, justify="right" if name else "left")
    for name, checks in by_name.items():
        seconds = max(check.seconds for check in checks)
        most = max(check.num_bytes for check in checks)
        wrong = any(check.fault for check in checks)
        table.add_row(
            name,
            f"{seconds * 1e3:.2f} ms",
            f"{most / seconds / 1e9:.2f}" if most else "",
            "[red]WRONG[/]" if wrong else "right",
        )
    return table
