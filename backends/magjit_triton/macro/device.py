"""What the schedule space and the cost model ask of a GPU; a table serves where there is none."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from magjit_triton.macro.errors import NoDeviceError

__all__ = ["DEVICES", "Device"]

_RESERVED_SHARED = 1024
_REGISTER_UNIT = 256


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.

    Attributes:
        name: as the driver has it.
        capability: 90 for 9.0.
        multiprocessors: how many.
        shared_per_block: bytes that a block may ask for.
        shared_per_multiprocessor: bytes that the blocks of a multiprocessor share.
        registers: of 32 bits, of a multiprocessor.
        threads, blocks: most of a multiprocessor.
        cache: bytes of the second-level cache.
        clock: Hz.
        bandwidth: bytes a second of its memory.
        operations: of 16-bit types on tensor cores, a clock and a multiprocessor.
    """

    name: str
    capability: int
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    registers: int = 65536
    threads: int = 2048
    blocks: int = 32
    cache: int = 50 * 2**20
    clock: float = 1.75e9
    bandwidth: float = 3.0e12
    operations: int = 4096

    @classmethod
    def current(cls) -> Device:
        """The current CUDA device.

        Raises:
            NoDeviceError: there is none.
        """
        if not torch.cuda.is_available():
            raise NoDeviceError(
                "There is no CUDA device",
                remedy=f"name one: {', '.join(DEVICES)}; kernels are then built, not measured",
            )
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        like = _like(found.name, found.major * 10 + found.minor)
        # Megahertz and bits; the attributes are missing from some builds of torch.
        clock = getattr(found, "clock_rate", 0) * 1e3
        width = getattr(found, "memory_bus_width", 0) / 8
        memory = 2e3 * getattr(found, "memory_clock_rate", 0) * width
        return replace(
            like,
            name=found.name,
            capability=found.major * 10 + found.minor,
            multiprocessors=found.multi_processor_count,
            shared_per_block=getattr(found, "shared_memory_per_block_optin", like.shared_per_block),
            shared_per_multiprocessor=getattr(
                found, "shared_memory_per_multiprocessor", like.shared_per_multiprocessor
            ),
            registers=getattr(found, "regs_per_multiprocessor", like.registers),
            threads=getattr(found, "max_threads_per_multi_processor", like.threads),
            cache=getattr(found, "L2_cache_size", like.cache),
            clock=clock or like.clock,
            bandwidth=memory or like.bandwidth,
        )

    @classmethod
    def named(cls, name: str | None) -> Device:
        """One of the table by its key, or the current one without a name.

        Raises:
            NoDeviceError: neither is there.
        """
        if name is None:
            return cls.current()
        if name.lower() not in DEVICES:
            raise NoDeviceError(f"No device is called {name!r}", remedy=", ".join(DEVICES))
        return DEVICES[name.lower()]

    def occupancy(self, shared: int, registers: int, warps: int) -> int:
        """How many blocks a multiprocessor runs at a time; 0 where not even one fits.

        Args:
            shared: bytes of a block.
            registers: of a thread.
            warps: of a block.
        """
        if shared > self.shared_per_block:
            return 0
        of_warp = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
        return min(
            self.shared_per_multiprocessor // (shared + _RESERVED_SHARED),
            self.registers // (of_warp * warps),
            self.threads // (32 * warps),
            self.blocks,
        )

    def flops(self, itemsize: int, *, exact: bool = False) -> float:
        """Additions and multiplications a second, at most."""
        a_clock = self.operations / (itemsize // 2)
        if exact:
            a_clock = 256.0
        return a_clock * self.multiprocessors * self.clock

    def as_json(self) -> dict[str, str | int | float]:
        """All fields."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


DEVICES = {
    "h200": Device("NVIDIA H200", 90, 132, 232448, 233472, clock=1.98e9, bandwidth=4.8e12),
    "h100": Device(
        "NVIDIA H100 80GB HBM3", 90, 132, 232448, 233472, clock=1.98e9, bandwidth=3.35e12
    ),
    "a100": Device(
        "NVIDIA A100-SXM4-80GB",
        80,
        108,
        166912,
        167936,
        cache=40 * 2**20,
        clock=1.41e9,
        bandwidth=2.04e12,
        operations=2048,
    ),
}
"""From the data sheets and the tuning guides of NVIDIA."""


def _like(name: str, capability: int) -> Device:
    for one in DEVICES.values():
        if one.name.split()[1].split("-")[0] in name:
            return one
    return DEVICES["h100" if capability >= 90 else "a100"]
