"""Weights and gradients of real shards, on four processes, against the folder they came from."""

import pytest
import torch
from safetensors.torch import load_file

from tests.train.megatron.layouts import CASES, RANKS
from unirl.train.megatron.hf_folder import SINGLE


@pytest.mark.parametrize("case", CASES)
def test_weights_from_any_layout_are_those_of_the_folder(ran_layouts, case):
    folders, _, ranks = ran_layouts
    order = ranks[0][case]["weights"]["all"][0]
    assert sorted(order) == sorted(load_file(folders[CASES[case][0]] / SINGLE))
    for rank, reports in enumerate(ranks):
        report = reports[case]["weights"]
        assert not any(report[receivers][1] for receivers in ("all", "first", "stages"))
        assert report["all"][0] == order
        assert report["first"][0] == (order if rank == 0 else [])


@pytest.mark.parametrize("case", CASES)
def test_each_stage_gives_its_own_weights_on_its_first_rank(ran_layouts, case):
    """In the order of the layers: chunks of one stage are not successive in the interleaved schedule."""
    ranks = ran_layouts[2]
    stages = CASES[case][1].pp
    first_ranks = range(0, RANKS, RANKS // stages)
    assert all(bool(ranks[rank][case]["weights"]["stages"][0]) == (rank in first_ranks) for rank in range(RANKS))
    by_stage = [name for rank in first_ranks for name in ranks[rank][case]["weights"]["stages"][0]]
    everything = ranks[0][case]["weights"]["all"][0]
    assert (sorted(by_stage) == sorted(everything)) if CASES[case][1].vpp else (by_stage == everything)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", ["reduced", "distributed"])
def test_gradients_are_whole_on_every_rank(ran_layouts, case, optimizer):
    for report in ran_layouts[2]:
        names, wrong = report[case]["weights"][optimizer]
        assert names == report[case]["weights"]["all"][0]
        assert not wrong


@pytest.mark.parametrize("case", CASES)
def test_exported_folder_is_the_one_that_was_read(ran_layouts, case):
    folders, out, _ = ran_layouts
    expected, found = load_file(folders[CASES[case][0]] / SINGLE), load_file(out / case / SINGLE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
