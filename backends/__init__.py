"""Local attention kernels, one file each, and the registry that finds them by name."""

# The folder stands at the top of the checkout, so `import backends` from there would load a second
# copy of every module in it.
if __name__ != "ulysses.backends":
    raise ImportError(f"{__name__}: this package is named ulysses.backends; import it by that name")

# Below the guard, which has to come first.
from ulysses.backends.base import Band as Band
from ulysses.backends.base import Dropout as Dropout
from ulysses.backends.base import LocalAttention as LocalAttention
from ulysses.backends.base import Problem as Problem
from ulysses.backends.registry import backend_names as backend_names
from ulysses.backends.registry import get_backend as get_backend
