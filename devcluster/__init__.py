"""A Kubernetes cluster of a real control plane and several real kubelets on one Linux machine, for tests and demos.

`devcluster.cluster.Cluster` is the way in from Python, ``python -m devcluster`` from a shell.
"""
