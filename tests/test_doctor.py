"""`ulysses doctor`: its rules, its self-tests on right and wrong kernels, and one whole run."""

import io
import subprocess
import sys
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from tests import npu_ops
from ulysses import structure
from ulysses.backends.ascend import AscendAttention
from ulysses.backends.ascend_layout import choose_layout
from ulysses.backends.ascend_operators import INFERENCE, TRAINING
from ulysses.backends.ascend_packed import pack
from ulysses.backends.ascend_sparse import sparse_arguments
from ulysses.backends.base import Band
from ulysses.backends.sdpa import SdpaAttention
from ulysses.launch import doctor_kernel
from ulysses.launch.cli import main
from ulysses.launch.doctor_check import ExchangeCheck, KernelCheck, RankReport
from ulysses.launch.doctor_environment import npu_findings
from ulysses.launch.doctor_exchange import exchange_checks
from ulysses.launch.doctor_finding import Advice, Fault
from ulysses.launch.doctor_kernel import LAYOUTS, cases, kernel_checks
from ulysses.launch.doctor_machine import version_findings
from ulysses.launch.doctor_network import Host, hccl_interface, interface_findings, this_host
from ulysses.launch.doctor_packed import SHOWS, packed_checks
from ulysses.launch.doctor_refusal import refusal_checks
from ulysses.launch.doctor_report import rank_faults, show_checks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors: threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def good(tmp_path):
    """Variables with which nothing is wrong."""
    paths = {"ASCEND_HOME_PATH": str(tmp_path), "ASCEND_OPP_PATH": str(tmp_path / "opp")}
    return {**paths, "HCCL_CONNECT_TIMEOUT": "600"}


def judged(environ, host=None):
    return npu_findings(environ, host or Host(interfaces=("lo", "eth0")))


def test_nothing_is_said_of_a_good_environment(good):
    fine = {"ASCEND_RT_VISIBLE_DEVICES": "0,2,10", "HCCL_SOCKET_IFNAME": "eth,bond"}
    assert judged(good | fine) == []


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"ASCEND_HOME_PATH": ""}, Fault, "set_env.sh was not sourced"),
        ({"ASCEND_HOME_PATH": "/no/such"}, Fault, "ASCEND_HOME_PATH=/no/such: there is no such"),
        ({"ASCEND_OPP_PATH": ""}, Fault, "ASCEND_OPP_PATH is not set"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1, 2"}, Fault, "reads it only up to the space"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "2,1"}, Fault, "'2,1': CANN takes ascending numbers"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,1"}, Fault, "each once"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0-3"}, Fault, "'0-3': not a list of numbers"),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, Fault, "hides every NPU"),
        ({"HCCL_CONNECT_TIMEOUT": "299"}, Advice, "HCCL_CONNECT_TIMEOUT=299: ranks that load"),
        ({"HCCL_CONNECT_TIMEOUT": "9000"}, Fault, "a whole number from 120 to 7200 is meant"),
        ({"HCCL_EXEC_TIMEOUT": "0"}, Advice, "HCCL_EXEC_TIMEOUT=0: a collective that a rank"),
        ({"HCCL_EXEC_TIMEOUT": "1868"}, Fault, "events must outlast collectives"),
        ({"HCCL_IF_BASE_PORT": "80"}, Fault, "from 1024 to 65520"),
        ({"HCCL_IF_BASE_PORT": "65520"}, Fault, "65520-65551"),
        ({"MASTER_PORT": "60031"}, Fault, "60000-60031 (HCCL_IF_BASE_PORT=not set) hold MASTER"),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"},
            Fault,
            "are both set: torch_npu aborts",
        ),
        ({"TASK_QUEUE_ENABLE": "2"}, Advice, "told later"),
        ({"TASK_QUEUE_ENABLE": "3"}, Fault, "TASK_QUEUE_ENABLE='3'"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, Advice, "ASCEND_LAUNCH_BLOCKING=1"),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, Fault, "one communicator only may use it"),
        ({"HCCL_ALGO": "level0:NA;level1:ring"}, Advice, "not all meant for all-to-all"),
        ({"HCCL_BUFFSIZE": "lots"}, Fault, "HCCL_BUFFSIZE='lots'"),
        ({"RANK_TABLE_FILE": "/no/such"}, Fault, "it has to be a file"),
        ({"HCCL_SOCKET_IFNAME": "=eth"}, Fault, "no such network interface; here are lo, eth0"),
        ({"HCCL_IF_IP": "node0"}, Fault, "HCCL_IF_IP=node0: not an IP address"),
    ],
)
def test_a_wrong_variable_is_named_with_the_way_out(good, changes, kind, text):
    (finding,) = judged(good | changes)
    assert type(finding) is kind
    assert text in finding.what
    assert finding.mend


