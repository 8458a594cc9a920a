import json

import numpy as np
import pytest

from tests.data.conftest import SPECIAL_TOKENS
from unirl.config.schema import DataConfig
from unirl.data import load_prompts
from unirl.errors import UserError

CHAT_OVERHEAD = 4  # <s> <|user|> ... <|end|> <|assistant|>


def write(path, *lines):
    """A JSON-lines file of records (dicts) and raw lines (strings, bytes)."""
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return str(path)


def load(tokenizer, path, *, max_prompts=None, **keys):
    return load_prompts(DataConfig(path=path, **keys), tokenizer, split="train", max_prompts=max_prompts)


def test_tokens_are_those_of_the_chat_template(tokenizer, tmp_path):
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
    ]
    path = write(tmp_path / "train.jsonl", {"prompt": "1+1?", "answer": 2}, {"prompt": messages, "answer": "6"})
    dataset = load(tokenizer, path)
    for prompt, sent in zip(dataset, [[{"role": "user", "content": "1+1?"}], messages], strict=True):
        expected = tokenizer.apply_chat_template(sent, add_generation_prompt=True)["input_ids"]
        assert prompt.token_ids == tuple(expected)
        assert {type(token) for token in prompt.token_ids} == {int}
    assert [prompt.index for prompt in dataset] == [0, 1]


def test_record_keeps_all_fields_and_makes_the_answer_a_string(tokenizer, tmp_path):
    lines = [
        {"prompt": "a", "answer": 7, "level": {"min": [1, None]}, "data_source": "aime24"},
        {"prompt": "ä", "answer": 0.5},
    ]
    dataset = load(tokenizer, write(tmp_path / "sums.jsonl", *lines))
    assert dataset[0].record == {**lines[0], "answer": "7"}
    assert dataset[-1].record == {"prompt": "ä", "answer": "0.5", "data_source": "sums"}
    with pytest.raises(IndexError):
        dataset[2]
    assert [prompt.index for prompt in dataset[1:]] == [1]


def test_system_prompt_examples_and_template_are_sent(tokenizer, tmp_path):
    examples = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    path = write(
        tmp_path / "train.jsonl",
        {"prompt": "2+2", "answer": 4},
        {"prompt": [{"role": "user", "content": "9"}], "answer": 9},
    )
    dataset = load(
        tokenizer, path, system_prompt="Add.", example_messages=examples, prompt_template="{prompt}={x} \\boxed{}"
    )
    head = "<s><|system|>Add.<|end|><|user|>1+2<|end|><|assistant|>3<|end|>"
    assert tokenizer.decode(dataset[0].token_ids) == head + "<|user|>2+2={x} \\boxed{}<|end|><|assistant|>"
    assert tokenizer.decode(dataset[1].token_ids) == head + "<|user|>9<|end|><|assistant|>"
    assert dataset[0].record["prompt"] == "2+2"


def test_bare_text_gets_the_tokenizers_default_special_tokens(plain_tokenizer, tmp_path):
    dataset = load(
        plain_tokenizer, write(tmp_path / "train.jsonl", {"prompt": "1+1", "answer": 2}), chat_template=False
    )
    assert dataset[0].token_ids == tuple(plain_tokenizer("1+1")["input_ids"])
    assert plain_tokenizer.decode(dataset[0].token_ids) == "<s>1+1"


def test_length_limit_counts_the_tokens_that_are_sent(tokenizer, tmp_path):
    limit = 20
    lines = [
        {"prompt": "x" * (limit - CHAT_OVERHEAD), "answer": 1},
        {"prompt": "y" * (limit - CHAT_OVERHEAD + 1), "answer": 1},
    ]
    dataset = load(tokenizer, write(tmp_path / "train.jsonl", *lines), max_prompt_tokens=limit)
    assert [len(prompt.token_ids) for prompt in dataset] == [limit]
    assert dataset.report.too_long == 1
    assert "data.max_prompt_tokens=20" in dataset.report.summary()


