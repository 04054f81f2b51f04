"""Does an installed wheel work? Run by `make release-check` with the interpreter of a clean environment.

python -I tools/smoke.py
"""

import subprocess
import sys
from pathlib import Path

import torch

import megabatch as mb
from megabatch import reference

LOSSES = {
    "clip_loss": (mb.clip_loss, reference.clip_loss),
    "siglip_loss": (mb.siglip_loss, reference.siglip_loss),
    "info_nce_loss": (mb.info_nce_loss, reference.info_nce_loss),
    "nt_xent_loss": (mb.nt_xent_loss, reference.nt_xent_loss),
}


def main() -> None:
    installed = Path(mb.__file__).resolve()
    assert "site-packages" in installed.parts, f"{installed} is not an installed package"
    assert (installed.parent / "py.typed").exists()
    torch.manual_seed(0)
    rows = [torch.nn.functional.normalize(torch.randn(300, 16), dim=1).requires_grad_() for _ in range(2)]
    for name, (tiled, dense) in LOSSES.items():
        loss, expected = tiled(*rows, 10.0), dense(*rows, 10.0)
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(torch.autograd.grad(loss, rows), torch.autograd.grad(expected, rows), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
        print(f"{name}: {loss.item():.4f}")
    tower = torch.nn.Linear(16, 8)
    features = mb.chunked(tower, rows[0], chunk_size=64)
    mb.supcon_loss(features, torch.arange(300) % 7, temperature=0.1, normalize=True).backward()
    assert tower.weight.grad is not None
    for words in (["--version"], ["--help"], ["plan", "--help"]):
        subprocess.run([sys.executable, "-I", "-m", "megabatch", *words], check=True, stdout=subprocess.DEVNULL)
    print(f"megabatch {mb.__version__} works with torch {torch.__version__} on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