def test_an_unset_connect_timeout_is_advised(good):
    del good["HCCL_CONNECT_TIMEOUT"]
    (finding,) = judged(good)
    assert isinstance(finding, Advice)
    assert "set it to 600" in finding.mend


def test_ports_that_the_system_lends_are_to_be_reserved(good):
    host = Host(interfaces=("eth0",), lent_ports=frozenset(range(32768, 61000)))
    (finding,) = judged(good, host)
    assert isinstance(finding, Advice)
    assert finding.mend == "sysctl -w net.ipv4.ip_local_reserved_ports=60000-60031"
    assert judged(good | {"HCCL_IF_BASE_PORT": "20000"}, host) == []
    assert judged(good | {"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, host) == []


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, "bond0"),
        ({"HCCL_SOCKET_IFNAME": "eth"}, "eth0"),
        ({"HCCL_SOCKET_IFNAME": "=eth1"}, "eth1"),
        ({"HCCL_SOCKET_IFNAME": "^bond,eth"}, "docker0"),
        ({"HCCL_SOCKET_IFNAME": "^=bond0"}, "eth0"),
        ({"HCCL_IF_IP": "10.0.0.1"}, "that of 10.0.0.1"),
    ],
)
def test_the_interface_that_hccl_chooses(environ, chosen):
    assert hccl_interface(environ, ("lo", "docker0", "eth1", "eth0", "bond0")) == chosen


def test_gloo_names_an_interface_whole():
    assert interface_findings({"GLOO_SOCKET_IFNAME": "eth0"}, ("eth0",)) == []
    assert interface_findings({"GLOO_SOCKET_IFNAME": "eth"}, ("eth0",))


def test_this_host_has_interfaces():
    assert this_host().interfaces


@pytest.mark.parametrize(
    ("torch_version", "npu_version", "text"),
    [
        ("2.7.1+cpu", "2.7.1.post2", None),
        ("2.13.0", "2.13.0rc1", None),
        ("2.13.0", "2.9.0", "torch_npu 2.9.0 is built for torch 2.9.0, and torch is 2.13.0"),
        ("2.7.0", "2.7.1", "torch_npu 2.7.1 is built for torch 2.7.1"),
        ("2.7.0", None, "torch_npu is not installed"),
    ],
)
def test_versions(torch_version, npu_version, text):
    found = version_findings(torch_version, npu_version)
    assert [type(finding) for finding in found] == ([] if text is None else [Fault])
    assert all(text in finding.what for finding in found)


