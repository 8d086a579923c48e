"""Megatron's names for this rank's place along the axes, which scripts ask `engine.mpu` for."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from shardwise.core.errors import UserError
from shardwise.distributed.mesh import World


class ModelParallelUnit:
    """This rank's place in its data, tensor and sequence groups."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get_data_parallel_rank(self) -> int:
        """Which part of the data this rank reads."""
        return self._world.place.data

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks that see different data."""
        return self._world.layout.data

    def get_model_parallel_rank(self) -> int:
        """Rank within the tensor group."""
        return self._world.place.tensor

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks of a tensor group."""
        return self._world.layout.tensor

    def get_model_parallel_group(self) -> ProcessGroup:
        """The tensor group."""
        if self._world.tensor is None:
            raise UserError("mpu.get_model_parallel_group()", None, "there is no tensor axis", "set autotp_size")
        return self._world.tensor.get_group()

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_sequence_parallel_rank(self) -> int:
        """Rank within the group that shares each sequence."""
        return self._world.place.context

    def get_sequence_parallel_world_size(self) -> int:
        """Number of ranks that share each sequence."""
        return self._world.layout.context

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """The group that shares each sequence."""
        if self._world.context is None:
            problem = "there is no sequence axis"
            raise UserError("mpu.get_sequence_parallel_group()", None, problem, "set sequence_parallel_size")
        return self._world.context.get_group()
