"""Each way to break the Ascend kernel, or the exchange, turns a test of this folder red."""

import pytest
import torch

from tests.npu.layer_cases import CASES as CALLS
from tests.npu.layer_cases import differences
from tests.npu.mutation import Mutation, broken
from tests.pool import WorkerError
from ulysses.backends.ascend import AscendAttention
from ulysses.conformance import CASES
from ulysses.conformance_checks import Subject
from ulysses.conformance_dropout import check_dropout
from ulysses.conformance_pieces import check_pieces

KERNEL = "ulysses.backends.ascend"
OPERATORS, MASK, SPARSE = f"{KERNEL}_operators", f"{KERNEL}_mask", f"{KERNEL}_sparse"
HEADS = "call.num_heads"
_CASES = {case.name: case for case in CASES}


def forward(name):
    return lambda subject: subject.check_forward(_CASES[name])


def backward(name):
    return lambda subject: subject.check_backward(_CASES[name])


# What breaks, and the check of the kit (tests/npu/test_backend.py) that sees it.
MUTATIONS = {
    "a head count cached, inference": (
        Mutation(
            OPERATORS, f"num_heads={HEADS}", f"num_heads=vars(infer).setdefault('n', {HEADS})"
        ),
        Subject.check_head_counts_in_turn,
    ),
    "a head count cached, training": (
        Mutation(OPERATORS, f"            {HEADS},", f"vars(train).setdefault('n', {HEADS}),"),
        Subject.check_head_counts_in_turn,
    ),
    "key/value heads left out": (
        Mutation(OPERATORS, "num_key_value_heads=call.key.shape[call.layout.heads_dim],", ""),
        forward("grouped heads"),
    ),
    "the mask not inverted": (Mutation(MASK, "~mask if", "mask if"), forward("key padding")),
    "the triangle not inverted": (
        Mutation(KERNEL, "ones.triu(1)", "ones.tril()"),
        forward("causal"),
    ),
    "scale left out, inference": (
        Mutation(OPERATORS, "\n        scale=call.scale,", ""),
        forward("plain"),
    ),
    "scale left out, training": (
        Mutation(OPERATORS, "\n            scale=call.scale,", ""),
        backward("plain"),
    ),
    "sparse_mode 2 where 3 is right, inference": (
        Mutation(SPARSE, "mode = 3", "mode = 2"),
        forward("causal from the bottom right, more keys"),
    ),
    "sparse_mode 2 where 3 is right, training": (
        Mutation(SPARSE, "mode = 3", "mode = 2"),
        backward("causal from the bottom right, more keys"),
    ),
    "the sides of a window swapped": (
        Mutation(SPARSE, "(mode, pre_tokens, next_tokens", "(mode, next_tokens, pre_tokens"),
        forward("window to both sides"),
    ),
    "keys and values not contiguous": (
        Mutation(f"{KERNEL}_layout", "ordered = ordered.contiguous()", "pass"),
        forward("memory BHDS"),
    ),
    "a mask for each head given to the inference operator": (
        Mutation(f"{KERNEL}_limits", "and not _has_mask_per_head(problem)", ""),
        forward("bool mask of each head"),
    ),
    "a mask broadcast": (
        Mutation(MASK, "hidden = hidden.expand(-1, -1, num_queries, num_keys)", "pass"),
        forward("key padding"),
    ),
    "a bias scaled twice": (
        Mutation(KERNEL, "over = 1.0 if name == INFERENCE else asked.scale", "over = 1.0"),
        backward("float mask"),
    ),
    "the log-sum-exp of empty rows as it comes": (
        Mutation(f"{KERNEL}_rows", "= -torch.inf", "= lse[:, :0]"),
        Subject.check_log_sum_exp,
    ),
    "sinks left out of the backward pass": (
        Mutation(f"{KERNEL}_sinks", "softmax_sum=sums", "softmax_sum=sums * (1 - taken)"),
        backward("sinks"),
    ),
    "a sink's gradient left out": (
        Mutation(f"{KERNEL}_sinks", "d_sinks = -(taken", "d_sinks = 0 * (taken"),
        backward("sinks"),
    ),
    "packed documents told by their lengths": (
        Mutation(f"{KERNEL}_packed", "piece.keys.stop for", "len(piece.keys) for"),
        check_pieces,
    ),
    "the sides of packed windows swapped": (
        Mutation(SPARSE, "(4, before.value, after.value", "(4, after.value, before.value"),
        check_pieces,
    ),
    "dropout by seed alone": (
        Mutation(
            OPERATORS, "(dropout.seed, dropout.head, dropout.query, dropout.key)", "dropout.seed"
        ),
        check_dropout,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_kit_sees_a_broken_kernel(name):
    mutation, check = MUTATIONS[name]
    subject = Subject(AscendAttention(), torch.device("npu"), torch.bfloat16)
    check(subject)
    with mutation.applied(), pytest.raises((AssertionError, RuntimeError)):
        check(Subject(AscendAttention(), torch.device("npu"), torch.bfloat16))
    check(subject)


def test_the_layer_sees_the_head_count_of_before_the_exchange(npus):
    """Eight heads in the module, four in the call: CANN's text, and no wrong answer."""
    arguments = (differences, CALLS["plain"], torch.bfloat16)
    for old, text in (
        (f"num_heads={HEADS}", r"shape \[2, 19, 4, 16\] should be equal to \[2, 19, 8, 16\]"),
        (f"            {HEADS},", r"head_num is \[8\], but got query dim2 \[4\]"),
    ):
        mutation = Mutation(OPERATORS, old, old.replace(HEADS, "8"))
        with pytest.raises(WorkerError, match=text):
            npus(2).run(broken, mutation, *arguments)


def test_a_missing_wait_is_seen(asynchronous_npus):
    """Where collectives take their time, what has not been waited for is not there."""
    pool, arguments = asynchronous_npus(2), (CALLS["plain"], torch.float32)
    for found in pool.run(differences, *arguments):
        assert max(found.values()) < 1e-5
    mutation = Mutation("ulysses.exchange", "work.wait()", "work")
    for found in pool.run(broken, mutation, differences, *arguments):
        assert not max(found.values()) < 1e-5


def test_a_mutation_must_break_something():
    with (
        pytest.raises(ValueError, match="there is nothing to break"),
        Mutation(MASK, "no such text", "").applied(),
    ):
        pass
    with (
        pytest.raises(ValueError, match="stands in no function"),
        Mutation(MASK, "annotations", "division").applied(),
    ):
        pass
