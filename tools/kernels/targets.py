"""The GPUs that kernels are compiled for: what they have of everything, from their makers' manuals."""

from dataclasses import dataclass

KIB = 2**10


@dataclass(frozen=True)
class Target:
    """Limits of one architecture. A multiprocessor is an SM or a CU, a warp also a wavefront.

    Attributes:
        matrix: Prefix of the matrix instructions that bf16/fp16 must use.
        shared_per_block: Bytes that a block may have, if it asks for them.
        shared: Bytes of a multiprocessor.
        reserved: Bytes of it that every block takes for the system.
        register_files: What a multiprocessor's registers are divided into; warps take turns.
        registers: Per thread of a warp, in one such file.
        register_unit: Registers per thread are given out in multiples of it.
        warps: At most, in one such file.
    """

    name: str
    gpu: str
    matrix: str
    shared_per_block: int
    shared: int
    reserved: int
    warp_size: int = 32
    register_files: int = 4
    registers: int = 512
    register_unit: int = 8
    warps: int = 16

    @property
    def backend(self) -> str:
        return "hip" if self.name.startswith("gfx") else "cuda"

    @property
    def arch(self) -> int | str:
        return self.name if self.backend == "hip" else int(self.name.removeprefix("sm_"))

    def blocks(self, registers: int, shared: int, warps: int) -> int:
        """That are at work at a time on one multiprocessor."""
        taken = -(-max(registers, 1) // self.register_unit) * self.register_unit
        per_file = min(self.registers // taken, self.warps)
        by_warps = per_file * self.register_files // warps
        return min(by_warps, self.shared // (shared + self.reserved or 1))


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "A100", "HMMA", 163 * KIB, 164 * KIB, KIB),
        Target("sm_86", "RTX 3090, A10", "HMMA", 99 * KIB, 100 * KIB, KIB, warps=12),
        Target("sm_90", "H100", "HGMMA", 227 * KIB, 228 * KIB, KIB),
        Target("sm_100", "B200", "UTC", 227 * KIB, 228 * KIB, KIB),
        Target("gfx942", "MI300X", "v_mfma", 64 * KIB, 64 * KIB, 0, warp_size=64, warps=8),
        Target("gfx950", "MI355X", "v_mfma", 160 * KIB, 160 * KIB, 0, warp_size=64, warps=8),
    )
}
