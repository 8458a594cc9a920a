"""SGLang plugin of a CPU server: seeded sampling, which SGLang allows with CUDA attention back-ends only.

SGLang takes a request's own seed where `--enable-deterministic-inference` is on. That option also swaps in Triton
kernels whose rounding does not depend on the batch; they do not exist for CPU, so here the option means seeds alone.
"""


def register() -> None:
    """Called by SGLang at the start of each of its processes (entry point `sglang.srt.plugins`)."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        lambda original, runner: None,
        HookType.AROUND,
    )
