import pytest

from unirl.data.tokenizer import load_tokenizer, stop_token_ids
from unirl.errors import UserError


@pytest.fixture
def folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path / "model"


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(folder):
    tokenizer = load_tokenizer(str(folder))
    assert stop_token_ids(str(folder), tokenizer) == (tokenizer.eos_token_id,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert stop_token_ids(str(folder), tokenizer) == tuple(sorted({3, 5, tokenizer.eos_token_id}))


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="no tokenizer could be loaded from it"):
        load_tokenizer(str(folder))


def test_a_folder_without_tokenizer_files_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"its tokenizer has no tokens; put tokenizer\.json into the folder"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(("content", "reason"), [("{", "cannot be read"), ("[]", "holds a list")])
def test_a_damaged_generation_config_is_named(folder, content, reason):
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=rf"generation_config\.json {reason}"):
        stop_token_ids(str(folder), load_tokenizer(str(folder)))