BAD_LINES = [
    ("{not json", "not JSON"),
    (b'{"prompt": "\xff", "answer": 1}', "not UTF-8"),
    ("[1, 2]", "not a JSON object but a list"),
    ("[" * 100_000, "not JSON"),
    ({"answer": 1}, "prompt is missing"),
    ({"prompt": " \n", "answer": 1}, "prompt is empty"),
    ({"prompt": [], "answer": 1}, "empty list"),
    ({"prompt": 3, "answer": 1}, "found int"),
    ({"prompt": ["a"], "answer": 1}, "must be an object with role and content"),
    ({"prompt": [{"role": "usr", "content": "a"}], "answer": 1}, 'found "usr"'),
    ({"prompt": [{"role": ["user"], "content": "a"}], "answer": 1}, "role of a chat message"),
    ({"prompt": [{"role": "user", "content": None}], "answer": 1}, "content of a chat message"),
    (
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": 1},
        "last chat message",
    ),
    ({"prompt": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "answer": 1}, "system message"),
    ({"prompt": [{"role": "tool", "content": "a"}], "answer": 1}, "chat template refuses it: tools are not"),
    ('{"prompt": "\\ud800", "answer": 1}', "surrogate"),
    ({"prompt": "a"}, "answer is missing"),
    ({"prompt": "a", "answer": ""}, "answer is empty"),
    ({"prompt": "a", "answer": True}, "found bool"),
    ({"prompt": "a", "answer": None}, "found NoneType"),
    ('{"prompt": "a", "answer": NaN}', "finite"),
    ('{"prompt": "a", "answer": 1e999}', "finite"),
    ({"prompt": "a", "answer": 1, "data_source": 3}, "data_source"),
]


def test_bad_lines_are_named_by_line_and_reason(tokenizer, tmp_path):
    good = {"prompt": "good", "answer": 1}
    path = write(
        tmp_path / "train.jsonl", good, "", *(line for line, _ in BAD_LINES), {"prompt": "good too", "answer": 1}
    )
    dataset = load(tokenizer, path)
    assert [prompt.record["prompt"] for prompt in dataset] == ["good", "good too"]
    assert [bad.line for bad in dataset.report.bad_lines] == list(range(3, 3 + len(BAD_LINES)))
    for bad, (_, reason) in zip(dataset.report.bad_lines, BAD_LINES, strict=True):
        assert reason in bad.reason
    summary = dataset.report.summary()
    assert f"{len(BAD_LINES)} bad lines skipped" in summary
    assert "line 3: not JSON" in summary
    assert f"and {len(BAD_LINES) - 5} more" in summary


