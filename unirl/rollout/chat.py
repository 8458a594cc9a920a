"""What a chat template puts between two generated spans, as token ids: earlier tokens are never rendered again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2

from unirl.errors import UserError
from unirl.rollout.environment import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER = {"role": "user", "content": "x"}
_REPLY = "y"
_ASSISTANT = {"role": "assistant", "content": _REPLY}


class ChatContinuation:
    """Token ids that go on a conversation: end of the assistant's turn, new messages, head of the assistant's next.

    They are rendered after a short probe conversation and cut off behind it, so the real conversation, whose tokens
    were sampled, is neither rendered nor tokenised again. That is right where the template is append-only: what it
    writes for new messages follows, unchanged, what it wrote before, and each assistant's turn closes with one of
    `stop_token_ids`. Raises UserError where the tokenizer's template is not.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise UserError(f"{self._name} has no chat template, and the turns of rollout.environment need one")
        self._before_reply = self._render([_USER], generate=True)
        self._after_user = self._render([_USER], generate=False)
        self._header = self._ids(self._cut(self._before_reply, self._after_user))
        self._check_append_only()
        self._turn_end = self._continuation([_USER])[0]
        if self._turn_end not in stop_token_ids:
            raise self._refusal(
                f"closes an assistant's turn with {tokenizer.convert_ids_to_tokens(self._turn_end)!r}, which is none "
                f"of the tokens that end a response, {tokenizer.convert_ids_to_tokens(list(stop_token_ids))}"
            )

    def after_turn(self, last_token: int, messages: Sequence[Message]) -> list[int]:
        """Ids between a generated span that ends with `last_token` and the next span, `messages` among them.

        Where the span ends with the template's own end of turn, that token is not put twice.
        """
        ids = self._continuation(messages)
        return ids[1:] if last_token == self._turn_end else ids

    def after_prompt(self, prompt_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """`prompt_ids`, which end where the assistant begins, with `messages` put in before that."""
        header = self._header
        if list(prompt_ids[len(prompt_ids) - len(header) :]) != header:
            raise self._refusal(
                "did not end this prompt with its generation prompt, so that no message can be put behind it; let "
                "reset return none"
            )
        text = self._cut(self._render([_USER, *messages], generate=True), self._after_user)
        return [*prompt_ids[: len(prompt_ids) - len(header)], *self._ids(text)]

    def _continuation(self, messages: Sequence[Message]) -> list[int]:
        text = self._render([_USER, _ASSISTANT, *messages], generate=True)
        return self._ids(self._cut(text, self._before_reply + _REPLY))

    def _check_append_only(self) -> None:
        one_turn = self._render([_USER, _ASSISTANT, _USER], generate=True)
        two_turns = self._render([_USER, _ASSISTANT, _USER, _ASSISTANT, _USER], generate=True)
        first = self._cut(one_turn, self._before_reply + _REPLY)
        second = self._cut(two_turns, one_turn + _REPLY)
        if first != second:
            raise self._refusal(f"writes {first!r} after the first response, but {second!r} after the second")
        if self._ids(one_turn) != self._ids(self._before_reply + _REPLY) + self._ids(first):
            raise self._refusal(f"writes {first!r} after a response, whose tokens merge with those of the response")

    def _cut(self, text: str, start: str) -> str:
        """`text` without its `start`."""
        if not text.startswith(start):
            raise self._refusal(f"is not append-only: a longer conversation gives {text!r}, not {start!r} and more")
        return text[len(start) :]

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generate
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise self._refusal(f"refuses messages of roles {roles}: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def _name(self) -> str:
        return f"the tokenizer {self._tokenizer.name_or_path or 'of model.path'}"

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"rollout.environment: the chat template of {self._name} {reason}; choose a model with another template, "
            "or set tokenizer.chat_template in the folder of model.path"
        )
