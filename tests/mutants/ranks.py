"""Mistakes in the work that ranks share: gradients, norms, documents, agreement, shards."""

from dataclasses import replace

import torch

from mutants import mutant
from pgtoolkit.ranks.gradients import local
from pgtoolkit.ranks.layout import ONE_PROCESS


@mutant("ranks.gradients:sum_gradients")
def gradients_are_averaged_over_ranks(right, parameters, group):
    parameters = list(parameters)
    right(parameters, group)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= group.size()


@mutant("ranks.gradients:_buckets")
def gradients_after_the_first_bucket_are_not_summed_over_ranks(right, gradients):
    return list(right(gradients))[:1]


@mutant("ranks.gradients:clip_gradients")
def the_gradient_norm_is_that_of_one_ranks_part(right, parameters, layout, limit):
    if layout is ONE_PROCESS:
        return right(list(parameters), layout, limit)
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients)).double().square().sum().sqrt()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype))
    return norm


@mutant("ranks.agreement:check_same")
def ranks_with_different_data_pass_the_check(right, layout, name, digest):
    return right(layout, name, 0)


@mutant("ranks.agreement:read_once")
def every_rank_reads_the_file_itself(right, layout, read, outline=None):
    return read()


@mutant("model.attention:local_tokens")
def each_rank_counts_positions_from_zero(right, micro_batch, layout):
    part = right(micro_batch, layout)
    if layout.size("sequence_data_parallel") == 1:
        return part
    return replace(part, position_ids=torch.arange(len(part.position_ids)))


@mutant("model.tensor:vocabulary_start")
def all_shards_of_the_head_begin_at_column_zero(right, vocabulary, mesh):
    return 0


@mutant("rollouts.steps:divide_among_ranks")
def the_last_document_of_each_rank_is_lost(right, documents, num_ranks, sharing=False):
    shares = right(documents, num_ranks, sharing)
    return [share[:-1] if len(share) > 1 and num_ranks > 1 else share for share in shares]
