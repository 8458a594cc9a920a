"""From a record's prompt to the text that is sent, and to its tokens."""

import json
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from unirl.config.schema import DataConfig
from unirl.errors import UserError

PLACEHOLDER = "{prompt}"
ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRecord(Exception):
    """A record that holds no usable prompt; the message is the reason."""


class PromptRenderer:
    """Applies `data.system_prompt`, `example_messages`, `prompt_template` and `chat_template` to prompts."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase):
        """Raises UserError where the keys contradict each other or the tokenizer lacks a chat template."""
        self._config = config
        self._tokenizer = tokenizer
        if PLACEHOLDER not in config.prompt_template:
            raise UserError(f"data.prompt_template={config.prompt_template!r} must contain {PLACEHOLDER}")
        if config.chat_template:
            self._check_chat_keys()
        elif config.system_prompt is not None or config.example_messages:
            raise UserError(
                "data.system_prompt and data.example_messages are chat messages: set data.chat_template=true, "
                "or write them into data.prompt_template"
            )

    def _check_chat_keys(self) -> None:
        if not self._tokenizer.chat_template:
            raise UserError(
                f"the tokenizer {self._tokenizer.name_or_path or 'of model.path'} has no chat template: "
                "set data.chat_template=false to send the bare text, or choose a model with a chat template"
            )
        for position, message in enumerate(self._config.example_messages):
            try:
                check_message(message)
            except BadRecord as error:
                raise UserError(f"data.example_messages[{position}]: {error}") from error
            if message["role"] == "system":
                raise UserError(f"data.example_messages[{position}] is a system message: use data.system_prompt")

    def conversation(self, prompt: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """What is sent, before the chat template: the text itself, or all chat messages. Raises BadRecord."""
        if isinstance(prompt, str):
            text = self._config.prompt_template.replace(PLACEHOLDER, prompt)
            if not self._config.chat_template:
                return text
            prompt = [{"role": "user", "content": text}]
        elif not self._config.chat_template:
            raise BadRecord("prompt is chat messages, but data.chat_template is false")
        system, turns = _split_system(prompt)
        if self._config.system_prompt is not None:
            if system:
                raise BadRecord("prompt has its own system message, but data.system_prompt is set")
            system = [{"role": "system", "content": self._config.system_prompt}]
        return [*system, *self._config.example_messages, *turns]

    def text(self, conversation: str | list[dict[str, Any]]) -> str:
        """The text that is sent, chat template and generation prompt included. Raises BadRecord."""
        text = conversation
        if not isinstance(text, str):
            try:
                text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            except jinja2.TemplateError as error:
                raise BadRecord(f"the tokenizer's chat template refuses it: {error}") from error
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise BadRecord("prompt holds half a surrogate pair, which is no Unicode text")
        return text

    def tokens(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids [L] int32 of each text.

        A chat template writes its special tokens itself; bare text gets those that the tokenizer puts by default.
        """
        encoded = self._tokenizer(
            texts,
            add_special_tokens=not self._config.chat_template,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def _split_system(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if messages[0]["role"] == "system":
        return messages[:1], messages[1:]
    return [], messages


def check_message(message: Any) -> None:
    """Raises BadRecord unless `message` is {role, content} with a known role and text."""
    if not isinstance(message, dict):
        raise BadRecord(f"a chat message must be an object with role and content, found {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadRecord(f"role of a chat message must be one of {', '.join(ROLES)}, found {json.dumps(role)[:40]}")
    if not isinstance(content, str) or not content.strip():
        raise BadRecord(f"content of a chat message must be text that is not empty, found {json.dumps(content)[:40]}")


def check_prompt(prompt: Any) -> None:
    """Raises BadRecord unless `prompt` is text that is not blank, or chat messages that end before a response."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRecord("prompt is empty")
        return
    if not isinstance(prompt, list):
        raise BadRecord(f"prompt must be text or a list of chat messages, found {type(prompt).__name__}")
    if not prompt:
        raise BadRecord("prompt is an empty list")
    for message in prompt:
        check_message(message)
    if any(message["role"] == "system" for message in prompt[1:]):
        raise BadRecord("a system message stands after the first chat message")
    if prompt[-1]["role"] not in ("user", "tool"):
        raise BadRecord(f"the last chat message must be the user's, found role {prompt[-1]['role']}")
