"""Getting processes started: the `ulysses` command line and the scripts for one or many nodes."""

# The folder stands at the top of the checkout, so `import launch` from there would load a second
# copy of every module in it.
if __name__ != "ulysses.launch":
    raise ImportError(f"{__name__}: this package is named ulysses.launch; import it by that name")

from ulysses.launch.environment import current_config as current_config
from ulysses.launch.environment import current_degrees as current_degrees
