"""Token kernels on the CPU against torch: `python -m benchmarks.kernels --help`."""
