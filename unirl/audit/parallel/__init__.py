"""The invariance audit: a layout of ranks changes nothing of training but its speed."""
