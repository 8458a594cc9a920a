"""Shows on the terminal what a run learnt."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unirl.demo.record import RunRecord

# As in the chat templates of both demo models.
_USER_TURN, _TURN_END = "<|im_start|>user\n", "<|im_end|>"
_CURVE_ROWS = 12
_BAR_WIDTH = 32


def show_run(record: RunRecord, console: Console) -> None:
    """Held-out accuracy before and after, the curve of reward and length, and a problem answered before and after."""
    if len(record.evaluations) >= 2:
        console.print(evaluation_table(record))
    if record.curve("reward/mean"):
        console.print(curve_table(record))
    samples = record.improved_sample()
    if samples:
        console.print(sample_panel(*samples))


def evaluation_table(record: RunRecord) -> Table:
    """The evaluation metrics before training and after it."""
    before, after = record.evaluations[0], record.evaluations[-1]
    table = _table("Held-out problems: none of them was trained on")
    table.add_column("")
    for line in (before, after):
        table.add_column(f"iteration {line['iteration']}", justify="right")
    for name, explanation in _evaluation_rows(before):
        table.add_row(explanation, *(f"{line[name]:.3f}" for line in (before, after)))
    return table


def _evaluation_rows(line: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in line:
        if not name.startswith("eval/"):
            continue
        metric, _, samples = name.rpartition("/")[2].partition("@")
        if metric == "avg":
            yield name, f"share of right answers ({name})"
        elif metric == "pass" and samples != "1":
            yield name, f"problems with a right answer among {samples} ({name})"


def curve_table(record: RunRecord) -> Table:
    """About a dozen iterations from the first to the last, the reward as a bar."""
    rewards, lengths = record.curve("reward/mean"), dict(record.curve("response/length_mean"))
    table = _table("Training: mean reward and mean length of the responses")
    for heading in ("iteration", "", "reward/mean", "response/length_mean"):
        table.add_column(heading, justify="right")
    for iteration, reward in _spread(rewards, _CURVE_ROWS):
        length = f"{lengths[iteration]:.1f} tokens" if iteration in lengths else ""
        bar = ProgressBar(total=1.0, completed=max(reward, 0.0), width=_BAR_WIDTH)
        table.add_row(str(iteration), bar, f"{reward:.3f}", length)
    return table


def _spread(points: list[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """`count` of the points at equal distances, the first and the last among them."""
    if len(points) <= count:
        return points
    return [points[round(row * (len(points) - 1) / (count - 1))] for row in range(count)]


def sample_panel(before: dict[str, Any], after: dict[str, Any]) -> Panel:
    """One held-out problem with the response of the first and of the last evaluation."""
    lines = [Text(last_question(before["prompt"]), style="bold")]
    for sample, word in ((before, "wrong"), (after, "right")):
        lines.append(Text(f"iteration {sample['iteration']:>3}: {sample['response']}   ({word})"))
    return Panel(Group(*lines), title="A held-out problem, before and after", expand=False)


def last_question(prompt: str) -> str:
    """The user's last turn in a prompt of the chat format that both demo models read."""
    return prompt.rpartition(_USER_TURN)[2].partition(_TURN_END)[0]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold")
