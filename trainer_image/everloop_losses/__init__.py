"""Traced losses as plain data: what gateway and engine both know of them. Standard library only.

A client traces its loss (tinker SDK, `ServiceClient.create_custom_loss`) and sends the graph. Nothing in it is code: a
node names an operation of a closed set, and the engine has a function of its own for each of these names.
"""
