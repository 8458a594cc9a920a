"""Token kernels on a GPU against torch and Liger-Kernel: `python -m benchmarks.kernels.gpu --help`."""
