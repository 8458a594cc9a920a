"""The policy under training in Megatron-Core; start reading at `actor`."""

import warnings

# Megatron-Core warns at every import and call that Transformer Engine and Apex are not there; on a CPU they never are.
warnings.filterwarnings("ignore", module=r"megatron\.")
