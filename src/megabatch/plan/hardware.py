"""GPUs as their makers' data sheets describe them: the one place for such figures. Peaks, not what programs reach."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU in its usual server: bytes of memory, flops per second of dense products of bf16/fp16 summed in float32
    and of tf32, bytes per second from and to its memory, to another GPU of its node in one direction, from the host's
    memory, and to another node by the adapter that is usual beside it."""

    name: str
    capacity: float
    half: float
    tf32: float
    memory: float
    link: float
    host: float
    network: float
    per_node: int = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVLink 3: 600 GB/s in both directions together, in the A800 400. HDR InfiniBand: 200 Gbit/s.
        Gpu("A100-80", 80 * GIB, 312e12, 156e12, 2039e9, 300e9, 32e9, 25e9),
        Gpu("A800-80", 80 * GIB, 312e12, 156e12, 2039e9, 200e9, 32e9, 25e9),
        # NVLink 4 and NDR InfiniBand, 400 Gbit/s.
        Gpu("H100-80", 80 * GIB, 989e12, 494e12, 3350e9, 450e9, 64e9, 50e9),
        # The 180 GB of the HGX board; NVLink 5.
        Gpu("B200", 180 * GIB, 2250e12, 1125e12, 8000e9, 900e9, 64e9, 50e9),
        # A ring uses one of seven Infinity Fabric links in each direction.
        Gpu("MI300X", 192 * GIB, 1307e12, 653.7e12, 5300e9, 64e9, 64e9, 50e9),
        # No NVLink: peers talk over PCIe 4 x16. 100 Gbit/s Ethernet between two nodes, shared by eight.
        Gpu("RTX-4090", 24 * GIB, 165.2e12, 82.6e12, 1008e9, 32e9, 32e9, 12.5e9 / 8),
    )
}
