"""How it happens: every request that leaves the process."""
