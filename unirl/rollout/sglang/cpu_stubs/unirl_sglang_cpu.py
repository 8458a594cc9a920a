"""SGLang plugin of a CPU server: seeded sampling, streams of weights, and a core for the trainer.

Seeds: SGLang takes a request's own seed where `--enable-deterministic-inference` is on, which it allows with CUDA
attention back-ends only. That option also swaps in Triton kernels whose rounding does not depend on the batch; they do
not exist for CPU, so here the option means seeds alone.
"""

import unirl_weight_stream


def register() -> None:
    """Called by SGLang at the start of each of its processes (entry point `sglang.srt.plugins`)."""
    _allow_seeds()
    unirl_weight_stream.register()
    _sleep_while_paused()


def _allow_seeds() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        lambda original, runner: None,
        HookType.AROUND,
    )


def _sleep_while_paused() -> None:
    """A scheduler that is paused sleeps until its next request, as an idle one does: its core is the trainer's then."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def record_and_sleep(original, scheduler):
        original(scheduler)
        scheduler.maybe_sleep_on_idle()

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        record_and_sleep,
        HookType.AROUND,
    )
