"""Random kills for as long as asked."""
