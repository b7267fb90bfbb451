"""A container runtime (CRI) for one node: a container is a process of this machine, kept by `devcluster.shim`."""
