"""Libraries that ulysses takes attention over in. Each file needs its library, and loads on use."""
