"""The examples run as their first lines say, alone and on ranks, and learn what they are to learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TWO_TOWERS = Path(__file__).parent.parent / "examples" / "two_towers.py"
LAUNCHERS = {
    "alone": [sys.executable, "-W", "error"],
    "on two ranks": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def run(launcher: list[str], *options: str) -> str:
    ended = subprocess.run(
        [*launcher, str(TWO_TOWERS), *options],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_towers_learn_to_find_their_pairs(launcher: str) -> None:
    told = run(LAUNCHERS[launcher], "--steps", "16", "--batch", "512", "--chunk", "100")
    losses = [float(number) for number in re.findall(r"loss (\S+)", told)]
    scales = [float(number) for number in re.findall(r"scale (\S+)", told)]
    found = float(re.findall(r"(\S+)% of unseen images", told)[0])
    assert len(losses) == 4, "one line per five steps, from one rank"
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert scales[-1] != scales[0]
    assert found > 50
