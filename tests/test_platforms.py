"""Nothing that only Linux or only POSIX has is needed by the core: it is imported and used without them."""

import subprocess
import sys

import pytest

# torch is imported first: what it needs on this system is its own affair.
WITHOUT_POSIX = """
import mmap, sys
import torch, torch.distributed
for name in ("resource", "fcntl", "pwd", "grp", "termios", "posix_ipc"):
    sys.modules[name] = None  # to import it is an ImportError
for name in ("MADV_HUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS"):
    if hasattr(mmap, name):
        delattr(mmap, name)
"""
USE_THE_CORE = """
import megabatch as mb
import megabatch.reference as reference
import megabatch.integrations.open_clip, megabatch.integrations.lightly, megabatch.integrations.inf_cl
x, y = (torch.randn(3000, 16, requires_grad=True) for _ in range(2))
loss = mb.clip_loss(x, y, 10.0, normalize=True)
loss.backward()
torch.testing.assert_close(loss, reference.clip_loss(x, y, 10.0, normalize=True))
mb.retrieval_ranks(x.detach(), y.detach())
mb.chunked(torch.nn.Linear(16, 4), x, chunk_size=1000).sum().backward()
from megabatch import cli
assert cli.main([]) == 0
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_core_needs_nothing_that_only_posix_has() -> None:
    ended = run(WITHOUT_POSIX + USE_THE_CORE)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("use", ["import resource", "import mmap; mmap.MAP_PRIVATE"])
def test_what_only_posix_has_is_missing_there(use: str) -> None:
    assert run(WITHOUT_POSIX + use).returncode == 1
