"""The kill matrix: every victim in every moment of one loop's operations."""