def test_byte_order_mark_and_windows_line_ends_are_no_fault(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\r\n\r\n{"prompt": "b", "answer": 2}')
    dataset = load(tokenizer, str(path))
    assert len(dataset) == 2
    assert not dataset.report.bad_lines


def test_duplicates_are_those_that_send_the_same_text(tokenizer, tmp_path):
    path = write(
        tmp_path / "train.jsonl",
        {"prompt": "1+1", "answer": 2},
        {"prompt": "1+1", "answer": "2"},
        {"prompt": [{"role": "user", "content": "1+1"}], "answer": 2},
        {"prompt": " 1+1 ", "answer": 3},  # the chat template trims it
        {"prompt": "1+2", "answer": 3},
    )
    dataset = load(tokenizer, path)
    assert [prompt.record["answer"] for prompt in dataset] == ["2", "3"]
    assert (dataset.report.duplicates, dataset.report.conflicts) == (3, 1)
    assert "1 of them with another answer" in dataset.report.summary()


def test_max_prompts_takes_the_first_that_can_be_kept(tokenizer, tmp_path):
    lines = [{"prompt": "z" * 50, "answer": 1}, *({"prompt": f"{i}", "answer": i} for i in range(600)), "bad"]
    path = write(tmp_path / "train.jsonl", *lines)
    dataset = load(tokenizer, path, max_prompts=300, max_prompt_tokens=20)
    assert [prompt.record["prompt"] for prompt in dataset] == [str(i) for i in range(300)]
    assert (dataset.report.kept, dataset.report.too_long, dataset.report.bad_lines) == (300, 1, [])
    assert "only the first 300" in dataset.report.summary()


def test_fingerprint_tells_datasets_apart(tokenizer, tmp_path):
    first = load(tokenizer, write(tmp_path / "a.jsonl", {"prompt": "1", "answer": 1, "data_source": "s"}))
    same = load(tokenizer, write(tmp_path / "b.jsonl", {"prompt": "1", "answer": 1, "data_source": "s"}))
    other = load(tokenizer, write(tmp_path / "c.jsonl", {"prompt": "1", "answer": 2, "data_source": "s"}))
    assert first.fingerprint() == same.fingerprint() != other.fingerprint()


def test_packed_tokens_of_special_ids_survive(tokenizer, tmp_path):
    dataset = load(tokenizer, write(tmp_path / "train.jsonl", {"prompt": "<|end|>", "answer": 1}))
    assert np.max(dataset[0].token_ids) == len(tokenizer) - 1
    assert len(tokenizer) == 256 + len(SPECIAL_TOKENS)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt_template": "no place"}, r"data\.prompt_template='no place' must contain \{prompt\}"),
        ({"chat_template": False, "system_prompt": "x"}, r"data\.chat_template=true"),
        ({"example_messages": [{"role": "usr", "content": "x"}]}, r"data\.example_messages\[0\]: role"),
        ({"example_messages": [{"role": "system", "content": "x"}]}, r"use data\.system_prompt"),
    ],
)
def test_keys_that_contradict_each_other(tokenizer, tmp_path, keys, message):
    path = write(tmp_path / "train.jsonl", {"prompt": "a", "answer": 1})
    with pytest.raises(UserError, match=message):
        load(tokenizer, path, **keys)


def test_tokenizer_without_chat_template_names_the_key(plain_tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"no chat template.*data\.chat_template=false"):
        load(plain_tokenizer, write(tmp_path / "train.jsonl", {"prompt": "a", "answer": 1}))


def test_messages_cannot_be_sent_as_bare_text_nor_get_two_system_messages(tokenizer, tmp_path):
    user = {"role": "user", "content": "a"}
    path = write(tmp_path / "a.jsonl", {"prompt": [user], "answer": 1}, {"prompt": "b", "answer": 1})
    dataset = load(tokenizer, path, chat_template=False)
    assert "data.chat_template is false" in dataset.report.bad_lines[0].reason
    path = write(
        tmp_path / "b.jsonl",
        {"prompt": [{"role": "system", "content": "s"}, user], "answer": 1},
        {"prompt": "b", "answer": 1},
    )
    dataset = load(tokenizer, path, system_prompt="t")
    assert "own system message" in dataset.report.bad_lines[0].reason
    assert tokenizer.decode(load(tokenizer, path)[0].token_ids).startswith("<s><|system|>s<|end|><|user|>a")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{}\n[]\n"])
def test_a_file_without_prompts_is_an_error(tokenizer, tmp_path, content):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"no usable prompt is left.*train\.jsonl: 0 prompts"):
        load(tokenizer, str(path))


def test_everything_too_long_is_an_error_that_names_the_key(tokenizer, tmp_path):
    path = write(tmp_path / "train.jsonl", {"prompt": "abc", "answer": 1})
    with pytest.raises(UserError, match=r"1 dropped: longer than data\.max_prompt_tokens=2"):
        load(tokenizer, path, max_prompt_tokens=2)


def test_files_that_cannot_be_read(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"data\.path=.*missing\.jsonl.*No such file"):
        load(tokenizer, str(tmp_path / "missing.jsonl"))
    with pytest.raises(UserError, match="Is a directory"):
        load(tokenizer, str(tmp_path))
    with pytest.raises(UserError, match=r"data\.path is null"):
        load(tokenizer, None)
    with pytest.raises(UserError, match=r"eval\.path is null"):
        load_prompts(DataConfig(path="x"), tokenizer, split="heldout")
    with pytest.raises(UserError, match=r"eval\.path=.*missing"):
        load_prompts(DataConfig(), tokenizer, split="heldout", path=str(tmp_path / "missing"))
