"""What is put between two turns, for several chat templates."""

import pytest

from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer
from unirl.errors import UserError
from unirl.rollout.chat import ChatContinuation

# Like Qwen's: a system message of its own, tool messages gathered in one user turn, thoughts of earlier turns left out.
QWEN_LIKE = (
    "{% if messages[0].role != 'system' %}<|system|>be kind<|end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif %}"
    "[{{ m.content }}]"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>\n{% endif %}"
    "{% elif m.role == 'assistant' and loop.last %}<|assistant|><think></think>{{ m.content }}<|end|>\n"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTS_TURNS = CHAT_TEMPLATE + "{% if messages | length > 3 %} (long){% endif %}"
LAST_ONLY = (
    "{% for m in messages[-1:] %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def continuation(template):
    tokenizer = make_tokenizer(template)
    return ChatContinuation(tokenizer, [tokenizer.eos_token_id]), tokenizer


def observation(*contents, role="tool"):
    return [{"role": role, "content": content} for content in contents]


def test_the_end_of_the_turn_is_not_put_twice():
    chat, tokenizer = continuation(QWEN_LIKE)
    after_end = chat.after_turn(tokenizer.eos_token_id, observation("4"))
    after_other = chat.after_turn(7, observation("4"))
    assert tokenizer.decode(after_end) == "\n<|user|>[4]<|end|>\n<|assistant|>"
    assert after_other == [tokenizer.eos_token_id, *after_end]


def test_messages_are_rendered_together():
    chat, tokenizer = continuation(QWEN_LIKE)
    text = tokenizer.decode(chat.after_turn(tokenizer.eos_token_id, observation("4", "5")))
    assert text == "\n<|user|>[4][5]<|end|>\n<|assistant|>"


@pytest.mark.parametrize("template", [QWEN_LIKE, CHAT_TEMPLATE])
def test_turn_by_turn_equals_the_whole_conversation(template):
    chat, tokenizer = continuation(template)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    messages = [{"role": "user", "content": "begin"}]
    context = ids(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    for turn in range(3):
        reply, seen = f"reply {turn}", observation(f"seen {turn}", role="user")
        context += [*ids(reply), tokenizer.eos_token_id]
        context += chat.after_turn(context[-1], seen)
        messages += [{"role": "assistant", "content": reply}, *seen]
    assert context == ids(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def test_messages_behind_a_prompt():
    chat, tokenizer = continuation(CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]

    def ids(conversation):
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    first, both = ids(messages[:1]), ids(messages)
    assert chat.after_prompt(first, messages[1:]) == both
    with pytest.raises(UserError, match="did not end this prompt with its generation prompt"):
        chat.after_prompt(first[:-1], messages[1:])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (LAST_ONLY, "is not append-only"),
        (COUNTS_TURNS, "after the first response, but"),
        (NO_END, "which is none of the tokens that end a response"),
    ],
)
def test_templates_that_cannot_be_continued_are_refused(template, message):
    with pytest.raises(UserError, match=message):
        continuation(template)


def test_a_role_that_the_template_refuses_is_named():
    chat, _ = continuation(CHAT_TEMPLATE)
    with pytest.raises(UserError, match="roles user, assistant, tool: tools are not spoken here"):
        chat.after_turn(7, observation("4"))