def test_the_cases_cover_what_the_ascend_kernel_may_ask():
    """Each layout and sparse mode that it chooses, from the case's own tensors."""
    modes = {shows: sparse_arguments(c.band, c.num_queries, c.num_keys) for shows, c, _ in cases()}
    found = {shows: (sparse.mode, sparse.has_empty_rows) for shows, sparse in modes.items()}
    assert found == {
        "all": (0, False),
        "top left": (2, False),
        "bottom right": (3, False),
        "window": (4, False),
        "empty rows": (3, True),
        "mask": (0, False),
        "long": (3, False),
    }
    assert {layouts for *_, layouts in cases()} == {("SBND",), (*LAYOUTS,)}
    assert {shows for shows, case, _ in cases() if case.sinks} == {"mask"}
    case = next(case for _, case, _ in cases())
    chosen = []
    for memory in LAYOUTS.values():
        laid_out = doctor_kernel.replace(case, memory=(memory,) * 3)
        layout = choose_layout(*laid_out.tensors(torch.bfloat16, CPU), may_fold=True)
        chosen.append("SBND" if layout.folds_batch else layout.name)
    assert chosen == list(LAYOUTS)
    packed = [pack(structure.packed((0, 37, 38, 64), 64, band).pieces) for band in SHOWS.values()]
    assert [each.sparse.mode for each in packed] == [0, 3, 4]


class _UniformAverage(SdpaAttention):
    """What one stack gave for full attention without a mask."""

    def __call__(self, query, key, value, **options):
        options["scale"] = 0.0
        return super().__call__(query, key, value, **options)


class _TopLeft(SdpaAttention):
    """Reads a bottom-right causal mask from the top left."""

    def __call__(self, query, key, value, *, band, scale, **options):
        if band.lower is None and band.upper is not None:
            band = type(band)(None, 0)
        return super().__call__(query, key, value, band=band, scale=scale, **options)


class _InfiniteLse(SdpaAttention):
    """Rows without keys have a log-sum-exp of +inf, as Ascend's operators say it."""

    def attend_with_lse(self, *tensors, **options):
        out, lse = super().attend_with_lse(*tensors, **options)
        return out, lse.abs()


class _AverageOfDocuments(SdpaAttention):
    """What one stack gave for full attention of packed documents, in one call."""

    def attend_pieces(self, query, key, value, *, pieces, scale):
        del pieces, scale
        return super().__call__(query, key, value, band=Band(), scale=0.0)


class _NoGradientOfKey(SdpaAttention):
    def __call__(self, query, key, value, **options):
        return super().__call__(query, key * 1 + (key - key.detach()), value, **options)


