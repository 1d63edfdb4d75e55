"""A Lightning module of your own, driven through steps of a number of documents.

`micro_batch_loss` says what the loss of one micro-batch is, given the totals of its step, and
`configure_optimizers` which optimizer it has.
"""

import lightning
import torch

import pgtoolkit
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.accumulation import DynamicAccumulation


class MyModule(DynamicAccumulation):
    def __init__(self, model, layout=ONE_PROCESS):
        super().__init__(layout, max_grad_norm=1.0)
        self.model = model  # token ids (T,) of a document to logits (T, V)

    def micro_batch_loss(self, micro_batch, totals):
        vectors = (
            micro_batch.labels,
            micro_batch.old_log_probs,
            micro_batch.advantages,
            micro_batch.document_index,
        )
        sizes = {
            "num_documents": micro_batch.num_documents,
            "group_index": micro_batch.group_index,
            "totals": totals,
        }
        # The documents of a micro-batch stand one after another, and must not attend to each other.
        # A model that takes packed documents, by micro_batch.position_ids, reads them all at once.
        documents = micro_batch.tokens.split(list(micro_batch.document_lengths))
        logits = torch.cat([self.model(tokens) for tokens in documents])
        # None where each document is one by itself
        sizes["trajectory_index"] = micro_batch.trajectory_index
        return pgtoolkit.policy_loss(logits, *vectors, loss="grpo", metrics="basic", **sizes)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(model, documents, docs_per_step, max_tokens, layout=ONE_PROCESS):
    """Train on the documents once, and return the module and the trainer.

    Two processes, of `torchrun --nproc-per-node=2 FILE`, train the same as one, with

        torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
        layout = Layout.of_world(data_parallel=2)  # of pgtoolkit.ranks.layout; "cuda", ... on GPUs

    Each has the same model and documents, and takes its share of each step.

    documents: a list of Document from pgtoolkit.document, each a prompt with one completion:

        Document(
            tokens=torch.tensor([5, 3, 8, 1]),
            loss_mask=torch.tensor([False, False, True, True]),  # the completion, 2 tokens
            advantages=torch.tensor([0.7, 0.7]),  # of these 2, in order
            old_log_probs=torch.tensor([-1.2, -0.4]),
            group=0,  # the number of the prompt
            name="completion 0 of prompt 0",  # in messages
        )
    """
    module = MyModule(model, layout)
    share = {
        "data_rank": layout.rank_in("data_parallel"),
        "data_size": layout.size("data_parallel"),
    }
    steps = torch.utils.data.DataLoader(
        documents,
        batch_size=docs_per_step,
        collate_fn=lambda batch: make_step(batch, max_tokens, **share),
    )
    writes = layout.rank == 0  # to Lightning, each process trains alone
    trainer = lightning.Trainer(max_epochs=1, devices=1, logger=writes, enable_checkpointing=writes)
    trainer.fit(module, steps)
    return module, trainer
