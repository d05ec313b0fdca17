"""Benchmark of speed relative to a plain PyTorch loop of the same computation, alternating in one process."""
