"""Writes a model's Hugging Face folder whole or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from unirl.errors import UserError


def write_folder(path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Model, generation config and tokenizer, written aside and renamed to `path`, which must not exist yet.

    Raises UserError where that cannot be done.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
            folder = Path(aside) / path.name
            _save(folder, model, tokenizer)
            folder.rename(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"model.path={path}: the folder cannot be written: {error}") from error


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with quiet_progress():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Without transformers' own progress bars."""
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            logging.enable_progress_bar()
