"""The rollout engine and the way of weights to it."""

import re

from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig


@rule("sync.mode", "rollout.engine")
def weights_can_reach_the_engine(config: TrainConfig) -> str | None:
    """sync.mode is inprocess for the native engine, and another one for rollout.engine=sglang."""
    mode, engine = config.sync.mode, config.rollout.engine
    if (mode == "inprocess") == (engine == "native"):
        return None
    if engine == "native":
        return f"found {mode}, but rollout.engine=native lives in the trainer's process; use inprocess"
    return "found inprocess, but SGLang servers are processes of their own; use disk"


@rule("rollout.urls")
def urls_are_urls(config: TrainConfig) -> str | None:
    """rollout.urls are http://host:port or https://host:port."""
    wrong = [url for url in config.rollout.urls if not re.fullmatch(r"https?://[\w.\-\[\]:]+:\d+/?", url)]
    return f"found {', '.join(wrong)}, expected http://host:port" if wrong else None


@rule("rollout.urls", "rollout.python", "rollout.server_args")
def running_servers_take_no_options(config: TrainConfig) -> str | None:
    """rollout.python and rollout.server_args are for servers that are launched: rollout.urls is empty."""
    rollout = config.rollout
    if not rollout.urls or (rollout.python is None and not rollout.server_args):
        return None
    return "servers that run already are not launched with rollout.python or rollout.server_args; remove either"
