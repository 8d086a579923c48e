"""`get_accelerator()`: the device of this rank, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch


class Accelerator:
    """CUDA if there is a GPU, else the CPU; other attributes are forwarded to torch.cuda or torch.cpu."""

    def __init__(self) -> None:
        self._kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._torch: Any = getattr(torch, self._kind)

    def device_name(self, device_index: int | None = None) -> str:
        """Device name for `tensor.to(…)`."""
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device_name(self) -> str:
        """Name of this rank's device."""
        return self._kind if self._kind == "cpu" else f"cuda:{torch.cuda.current_device()}"

    def communication_backend_name(self) -> str:
        """Name of the communication backend: nccl or gloo."""
        return "nccl" if self._kind == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether the device supports bf16."""
        return self._kind == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device supports fp16."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seeds the device's random generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """Releases cached device memory."""
        if self._kind == "cuda":
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def get_accelerator() -> Accelerator:
    """Returns the accelerator of this rank."""
    return Accelerator()
