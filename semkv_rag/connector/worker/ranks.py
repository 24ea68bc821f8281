"""The ranks that compute one model together.

Tensor parallel spreads a layer's heads over ranks, pipeline parallel the layers over stages of them. All
ranks of an engine blend the same requests in the same order. What each finds of its own heads and layers
is put together here, so that all pick the same tokens, and hidden states go from stage to stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.utils import get_pp_indices
from vllm.sequence import IntermediateTensors


def total(found: Tensor) -> Tensor:
    """The sum over all ranks of what each has found; called on all of them at once.

    Args:
        found: floats: vLLM's all-reduce over shared memory takes no integers. May be written over.
    """
    found, pipeline = tensor_model_parallel_all_reduce(found), get_pp_group()
    if pipeline.world_size > 1:
        # Not by the group's own `all_reduce`: on a CPU it and `send_tensor_dict` use the same memory, and
        # one reads what the other wrote.
        torch.distributed.all_reduce(found, group=pipeline.device_group)
    return found


@dataclass(frozen=True)
class Ranks:
    """One rank among them.

    Attributes:
        stage: which stage of the pipeline it is in, of how many `stages`.
        rank: its number, of how many `count`; stage by stage.
        first_layer: the first of its `own_layers`.
        layers: of the model.
    """

    stage: int
    stages: int
    rank: int
    count: int
    first_layer: int
    own_layers: int
    layers: int

    @classmethod
    def of_this_process(cls, layers: int) -> Ranks:
        """This process's, among vLLM's groups.

        Args:
            layers: of the whole model.
        """
        pipeline, width = get_pp_group(), get_tensor_model_parallel_world_size()
        stage, stages = pipeline.rank_in_group, pipeline.world_size
        first, end = get_pp_indices(layers, stage, stages)
        rank = stage * width + get_tensor_model_parallel_rank()
        return cls(stage, stages, rank, stages * width, first, end - first, layers)

    def of_all_layers(self, found: Tensor) -> Tensor:
        """What was found in each layer of the model, over all heads; called as `total` is.

        Args:
            found: in this rank's layers, [layers of this rank, ...].

        Returns:
            [layers, ...].
        """
        if self.stages > 1:
            own, found = found, found.new_zeros(self.layers, *found.shape[1:])
            found[self.first_layer :][: self.own_layers] = own
        return total(found)

    def receive(self) -> IntermediateTensors | None:
        """The hidden states that the stage before hands on; None in the first one."""
        if self.stage == 0:
            return None
        tensors = get_pp_group().recv_tensor_dict(all_gather_group=get_tp_group())
        assert tensors is not None
        return IntermediateTensors(tensors)

    def hand_on(self, states: IntermediateTensors) -> None:
        """Hand hidden states on to the next stage, which receives them."""
        get_pp_group().send_tensor_dict(states.tensors, all_gather_group=get_tp_group())
