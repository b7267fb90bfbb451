"""The torch side of a session pod: a spare process that holds the base model, and engines forked from it."""
