"""The HTTP face of a session pod, and its client of the engine. Never imports torch."""
