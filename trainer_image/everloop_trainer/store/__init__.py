"""The session on a POSIX file system: journal, incarnations and their fence, stored states.

Every effect on disk goes through `store.files.Files`.
"""
