"""The words that the field has for our keys and groups."""

from __future__ import annotations

_FIELD = {
    "aggregation.divisor": "L",
    "rollout.group_size": (
        "n k group groups samples rollouts completions num_samples num_rollouts num_completions "
        "n_samples n_rollouts rollouts_per_example rollouts_per_prompt samples_per_prompt "
        "n_samples_per_prompt num_samples_per_prompt"
    ),
    "rollout.prompts_per_batch": (
        "prompts num_prompts n_prompts prompts_per_step rollout_batch_size"
    ),
    "rollout.max_completion_length": (
        "max_len max_length max_new_tokens response_length max_response_length max_seq_len seq_len "
        "completion_length max_tokens max_output_tokens max_completion_tokens max_gen_len "
        "max_gen_length max_generation_length generate_max_len"
    ),
    "rollout.temperature": "temp",
    "rollout.passes": "update_epochs update_epochs_per_batch num_ppo_epochs",
    "rollout.lag": "max_async_level async_level staleness",
    "accumulation.docs_per_step": (
        "batch batch_size global_batch_size mini_batch mini_batch_size minibatch_size"
    ),
    "accumulation.max_tokens": (
        "micro_batch micro_batch_size microbatch_size micro_train_batch_size tokens_per_batch "
        "max_tokens_per_gpu"
    ),
    "trainer.max_steps": (
        "steps num_steps n_steps total_steps train_steps training_steps iterations iters max_iter "
        "max_iters updates num_updates epochs total_epochs num_epochs n_epochs max_epochs"
    ),
    "trainer.checkpoint_every": (
        "save save_every save_steps save_interval save_freq checkpoint checkpoints ckpt_every "
        "checkpoint_every "
        "interval checkpoint_interval ckpt_interval"
    ),
    "trainer.device": "cuda gpu cpu accelerator",
    "evaluation.every": (
        "eval eval_every eval_interval eval_freq eval_steps evaluate_every val_every test_freq"
    ),
    "loss.epsilon_low loss.epsilon_high": (
        "clip clip_ratio clip_range cliprange clip_eps clip_epsilon eps_clip eps epsilon"
    ),
    "loss.epsilon_high": "eps_high eps_clip_high clip_high clip_higher clip_ratio_high",
    "loss.epsilon_low": "eps_low eps_clip_low clip_low clip_ratio_low",
    "seed": "seeds",
    "optimizer.learning_rate": "actor_lr actor_learning_rate policy_lr policy_learning_rate",
    "critic.learning_rate": "critic_lr critic_learning_rate value_lr",
    "critic.clip": "value_clip",
    "optimizer.warmup_steps": "warmup warm_up",
    "optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type",
    "optimizer.weight_decay": "wd",
    "optimizer.max_grad_norm": "grad_clip gradient_clip clip_grad_norm max_norm grad_norm",
    "kl.coefficient": "beta kl_coef kl_coeff kl_beta kl_weight init_kl_coef",
    "entropy.coefficient": "ent_coef entropy_coeff entropy_bonus entropy_weight",
    "parallelism.data_parallel": (
        "gpus num_gpus n_gpus nproc nproc_per_node world_size devices num_devices processes"
    ),
    "model.dtype": "precision torch_dtype bf16 fp16 half",
    "model.lora_rank": "lora lora_r rank",
    "model.path": (
        "path model_name model_name_or_path model_path base_model pretrained pretrain name_or_path"
    ),
    "task.path": (
        "dataset dataset_name data data_path train_file train_files train_data train_path "
        "prompt_data"
    ),
    "task.verifier": "reward reward_fn reward_funcs reward_function verifier rewards",
    "loss": "algo algorithm method loss_fn loss_type objective policy_loss type",
    "advantage": "estimator adv_estimator advantage_estimator baseline",
    "tracking": "wandb mlflow tensorboard tracker logger logging report_to",
    "sampler": "vllm engine backend",
    "kl": "use_kl use_kl_loss",
    "tracking.run_name": "name exp_name wandb_name",
    "tracking.experiment": "project project_name wandb_project experiment_name",
    "hydra.run.dir": (
        "output out dir outdir output_dir run_dir save_dir logdir log_dir exp_dir workdir "
        "output_folder"
    ),
}
"""Our keys, or our group -> the words that the field has for them."""

FIELD_WORDS = {word: keys.split() for keys, words in _FIELD.items() for word in words.split()}
"""A word of the field -> our keys, or our groups, that are likely meant by it."""
