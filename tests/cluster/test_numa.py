"""Processors near a device, as Linux lists them."""

import pytest

from unirl.cluster.numa import processors_near

ADDRESS = "0000:3b:00.0"


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("0-2,8-9\n", {0, 1, 2, 8, 9}), ("5\n", {5}), ("\n", set())],
)
def test_the_list_of_a_device(listed, expected, tmp_path):
    (tmp_path / ADDRESS).mkdir()
    (tmp_path / ADDRESS / "local_cpulist").write_text(listed)
    assert processors_near(ADDRESS, tmp_path) == expected


def test_a_device_that_linux_does_not_know(tmp_path):
    assert processors_near(ADDRESS, tmp_path) == set()
