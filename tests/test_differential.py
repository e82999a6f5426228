"""Random calls against one process; `make differential` tries more of them."""

import itertools
import re

from tests import differential, random_calls

CALLS = 300


def test_random_calls_equal_one_process(pool):
    wrong = differential.failures(pool, range(CALLS))
    assert not wrong, "\n".join(wrong)


def test_the_draws_reach_every_corner():
    """Each option, and each pair of those that are easily handled apart, within what CI runs."""
    drawn = [random_calls.draw(number) for number in range(CALLS)]
    alone = {
        "uneven shards": lambda d: len(set(d.query_lens)) > 1,
        "an empty shard": lambda d: 0 in d.query_lens and any(d.query_lens),
        "a grid of rows and heads": lambda d: d.grid is not None and min(d.grid) > 1,
        "the grid left open": lambda d: d.grid is None,
        "more ranks than heads": lambda d: d.heads < len(d.query_lens),
        "grouped heads": lambda d: 1 < d.kv_heads < d.heads,
        "a batch": lambda d: d.batch > 1,
        "half precision": lambda d: d.dtype.itemsize == 2,
        "cross-attention": lambda d: d.key_lens != d.query_lens and not d.replicated,
        "replicated keys": lambda d: d.replicated,
        "a straddling document": lambda d: _straddles(d),
        "padding behind the documents": lambda d: (
            d.shape.documents and d.shape.documents[-1] < sum(d.query_lens)
        ),
        "a causal window": lambda d: d.shape.is_causal and d.shape.window,
        "documents in a window": lambda d: d.shape.documents and d.shape.window,
        "a prefix": lambda d: d.shape.prefix_len,
        "lower right": lambda d: d.bias == "lower right" and d.shape.diagonal,
        "upper left": lambda d: d.bias == "upper left",
        "a whole mask": lambda d: d.mask and not d.mask[2],
        "rows of a mask": lambda d: d.mask and d.mask[2],
        "rows of a mask without heads": lambda d: d.mask and d.mask[2] and d.mask[1][1] == 1,
        "a mask and causal": lambda d: d.mask and d.shape.is_causal,
        "slopes and sinks": lambda d: d.alibi and d.sinks,
        "dropout and a mask": lambda d: d.dropout_p and d.mask,
        "a log-sum-exp": lambda d: d.with_lse,
        "frozen inputs": lambda d: not {"query", "key", "value"} & d.learned,
    }
    assert not [name for name, has in alone.items() if not any(map(has, drawn))]


def _straddles(drawn: random_calls.Drawn) -> bool:
    borders = drawn.shape.documents or ()
    cut = drawn.query_lens[0]
    return any(a < cut < b for a, b in itertools.pairwise(borders))


def _raise(rank, num_ranks, numbers):
    if 5 in numbers:
        raise ValueError("no")
    return differential.run(rank, num_ranks, numbers)


def test_a_call_that_raises_is_found_among_others(pool, monkeypatch):
    monkeypatch.setattr(differential, "run", _raise)
    (told,) = differential.failures(pool, [1, 5, 9])
    assert re.match(r"python -m tests\.differential 5  # .*'no'.*Drawn\(number=5, ", told)
    assert "\n" not in told


def _ignores_scale(rank, num_ranks, numbers):
    arguments = random_calls.arguments
    random_calls.arguments = lambda drawn, own: arguments(drawn, own) | {"scale": 0.9}
    try:
        return differential.run(rank, num_ranks, numbers)
    finally:
        random_calls.arguments = arguments


def test_a_wrong_call_is_one_line_for_each_rank_that_is_wrong(pool, monkeypatch):
    monkeypatch.setattr(differential, "run", _ignores_scale)
    lines = differential.failures(pool, [9])
    assert len(lines) == 2
    for rank, told in enumerate(lines):
        assert re.match(
            rf"python -m tests\.differential 9  # rank {rank} .*Drawn\(number=9, ", told
        )
        assert "\n" not in told
