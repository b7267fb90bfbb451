"""What people and programs outside may depend on: names, tokens and the shape of the resources."""
