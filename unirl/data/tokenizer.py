"""The tokenizer of a model folder and the tokens that end a response."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from unirl.errors import UserError


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the Hugging Face folder `path`. Raises UserError where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"model.path={path}: no tokenizer could be loaded from it: {_describe(error)}") from error
    if not tokenizer.get_vocab().keys() - tokenizer.all_special_tokens:
        # Without tokenizer files transformers makes an empty tokenizer of the class that config.json implies.
        raise UserError(f"model.path={path}: its tokenizer has no tokens; put tokenizer.json into the folder")
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's EOS and those of the folder's generation_config.json.

    Raises UserError where there is none: every response would run to its limit.
    """
    found = {tokenizer.eos_token_id} - {None}
    generation_config = Path(path) / "generation_config.json"
    if generation_config.exists():
        ids = _read_object(generation_config).get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [ids]) - {None}
    if not found:
        raise UserError(f"model.path={path}: neither the tokenizer nor generation_config.json names an EOS token")
    return tuple(sorted(found))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _describe(error: Exception) -> str:
    return f"{type(error).__name__} {error}" if isinstance(error, LookupError) else str(error)
