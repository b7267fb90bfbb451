"""Runs one container: a process in its own namespaces, its log and its exit status.

Standard library only and few modules of it: `__main__` is started once per container and per probe.
"""