@pytest.fixture
def few_cases(monkeypatch):
    """One dtype and one head dim: the faults below show in any."""
    monkeypatch.setattr(doctor_kernel, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(doctor_kernel, "_HEADS", ((64, 4, 2),))


@pytest.mark.parametrize(
    ("kernel", "where", "text"),
    [
        (_UniformAverage, {"all"}, "the plain average of the values: scores have no effect"),
        (_TopLeft, {"bottom right", "empty rows", "long"}, "output is off by"),
        (_InfiniteLse, {"empty rows"}, "log-sum-exp has a NaN or infinity where none belongs"),
        (_NoGradientOfKey, set(doctor_kernel.SHOWS), "gradient of key is off by"),
        (_AverageOfDocuments, set(SHOWS), "the plain average of the values"),
    ],
)
def test_a_wrong_kernel_is_named(few_cases, kernel, where, text):
    checks = (*kernel_checks(kernel(), CPU), *packed_checks(kernel(), CPU))
    wrong = {check.shows for check in checks if check.fault}
    assert where <= wrong
    assert any(text in check.fault for check in checks if check.fault)
    report = RankReport(0, stage=None, kernel=checks)
    assert any(text in fault.what for fault in rank_faults([report], 1))
    shown = io.StringIO()
    show_checks([report], Console(file=shown, width=80))
    assert "WRONG" in shown.getvalue()
    assert "…" not in shown.getvalue()


def test_the_kernel_is_right_and_head_counts_are_refused(few_cases):
    npu_ops.install()
    kernel = AscendAttention()
    checks = [*kernel_checks(kernel, CPU), *packed_checks(kernel, CPU), *refusal_checks(CPU)]
    assert [check for check in checks if check.fault] == []
    operators = {INFERENCE, TRAINING}
    assert {check.operator for check in checks} == operators
    packed = {(check.operator, check.shows) for check in checks if check.layout == "TND"}
    assert packed == {*product(operators, ("bottom right", "window")), (TRAINING, "all")}
    raised = [check for check in checks if check.error is None]
    assert {(check.operator, check.layout) for check in raised} == {
        (operator, layout) for operator in operators for layout in ("BSND", "BNSD")
    }


def test_an_accepted_head_count_is_a_fault(monkeypatch):
    npu_ops.install()
    accepting = lambda query, *_, **__: (query,)  # noqa: E731
    monkeypatch.setattr(torch.ops.npu, "npu_fusion_attention", accepting)
    faults = {check.operator: check.fault for check in refusal_checks(CPU)}
    assert faults["npu_fused_infer_attention_score"] is None
    assert faults["npu_fusion_attention"] == (
        "a head count of 20 is accepted for a tensor with 5 heads"
    )


def _exchanged(rank: int, num_ranks: int, fault: str) -> list[ExchangeCheck]:
    exchange = dist.all_to_all_single

    def faulty(received, sent, *splits, **options):
        work = exchange(received, sent, *splits, **options)
        if fault == "zeros":
            received.zero_()
        elif fault == "order":
            received.copy_(received.flip(0))
        return work

    if fault:
        dist.all_to_all_single = faulty
    try:
        return [check() for check in exchange_checks(CPU, dist.group.WORLD).values()]
    finally:
        dist.all_to_all_single = exchange


@pytest.mark.parametrize(
    ("fault", "text"),
    [("", None), ("zeros", "received zeros from rank 0"), ("order", "other values than were sent")],
)
def test_what_is_exchanged_is_checked_by_value(pool, monkeypatch, fault, text):
    monkeypatch.setattr("ulysses.launch.doctor_exchange._SIZES", {"4 KiB": 4096})
    checks = pool(3).run(_exchanged, fault)
    reports = [RankReport(rank, stage=None, exchange=tuple(own)) for rank, own in enumerate(checks)]
    names = {check.name for own in checks for check in own if check.fault}
    told = "; ".join(finding.what for finding in rank_faults(reports, 3))
    if text is None:
        assert not told
    else:
        assert {"all-to-all, even, 4 KiB", "all-to-all, uneven, 4 KiB"} <= names
        assert "all-to-all, even, 4 KiB, among 3 processes: rank 0" in told
        assert text in told


def test_a_rank_that_did_not_get_through_is_placed():
    check = KernelCheck(
        operator="sdpa", layout="BSND", dtype="float32", shows="all", sizes="", error=1e-6
    )
    reports = [RankReport(0, stage=None, kernel=(check,)), RankReport(1, "all-to-all, even")]
    assert [fault.what for fault in rank_faults(reports, 3)] == [
        "rank 1 of 3 did not get through all-to-all, even",
        "rank 2 of 3 did not get through the imports",
    ]


@pytest.mark.parametrize("words", [["--nproc", "0"], ["--timeout", "0"], ["--timeout", "nan"]])
def test_options_that_make_no_sense(capsys, words):
    assert main(["doctor", "--device", "cpu", *words]) == 2
    assert f"ulysses doctor: error: {words[0]}" in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys):
    assert main(["doctor", "--device", "npu"]) == 1
    assert "WRONG: --device npu: No NPU: torch_npu is not installed" in capsys.readouterr().out


@pytest.mark.usefixtures("forking")
def test_without_an_npu_one_line_says_so_and_gloo_is_tested(capfd):
    assert main(["doctor", "--nproc", "2"]) == 0
    out = capfd.readouterr().out
    assert "No NPU: torch_npu is not installed; sdpa and gloo are tested, on cpu\n" in out
    assert "To be trusted: 2 x cpu, kernels and all-to-all are right." in out


@pytest.mark.usefixtures("launching")
def test_a_rank_ends_when_its_time_is_up(tmp_path):
    """Alone, so that its own clock has to do it; the whole test takes longer than that."""
    command = [sys.executable, "-m", "ulysses.launch.doctor_rank", str(tmp_path), "cpu", "0.2"]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Not through after 0.2 s" in done.stderr
    assert time.monotonic() - start < 60
