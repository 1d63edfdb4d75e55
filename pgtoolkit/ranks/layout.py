"""Which ranks share which part of a step: one device mesh over all processes, with a group for each
axis."""

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

    mesh: of the four AXES, None for one process, which has no group at all.
    loss_group: the ranks over data_parallel and sequence_data_parallel, whose losses, metrics and
        gradients add up to the step's; None where that is one rank. loss_mesh: the same as a mesh
        of one axis.
    world_group: all ranks; takes CPU tensors also where the work is on GPUs.
    node_group: the ranks of this node, None where that is this one alone. readers: the first rank
        of each node, which reads files for the others of it; reader: this node's.
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
        """The layout of the default process group, which must exist; sizes: of AXES, 1 where not
        given.

        Every process calls this at the same time. Raises ValueError where the sizes do not multiply
        to the ranks.
        """
        shape = tuple(sizes.get(axis, 1) for axis in AXES)
        if math.prod(shape) != dist.get_world_size():
            raise ValueError(
                f"{shape} needs {math.prod(shape)} processes (got {dist.get_world_size()})"
            )
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        loss_mesh = mesh[_LOSS_AXES]._flatten("loss")
        names = [""] * dist.get_world_size()
        dist.all_gather_object(names, node())
        nodes = {
            name: [rank for rank, other in enumerate(names) if other == name] for name in names
        }
        timeout = timedelta(seconds=timeout_seconds)
        whole = len(nodes) == 1
        groups = {
            name: dist.group.WORLD if whole else dist.new_group(nodes[name], timeout)
            for name in nodes
        }
        here = nodes[names[dist.get_rank()]]
        node_group = groups[node()] if len(here) > 1 else None
        assert not isinstance(node_group, int)  # as it is of a process outside of it
        # Groups made from the default one start with a timeout of their own, which is not its.
        for group in (*mesh.get_all_groups(), loss_mesh.get_group()):
            _set_timeout(timeout, group)
        return Layout(
            mesh=mesh,
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            loss_group=loss_mesh.get_group() if loss_mesh.size() > 1 else None,
            loss_mesh=loss_mesh,
            world_group=dist.group.WORLD,
            node_group=node_group,
            readers=tuple(ranks[0] for ranks in nodes.values()),
            reader=here[0],
        )

    def size(self, axis: str) -> int:
        """Ranks along one of AXES."""
        return 1 if self.mesh is None else self.mesh[axis].size()

    def rank_in(self, axis: str) -> int:
        """This process's place along one of AXES."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup | None:
        """The ranks that differ from this one in nothing but `axis`; None where that is this one
        alone."""
        if self.mesh is None or self.size(axis) == 1:
            return None
        return self.mesh.get_group(axis)


ONE_PROCESS = Layout()
"""One process that does everything."""
