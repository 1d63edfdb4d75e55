"""A policy-gradient step under DistributedDataParallel, on two processes.

    torchrun --nproc-per-node 2 examples/ddp.py

Each process has documents of its own. The losses of all processes add up to the loss of the step,
and their gradients to its gradient, however unevenly the tokens are spread.
"""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import pgtoolkit

VOCABULARY = 32
DOCUMENTS = 4
LENGTH = 12

distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = distributed.get_rank()
device = (
    torch.device("cuda", rank % torch.cuda.device_count())
    if torch.cuda.is_available()
    else torch.device("cpu")
)

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# This process's documents, with a different number of trained tokens each.
torch.manual_seed(1 + rank)
tokens = torch.randint(0, VOCABULARY, (DOCUMENTS, LENGTH + 1), device=device)
inputs = tokens[:, :-1]
labels = tokens[:, 1:]
mask = torch.arange(LENGTH, device=device) < torch.randint(
    1, LENGTH + 1, (DOCUMENTS, 1), device=device
)
advantages = torch.randn(DOCUMENTS, device=device)
with torch.no_grad():
    old_log_probs = model(inputs).log_softmax(-1).gather(-1, labels[..., None])[..., 0]

for update in range(4):
    arguments = pgtoolkit.from_padded(
        logits=model(inputs),
        labels=labels,
        mask=mask,
        old_log_probs=old_log_probs,
        advantages=advantages,
    )
    # data_group: the documents of all processes are one step, and this loss is the share of this
    # process's documents.
    out = pgtoolkit.policy_loss(
        **arguments,
        loss="grpo",
        aggregation="token_mean",
        metrics="basic",
        data_group=distributed.group.WORLD,
    )
    # DistributedDataParallel takes the mean over processes; the step needs the sum.
    (out.loss * distributed.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()
    step_loss = out.loss.detach().clone()
    distributed.all_reduce(step_loss)
    if rank == 0:
        print(f"update {update}: loss {step_loss.item():.4f}")

# The model goes before its process group: it would end the group's threads while it holds Python's
# lock, for which one of them may wait.
del model
distributed.destroy_process_group()
