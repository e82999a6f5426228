"""What is done with a module's attention."""

from enum import Enum


class Policy(Enum):
    """How far a module's attention reaches over the ranks."""

    EXCHANGED = "exchanged"  # queries, keys and values are this rank's rows of sharded sequences
    REPLICATED = "replicated"  # queries are sharded, keys and values whole on every rank
    LOCAL = "local"  # untouched: it attends to what this rank holds
