"""The tests: a package, so that the pool's workers can import a test module's functions by name."""
