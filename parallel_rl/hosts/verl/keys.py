"""Names of verl (0.9.1), keys that a port does not read, and their fates."""

from parallel_rl.hosts.port_report import Table

# our aggregation for each loss_agg_mode
AGGREGATIONS = {
    "token-mean": "token-mean", "seq-mean-token-mean": "seq-mean-token-mean", "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-norm": "constant-length", "token-sum": "token-sum",
}  # fmt: skip
# our estimator for each kl_loss_type and kl_penalty
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
_JOINT = "actor_rollout_ref"
_ACTOR, _MODEL, _ROLLOUT = f"{_JOINT}.actor", f"{_JOINT}.model", f"{_JOINT}.rollout"
_SPEED = "speed and memory alone, in another program"
_SAMPLER = "of its generation engine"
_NO_COUNTERPART = "no counterpart in this trainer"
_WEIGHTS = "all weights are trained"
# (section, kind, our key, why, names); in a name "a=1" the value 1 is what this trainer does
_GROUPS = (
    ("", "no_effect", "", "a class of its program", "*._target_"),
    ("", "no_effect", "", "of its profilers", "*.profiler global_profiler"),
    ("", "no_effect", "", "torchrun or Slurm starts the ranks", "ray_kwargs *.nccl_timeout"),
    ("", "no_effect", "", "the way data takes between its processes", "transfer_queue"),
    ("", "yours", "reward", "a checker by name or a server; see docs/rewards.md", "custom_reward_function reward reward_model "
     "reward_manager reward.reward_model sandbox_fusion data.reward_fn_key reward_model.reward_manager=naive "
     "reward_model.reward_kwargs reward_model.reward_loop_source=register"),
    ("", "no_effect", "", _SPEED, "reward.num_workers reward.sandbox_fusion.max_concurrent "
     "reward.sandbox_fusion.memory_limit_mb sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb "
     "reward_model.num_workers reward_model.launch_reward_fn_async reward_model.use_reward_loop"),
    ("", "unsupported", "", _NO_COUNTERPART, "distillation skip skip.rollout skip.rollout_tq "
     "skip.async_rollout algorithm.pf_ppo algorithm.use_pf_ppo algorithm.gdpo_reward_keys"),
    ("algorithm.rollout_correction", "unsupported", "", _NO_COUNTERPART, "rollout_rs"),
    ("algorithm.filter_groups", "no_effect", "", "prompts are kept by the mean of their rewards", "metric "
     "max_inflight_gen_batches"),
    (_JOINT, "no_effect", "", _SPEED, "hybrid_engine"),
    (_ACTOR, "no_effect", "", _SPEED, "use_torch_compile entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
     "entropy_checkpointing use_prefix_grouper pad_to_length load_weight calculate_entropy calculate_sum_pi_squared "
     "sum_pi_squared_checkpointing log_prob_micro_batch_size engine global_batch_info model_config "
     "model_engine forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu"),
    (_ACTOR, "yours", "parallel", "the layout of another program", "veomni torchtitan"),
    (_ACTOR, "no_effect", "", "actor_rollout_ref.model or rollout has it", "rollout_n use_remove_padding "
     "use_fused_kernels mtp"),
    (_ACTOR, "no_effect", "", "the samples of a step are split by prompts, in their order", "shuffle data_loader_seed"),
    (_ACTOR, "no_effect", "", "a checkpoint has all that a run needs to resume", "checkpoint"),
    (_ACTOR, "unsupported", "batch.micro_batch_size", "per GPU here", "ppo_micro_batch_size"),
    (_ACTOR, "unsupported", "", _WEIGHTS, "freeze_vision_tower"),
    (_ACTOR, "unsupported", "", _NO_COUNTERPART, "qat router_replay.mode use_rollout_log_probs recompute_old_log_prob=True "
     "kl_reference"),
    (_ACTOR, "no_effect", "", "without router_replay.mode", "router_replay.record_file router_replay.replay_file"),
    (f"{_ACTOR}.policy_loss", "no_effect", "", "of another loss_mode", "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio "
     "ppo_kl_coef dro_beta rollout_correction"),
    (f"{_ACTOR}.policy_loss", "no_effect", "", "verl reads those of the actor", "tau_pos tau_neg"),
    (f"{_ACTOR}.optim", "no_effect", "", "the number of steps is rl.steps", "total_training_steps"),
    (f"{_ACTOR}.optim", "equal", "", "AdamW", "name"),
    (f"{_ACTOR}.optim", "unsupported", "", "AdamW of torch's kind", "optimizer_impl=torch.optim"),
    (f"{_ACTOR}.optim", "no_effect", "", "of Muon", "muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec "
     "muon_match_adamw_update_rms muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode "
     "muon_split_qkv muon_tp_mode use_layer_wise_distributed_optimizer"),
    (f"{_ACTOR}.optim", "unsupported", "", "moments and master weights are float32", "exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32 "
     "main_grads_dtype=fp32 main_params_dtype=fp32"),
    (f"{_ACTOR}.optim", "no_effect", "", _SPEED, "use_precision_aware_optimizer"),
    (f"{_ACTOR}.optim", "no_effect", "", "the warm-up begins at lr / steps", "zero_indexed_step"),
    (f"{_ACTOR}.optim", "no_effect", "", "with a schedule that is not WSD", "lr_wsd_decay_style lr_wsd_decay_steps"),
    (f"{_ACTOR}.optim", "unsupported", "", "the weight decay is constant", "weight_decay_incr_style=constant"),
    (f"{_ACTOR}.optim", "unsupported", "rl.optimizer", "its effect is not checked", "override_optimizer_config"),
    (f"{_ACTOR}.optim", "no_effect", "", "a resumed run keeps its own schedule", "use_checkpoint_opt_param_scheduler"),
    (f"{_ACTOR}.optim", "unsupported", "", _NO_COUNTERPART, "lr_min lr_start lr_decay_ratio=1.0 "
     "decay_type=constant min_lr_factor"),
    (f"{_ACTOR}.fsdp_config", "no_effect", "", _SPEED, "wrap_policy param_offload optimizer_offload offload_policy "
     "reshard_after_forward fsdp_size forward_prefetch use_orig_params entropy_from_logits_with_chunking use_torch_compile "
     "entropy_checkpointing entropy_from_logits_chunk_size forward_only strategy grad_offload mixed_precision "
     "pad_to_length pad_to_length_bucket turbo_config"),
    (f"{_ACTOR}.fsdp_config", "unsupported", "", "weights are bfloat16 or float32", "qat"),
    (f"{_ACTOR}.megatron", "unsupported", "", "weights are bfloat16 or float32", "qat"),
    (f"{_ACTOR}.megatron", "unsupported", "", _NO_COUNTERPART, "router_replay.mode"),
    (f"{_ACTOR}.megatron", "no_effect", "", "without router_replay.mode", "router_replay.record_file "
     "router_replay.replay_file"),
    (f"{_ACTOR}.fsdp_config", "no_effect", "", "master weights are float32", "model_dtype"),
    (f"{_ACTOR}.fsdp_config", "equal", "", "the numbers do not depend on the layout", "full_determinism"),
    (f"{_ACTOR}.megatron", "no_effect", "", _SPEED, "param_offload grad_offload optimizer_offload use_dist_checkpointing "
     "dist_checkpointing_path dist_checkpointing_prefix use_mbridge vanilla_mbridge use_remove_padding forward_only "
     "override_ddp_config dynamic_context_parallel max_seqlen_per_dp_cp_rank use_megatron_fsdp "
     "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient entropy_from_logits_chunk_size "
     "entropy_from_logits_with_chunking pad_bshd_to_minibatch_max pad_to_length pad_to_length_bucket"),
    (f"{_ACTOR}.megatron", "unsupported", "", "stages have equally many layers", "virtual_pipeline_model_parallel_size=1"),
    (f"{_ACTOR}.megatron", "unsupported", "", "the model is as its folder says", "override_mcore_model_config "
     "override_transformer_config"),
    (f"{_ACTOR}.megatron", "no_effect", "", _SPEED, " ".join(
        f"override_transformer_config.{name}" for name in (
            "apply_rope_fusion", "attention_backend", "bias_activation_fusion", "bias_dropout_fusion",
            "deallocate_pipeline_outputs", "gradient_accumulation_fusion", "masked_softmax_fusion", "moe_enable_deepep",
            "moe_grouped_gemm", "moe_permute_fusion", "moe_shared_expert_overlap", "moe_token_dispatcher_type",
            "persist_layer_norm", "use_flash_attn", "use_fused_rmsnorm", "use_fused_swiglu",
        )
    )),
    (f"{_ACTOR}.megatron", "no_effect", "parallel", "actor.megatron has it",
     "override_transformer_config.context_parallel_size override_transformer_config.sequence_parallel "
     "override_transformer_config.use_distributed_optimizer"),
    (f"{_ACTOR}.megatron", "unsupported", "", "stages have equally many layers", " ".join(
        f"override_transformer_config.{name}" for name in (
            "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
            "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
        )
    )),
    (_MODEL, "no_effect", "", _SPEED, "use_shm enable_activation_offload use_liger fused_kernel_options tiled_mlp"),
    (_MODEL, "unsupported", "", _WEIGHTS, "lora_rank lora_adapter_path lora.rank lora.adapter_path"),
    (_MODEL, "no_effect", "", "without an adapter's rank", "lora_alpha target_modules exclude_modules lora"),
    (_MODEL, "no_effect", "", "as run.dtype", "torch_dtype"),
    (_MODEL, "unsupported", "model.hf", "the folder has its own code and config", "trust_remote_code hf_config_path "
     "external_lib"),
    (_MODEL, "yours", "tokenizer.hf", "write it to the folder's chat_template.jinja", "custom_chat_template"),
    (_MODEL, "unsupported", "model.hf", "write it into the folder's config.json", "override_config.model_config "
     "override_config.attn_implementation override_config.moe_config.freeze_moe_router override_config"),
    (_MODEL, "unsupported", "", "no multi-token prediction", "mtp"),
    (_ROLLOUT, "yours", "rl.server", "the trainer samples itself, or from servers: docs/rollout_server.md", "name"),
    (_ROLLOUT, "no_effect", "", _SAMPLER, "mode dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes "
     "free_cache_engine tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size "
     "max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill enable_prefix_caching logprobs_mode "
     "scheduling_policy load_format disable_log_stats multi_stage_wake_up engine_kwargs checkpoint_engine trace "
     "skip_rollout skip_dump_dir skip_tokenizer_init prometheus layer_name_map n_gpus_per_node nnodes disaggregation "
     "over_sample_rate layered_summon limit_images full_determinism router_config_path moe_load_balance_metrics_interval "
     "moe_tensor_parallel_size quantization_config_file seed do_sample skip agent "
     "update_weights_bucket_megabytes enable_sleep_mode"),
    (_ROLLOUT, "no_effect", "", "data has it", "prompt_length response_length"),
    (_ROLLOUT, "no_effect", "", _SPEED, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
     "log_prob_max_token_len_per_gpu"),
    (_ROLLOUT, "equal", "", "recorded where the loss reads them", "calculate_log_probs"),
    (_ROLLOUT, "unsupported", "", _NO_COUNTERPART, "multi_turn ignore_eos enable_rollout_routing_replay quantization qat mtp"),
    ("data", "yours", "data.train", "cut the file beforehand", "train_max_samples=-1"),
    ("data", "yours", "data.held_out", "cut the file beforehand", "val_max_samples=-1"),
    ("data", "yours", "data.too_long", "drop leaves longer prompts out", "filter_overlong_prompts"),
    ("data", "yours", "data.too_long", "truncate cuts a longer prompt at its left", "truncation=error"),
    ("data", "no_effect", "", _SPEED, "use_shm dataloader_num_workers filter_overlong_prompts_workers val_batch_size "
     "gen_batch_size return_raw_input_ids return_raw_chat return_full_prompt"),
    ("data", "no_effect", "run.seed", "one seed for all", "seed"),
    ("data", "unsupported", "", "all but held_out is shuffled", "shuffle=True validation_shuffle"),
    ("data", "no_effect", "", "of images, videos and sounds", "image_patch_size image_key video_key audio_key "
     "return_multi_modal_inputs mm_processor_kwargs"),
    ("data", "unsupported", "", "no tools", "tool_config_path function_tool_path"),
    ("data", "unsupported", "", _NO_COUNTERPART, "custom_cls sampler datagen.path trust_remote_code tokenizer"),
    ("data", "no_effect", "", "without datagen.path", "datagen.name"),
    ("trainer", "no_effect", "", "torchrun or Slurm starts the ranks", "nnodes n_gpus_per_node device "
     "ray_wait_register_center_timeout use_legacy_worker_impl use_v1 v1"),
    ("trainer", "no_effect", "", "data ranks get equally many tokens with batch.tokens", "balance_batch"),
    ("trainer", "no_effect", "", "named by run.dir", "project_name experiment_name default_hdfs_dir"),
    ("trainer", "yours", "run.loggers", "a tracker's package must be installed", "logger"),
    ("trainer", "no_effect", "", "Slurm's notice before the time limit makes a run save: docs/slurm.md", "esi_redundant_time"),
    ("trainer", "unsupported", "run.init_from", "a folder of weights to begin with", "resume_from_path"),
    ("trainer", "no_effect", "", "checkpoints stay in run.dir", "del_local_ckpt_after_load max_critic_ckpt_to_keep"),
    ("trainer", "yours", "rl.record", "writes each step's samples", "rollout_data_dir"),
    ("trainer", "unsupported", "", _NO_COUNTERPART, "validation_data_dir val_only npu_profile"),
    ("critic", "unsupported", "", "on with adv_estimator = 'gae'", "enable=True"),
    ("critic", "no_effect", "", "the critic has the policy's tokenizer", "model.tokenizer_path model.fsdp_config"),
    (f"{_JOINT}.ref", "no_effect", "", _SPEED, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
     "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu fsdp_config megatron use_torch_compile"),
    (f"{_JOINT}.ref", "unsupported", "", "the reference is the policy that the run begins with", "model"),
)  # fmt: skip
TABLE = Table.of(
    _GROUPS,
    {
        "critic.fsdp": (f"{_ACTOR}.fsdp_config", "the critic has the policy's layout and batches here"),
        "critic.model": (_MODEL, "a critic starts as a copy of the policy's trunk"),
        "critic": (_ACTOR, "the critic has the policy's layout and batches here"),
        f"{_JOINT}.ref": (_ACTOR, "the reference runs on the policy's layout here"),
    },
)
