"""The exactly-once core of a session: streams, windows, history, recovery, and the service that drives the engine.

Decisions are pure functions over plain values; what touches disk or an engine comes in through `session.ports`.
"""
