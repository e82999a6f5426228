"""Local attention kernels, one file each, and the registry that finds them by name."""

# The folder stands at the top of the checkout, so `import backends` from there would load a second
# copy of every module in it.
if __name__ != "ulysses.backends":
    raise ImportError(f"{__name__}: this package is named ulysses.backends; import it by that name")
