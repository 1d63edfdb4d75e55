"""Mistakes of what ranks share: gradients, norms, documents, agreement, shards of the model."""

from dataclasses import replace

import torch

from mutants import mutant

SUMMED = "test_gradients_are_summed_bitwise_alike_on_all_ranks"


@mutant("ranks.gradients:sum_gradients", SUMMED)
def gradients_are_averaged_over_ranks(right, parameters, group):
    parameters = list(parameters)
    right(parameters, group)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= group.size()


@mutant("ranks.gradients:_buckets", SUMMED)
def gradients_beyond_the_first_bucket_stay_one_rank_s(right, gradients):
    return list(right(gradients))[:1]


@mutant("ranks.gradients:clip_gradients", "test_any_number_of_ranks_makes_the_run_of_one_process[fsdp]")
def the_norm_is_that_of_one_rank_s_part(right, parameters, layout, limit):
    from pgtoolkit.ranks.layout import ONE_PROCESS

    return right(list(parameters), layout, limit) if layout is ONE_PROCESS else _norm_here(parameters, limit)


def _norm_here(parameters, limit):
    from pgtoolkit.ranks.gradients import local

    gradients = [local(one.grad) for one in parameters if one.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients)).double().square().sum().sqrt()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype))
    return norm


@mutant("ranks.agreement:check_same", "test_ranks_that_hold_other_documents_are_told")
def ranks_may_hold_other_documents(right, layout, what, digest):
    return right(layout, what, 0)


@mutant("ranks.agreement:read_once", "test_one_rank_of_each_node_reads_and_all_have_the_weights_of_one_process")
def every_rank_reads_for_itself(right, layout, read, outline=None):
    return read()


@mutant("model.attention:local_tokens", "test_a_rank_gets_its_piece_of_the_packed_axis")
def each_rank_counts_positions_from_zero(right, micro_batch, layout):
    part = right(micro_batch, layout)
    if layout.size("sequence_data_parallel") == 1:
        return part
    return replace(part, position_ids=torch.arange(len(part.position_ids)))


@mutant("model.tensor:vocabulary_start", "test_the_step_is_the_same_however_the_model_is_spread")
def the_head_s_shards_all_begin_at_zero(right, vocabulary, mesh):
    return 0


@mutant(
    "rollouts.steps:divide_among_ranks",
    "test_every_rank_gets_as_many_micro_batches_and_together_they_hold_the_step_once",
)
def the_last_document_is_no_rank_s(right, documents, num_ranks):
    shares = right(documents, num_ranks)
    return [share[:-1] if len(share) > 1 and num_ranks > 1 else share for share in shares]
