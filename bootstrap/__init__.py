"""Brings a fresh machine to the point where the demo and the tests run: `python3 -m bootstrap`.

Runs under any Python >= 3.11 with nothing but the standard library. All that it makes lies in one cache directory
outside the checkout, named by the hash of what it was made from, so that a second run finds it ready.
"""
