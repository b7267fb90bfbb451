"""The gateway: the one stable address of Everloop, which outlasts the session pods behind it."""
