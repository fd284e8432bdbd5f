"""Offload of a model that torch's fully_shard holds in pieces over two ranks, with checkpointing and without."""

import sys
from pathlib import Path

from rank_processes import end, rank_processes

SCRIPT = Path(__file__).with_name("sharded_by_torch.py")


def test_two_ranks_train_to_the_bits_without_offload():
    with rank_processes([[sys.executable, str(SCRIPT)]] * 2) as processes:
        for process in processes:
            code, out, error = end(process)
            assert code == 0, error[-3000:]
            lines = out.splitlines()
            assert len(lines) == 4
            # Of a checkpointed layer the inputs alone: one tensor for each of 4 layers and 3 steps.
            assert [line.endswith("checkpoint True, 12 tensors") for line in lines] == [False, False, True, True]
