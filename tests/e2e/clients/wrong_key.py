"""Tries to begin with a key that is not one, and prints what the SDK raises."""

import sys

import tinker

try:
    tinker.ServiceClient().create_lora_training_client(sys.argv[1], rank=8).result()
except tinker.TinkerError as error:
    print(type(error).__name__, error)
