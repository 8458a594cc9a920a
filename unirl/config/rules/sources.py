"""Model, prompts and scorer: what they are read from."""

import json
import re
from pathlib import Path
from typing import Any

from unirl.config.catalog import nearest
from unirl.config.rules.rule import rule
from unirl.config.schema import SCORERS, TrainConfig


@rule("model.path", "model.maker")
def model_exists(config: TrainConfig) -> str | None:
    """model.path is a folder, a hub name (owner/name), or is made by model.maker."""
    path = config.model.path
    if config.model.maker or _is_model(path):
        return None
    return f"found {path!r}: no such folder, and no hub name (owner/name) either"


@rule("model.path", run_only=True)
def model_folder_has_a_config(config: TrainConfig) -> str | None:
    """Where model.path is a folder, its config.json can be read."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        return None
    try:
        read_model_config(folder / "config.json")
    except ValueError as error:
        return f"found {config.model.path!r}, but {error}: give the whole Hugging Face folder of a model"
    return None


def read_model_config(path: Path) -> dict[str, Any]:
    """The Hugging Face config in a file. Raises ValueError with the reason where there is none."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read there: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"its {path.name} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"its {path.name} holds a {type(config).__name__}, expected a JSON object")
    return config


@rule("model.reference_path", "model.path", "model.maker")
def reference_exists(config: TrainConfig) -> str | None:
    """model.reference_path is null, a folder, a hub name, or model.path where model.maker makes it."""
    path = config.model.reference_path
    if path is None or _is_model(path) or (config.model.maker and path == config.model.path):
        return None
    return f"found {path!r}: no such folder, and no hub name (owner/name) either"


def _is_model(path: str) -> bool:
    return Path(path).is_dir() or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None


@rule("data.path", "data.kind")
def prompts_have_a_file(config: TrainConfig) -> str | None:
    """data.path is given where data.kind is jsonl; reasoning_gym reads no file."""
    path = config.data.path
    if config.data.kind != "jsonl":
        return f"is not read with data.kind={config.data.kind}; set it to null" if path else None
    return "is not set: data.kind=jsonl reads its prompts from this file" if path is None else None


@rule("eval.path", "data.kind")
def evaluation_reads_its_file(config: TrainConfig) -> str | None:
    """eval.path is null where data.kind is reasoning_gym, which evaluates on its own held-out problems."""
    if config.eval.path is None or config.data.kind == "jsonl":
        return None
    return f"is not read with data.kind={config.data.kind}, which makes its own held-out problems; set it to null"


@rule("data.path", run_only=True)
def prompts_exist(config: TrainConfig) -> str | None:
    """The file data.path exists."""
    path = config.data.path
    if path is None or Path(path).is_file():
        return None
    if path.startswith("$"):  # how a plan reads a variable that is not set
        return f"environment variable {path[1:]} is not set: export {path[1:]}=..., or give the key on the command line"
    return f"found {path!r}: no such file"


@rule("eval.path", run_only=True)
def evaluation_prompts_exist(config: TrainConfig) -> str | None:
    """The file eval.path exists; null goes without evaluation."""
    path = config.eval.path
    if path is None or Path(path).is_file():
        return None
    return f"found {path!r}: no such file; eval.path=null goes without evaluation"


@rule("data.tasks", "data.kind")
def tasks_are_given(config: TrainConfig) -> str | None:
    """data.kind reasoning_gym needs data.tasks; jsonl reads none."""
    if config.data.kind == "reasoning_gym" and not config.data.tasks:
        return "is empty: data.kind=reasoning_gym needs at least one family, e.g. data.tasks='{chain_sum: {}}'"
    if config.data.kind == "jsonl" and config.data.tasks:
        return "is not read with data.kind=jsonl; remove it, or set data.kind=reasoning_gym"
    return None


@rule("data.prompt_template")
def template_holds_the_prompt(config: TrainConfig) -> str | None:
    """data.prompt_template contains {prompt}."""
    if "{prompt}" in config.data.prompt_template:
        return None
    return f"found {config.data.prompt_template!r}, expected a text that contains {{prompt}}"


@rule("data.example_messages")
def examples_are_messages(config: TrainConfig) -> str | None:
    """Each of data.example_messages has the keys role and content."""
    for number, message in enumerate(config.data.example_messages):
        if set(message) != {"role", "content"}:
            return f"message {number} has the keys {', '.join(message) or 'none'}, expected role and content"
    return None


@rule("data.chat_template", "data.system_prompt", "data.example_messages")
def messages_need_a_template(config: TrainConfig) -> str | None:
    """data.system_prompt and data.example_messages are chat messages and need data.chat_template."""
    data = config.data
    if data.chat_template or not (data.system_prompt or data.example_messages):
        return None
    return "found false, but data.system_prompt and data.example_messages are chat messages; set it to true"


@rule("reward.scorer", "data.kind")
def scorer_is_known(config: TrainConfig) -> str | None:
    """reward.scorer is a built-in name or a dotted path; scorer reasoning_gym needs data.kind reasoning_gym."""
    scorer = config.reward.scorer
    if scorer == "reasoning_gym" and config.data.kind != "reasoning_gym":
        return f"reasoning_gym grades the problems of data.kind=reasoning_gym, not of {config.data.kind}"
    if scorer in SCORERS or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", scorer):
        return None
    return (
        f"found {scorer!r}, expected one of {', '.join(SCORERS)}, or the dotted path of a class; the nearest is "
        f"{nearest(scorer, list(SCORERS))}"
    )
