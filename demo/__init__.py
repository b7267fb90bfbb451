"""The demonstration: one training loop, twice, once with its machines killed under it."""
