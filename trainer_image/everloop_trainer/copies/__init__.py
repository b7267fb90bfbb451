"""Copies of stored states in S3, made in the background by a process of its own, and the way back from them.

Objects have the names that files have below a session's root, so a restored file is the one that was copied. As there,
a state counts once its manifest is there, which comes last and goes first.
"""
