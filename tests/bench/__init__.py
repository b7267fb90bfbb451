"""What Everloop costs and how fast it comes back, measured: `make bench`."""
