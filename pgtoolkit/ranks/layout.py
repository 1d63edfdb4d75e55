"""The layout of ranks, which says who shares which part of a step: one device mesh over all
processes, with a group for each axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pgtoolkit.ranks.environment import AXES, node

# Its name where torch has made it public, and warns of the private one.
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
_LOSS_AXES = ("data_parallel", "sequence_data_parallel")


@dataclass(frozen=True)
class Layout:
    """A process's place among all of them.

    mesh: of the four AXES; None for one process, which has no group at all.
    loss_group: the ranks over data_parallel and sequence_data_parallel, whose losses, metrics and
        gradients add up to those of the step; None where that is one rank.
    loss_mesh: the ranks of loss_group as a mesh of one axis.
    world_group: all ranks; takes CPU tensors also where the work is on GPUs.
    node_group: the ranks of this node; None where that is this one alone.
    readers: the first rank of each node, which reads files for the others of it.
    reader: the one of readers on this node.
    """

    mesh: DeviceMesh | None = None
    world_size: int = 1
    rank: int = 0
    loss_group: ProcessGroup | None = None
    loss_mesh: DeviceMesh | None = None
    world_group: ProcessGroup | None = None
    node_group: ProcessGroup | None = None
    readers: tuple[int, ...] = (0,)
    reader: int = 0

    @staticmethod
    def of_world(device_type: str = "cpu", timeout_seconds: float = 300, **sizes: int) -> Layout:
        """Return the layout of the default process group, which must exist.

        sizes: the ranks along each of AXES, 1 for those left out. Every process calls this at the
            same time.
        Raises ValueError where the product of the sizes is not the number of processes.
        """
        shape = tuple(sizes.get(axis, 1) for axis in AXES)
        if math.prod(shape) != dist.get_world_size():
            raise ValueError(
                f"{shape} needs {math.prod(shape)} processes (got {dist.get_world_size()})"
            )
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        loss_mesh = mesh[_LOSS_AXES]._flatten("loss")
        timeout = timedelta(seconds=timeout_seconds)
        nodes = _ranks_of_nodes()
        ranks_here = nodes[node()]
        node_group = _group_of_node(nodes, timeout) if len(nodes) > 1 else dist.group.WORLD
        # A group that is made from the default one does not take over its timeout.
        for group in (*mesh.get_all_groups(), loss_mesh.get_group()):
            _set_timeout(timeout, group)
        return Layout(
            mesh=mesh,
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            loss_group=loss_mesh.get_group() if loss_mesh.size() > 1 else None,
            loss_mesh=loss_mesh,
            world_group=dist.group.WORLD,
            node_group=node_group if len(ranks_here) > 1 else None,
            readers=tuple(ranks[0] for ranks in nodes.values()),
            reader=ranks_here[0],
        )

    def size(self, axis: str) -> int:
        """Return the number of ranks along one of AXES."""
        return 1 if self.mesh is None else self.mesh.size(AXES.index(axis))

    def rank_in(self, axis: str) -> int:
        """Return this process's place along one of AXES."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup | None:
        """Return the ranks that differ from this one in nothing but `axis`; None where that is this
        one alone."""
        if self.mesh is None or self.size(axis) == 1:
            return None
        return self.mesh.get_group(axis)


def _ranks_of_nodes() -> dict[str, list[int]]:
    """Return the ranks of each node by its name, in order; every process calls this."""
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, node())
    return {name: [rank for rank, other in enumerate(names) if other == name] for name in names}


def _group_of_node(nodes: dict[str, list[int]], timeout: timedelta) -> ProcessGroup | None:
    """Make a group for each of several nodes, and return that of this node.

    Every process calls this.
    """
    groups = {name: dist.new_group(ranks, timeout) for name, ranks in nodes.items()}
    group = groups[node()]
    assert not isinstance(group, int)  # torch returns a number for a group of other processes
    return group


ONE_PROCESS = Layout()
"""One process that does everything."""
