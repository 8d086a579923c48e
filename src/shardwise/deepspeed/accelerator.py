"""`get_accelerator()`: the device of this rank, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch


class Accelerator:
    """CUDA where there is a GPU, else the CPU; what is not named here is asked of torch.cuda or torch.cpu."""

    def __init__(self) -> None:
        self._kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._torch: Any = getattr(torch, self._kind)

    def device_name(self, device_index: int | None = None) -> str:
        """The name for `tensor.to(…)`."""
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device_name(self) -> str:
        """The name of this rank's device."""
        return self._kind if self._kind == "cpu" else f"cuda:{torch.cuda.current_device()}"

    def communication_backend_name(self) -> str:
        """nccl or gloo."""
        return "nccl" if self._kind == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return self._kind == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seeds the device."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """Gives unused device memory back."""
        if self._kind == "cuda":
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def get_accelerator() -> Accelerator:
    """The device of this rank."""
    return Accelerator()
