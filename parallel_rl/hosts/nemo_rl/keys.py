"""Keys of a NeMo-RL config (source and recipes of August 2026) that a port does not read, and their fates."""

from parallel_rl.hosts.port_report import Table

_SPEED = "speed and memory alone, in another program"
_SAMPLER = "of its generation engine"
_NO_COUNTERPART = "no counterpart in this trainer"
_TEMPLATE = "a function of yours writes the prompt into each record"
_WHERE = "torchrun or Slurm starts the ranks"
_CRITIC = "the critic has the policy's shape, layout and batches here"
_TEACHER = "the teacher runs on the policy's layout here"
# (section, kind, our key, why, names); in a name "a=1" the value 1 is what this trainer does
_GROUPS = (
    ("", "no_effect", "", "a mark of its config files", "*._override_"),
    ("", "no_effect", "", _WHERE, "cluster"),
    ("", "no_effect", "", "the way data takes between its processes", "data_plane"),
    ("", "unsupported", "", "teachers of agents", "on_policy_distillation"),
    ("", "yours", "distillation.teacher", "one teacher, of the student's tokenizer", "teachers"),
    ("", "unsupported", "", "rollouts are sampled in step with the training, or by rl.server", "async_rl"),
    ("", "yours", "reward", "a checker by name or a server; see docs/rewards.md", "env"),
    ("", "unsupported", "", _NO_COUNTERPART, "reward_penalties.penalize_duplicated_reasoning "
     "reward_penalties.penalize_empty_final_answer reward_penalties.penalize_malformed_think_tag "
     "reward_penalties.penalize_unwanted_tokens reward_penalties.token_ids"),
    ("", "unsupported", "", "an evaluation is a section of a run here", "eval"),
    ("", "yours", "sampling", "of an evaluation", "generation"),
    ("", "yours", "tokenizer.hf", "a folder", "tokenizer"),
    ("data", "yours", "data.train", "a file of JSONL or Parquet; see docs/data.md", "file_format split "
     "num_prompts_per_dataloader"),
    ("data", "yours", "data.map", _TEMPLATE, "prompt_file system_prompt_file processor train.prompt_file "
     "train.system_prompt_file"),
    ("data", "yours", "reward", "a checker by name or a server; see docs/rewards.md", "env_name"),
    ("policy", "no_effect", "", _SPEED, "generation_batch_size logprob_batch_size logprob_chunk_size refit_buffer_size_gb "
     "offload_optimizer_for_logprob make_sequence_length_divisible_by activation_checkpointing_enabled"),
    ("policy", "unsupported", "", "quantised training", "quant_batch_size quant_calib_data quant_calib_size quant_cfg "
     "quant_sequence_length disable_modelopt_layer_spec"),
    ("policy", "unsupported", "", "weights are read as they are", "dequantize_base_checkpoint pretrained_checkpoint"),
    ("policy", "unsupported", "", _NO_COUNTERPART, "draft is_vlm router_replay tokenizer.video tokenizer.use_fastokens "
     "tokenizer.processor"),
    ("policy", "equal", "", "a reward model is preference.loss here", "reward_model_cfg"),
    ("policy", "yours", "model.hf", "write it into the folder's config.json", "hf_config_overrides"),
    ("policy", "unsupported", "batch.tokens", "a micro-batch has a number of sequences, or packed ones", "dynamic_batching"),
    ("policy.sequence_packing", "no_effect", "", "rows are filled by first-fit decreasing", "algorithm microbatch_order"),
    ("policy.sequence_packing", "no_effect", "", _SPEED, "fuse_loss logprob_mb_tokens sequence_length_round"),
    ("policy.optimizer.kwargs", "no_effect", "", _SPEED, "foreach fused capturable"),
    ("policy.optimizer.kwargs", "no_effect", "", "moments and master weights are float32", "exp_avg_dtype exp_avg_sq_dtype "
     "master_weights store_param_remainders master_weight_dtype"),
    ("policy.dtensor_cfg", "no_effect", "", "another way to run a model", "_v2 custom_parallel_plan automodel_kwargs "
     "moe_parallelizer"),
    ("policy.dtensor_cfg", "no_effect", "", _SPEED, "cpu_offload clear_cache_every_n_steps dp_replicate_size env_vars"),
    ("policy.dtensor_cfg", "unsupported", "", "all weights are trained", "lora_cfg"),
    ("policy.megatron_cfg", "no_effect", "", _SPEED, "apply_rope_fusion attention_backend bias_activation_fusion checkpoint "
     "clear_memory_caches_before_refit cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps cuda_graph_scope "
     "defer_fp32_logits empty_unused_memory_level env_vars fine_grained_activation_offloading force_reconvert_from_hf "
     "fused_linear_logprobs_chunk_size gradient_accumulation_fusion hybridep_num_ranks_per_nvlink_domain hybridep_use_mnnvl "
     "inference_cuda_graph_scope inference_grouped_gemm_backend inference_moe_token_dispatcher_type "
     "moe_enable_deepep moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms "
     "moe_pad_experts_for_cuda_graph_inference moe_permute_fusion moe_shared_expert_overlap moe_token_dispatcher_type "
     "offload_modules use_fused_weighted_squared_relu use_gloo_process_groups transformer_impl converter_type"),
    ("policy.megatron_cfg", "no_effect", "", "the loss is divided by the step's counts", "calculate_per_token_loss "
     "cp_normalize do_not_average_loss scale_loss_by_dp_cp_size"),
    ("policy.megatron_cfg", "no_effect", "", "of its reports", "moe_per_layer_logging track_moe_metrics"),
    ("policy.megatron_cfg", "no_effect", "", "as run.dtype", "pipeline_dtype optimizer.bf16 optimizer.params_dtype"),
    ("policy.megatron_cfg", "unsupported", "", "stages have equally many layers", "account_for_embedding_in_pipeline_split "
     "account_for_loss_in_pipeline_split num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
     "pipeline_model_parallel_layout virtual_pipeline_model_parallel_size=1"),
    ("policy.megatron_cfg", "unsupported", "", "all weights are trained", "peft freeze_config freeze_moe_router "
     "freeze_sound_encoder freeze_sound_projection freeze_vision_model freeze_vision_projection"),
    ("policy.megatron_cfg", "unsupported", "", "weights are bfloat16 or float32", "fp8_cfg first_last_layers_bf16 "
     "num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 optimizer.fp16"),
    ("policy.megatron_cfg", "unsupported", "", "the router is that of the model's folder; the auxiliary loss is model.aux_loss",
     "moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups "
     "moe_router_load_balancing_type=aux_loss"),
    ("policy.megatron_cfg", "unsupported", "", "no multi-token prediction", "mtp_detach_heads mtp_loss_scaling_factor "
     "mtp_num_layers mtp_use_repeated_layer"),
    ("policy.megatron_cfg", "unsupported", "", "the model is as its folder says", "model_overrides layernorm_epsilon "
     "radio_force_cpe_eval_mode"),
    ("policy.megatron_cfg", "no_effect", "", "the section's `steps` is the only number of steps", "train_iters"),
    ("policy.megatron_cfg.optimizer", "unsupported", "", "AdamW", "optimizer=adam"),
    ("policy.megatron_cfg.optimizer", "no_effect", "", "of SGD", "sgd_momentum"),
    ("policy.megatron_cfg.optimizer", "no_effect", "", _SPEED, "optimizer_cpu_offload optimizer_offload_fraction "
     "overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer"),
    ("policy.megatron_cfg.scheduler", "unsupported", "", "the weight decay is constant", "weight_decay_incr_style=constant"),
    ("policy.megatron_cfg.scheduler", "no_effect", "", "a resumed run keeps its own schedule",
     "override_opt_param_scheduler"),
    ("policy.megatron_cfg.distributed_data_parallel_config", "no_effect", "", _SPEED, "average_in_collective "
     "data_parallel_sharding_strategy overlap_param_gather use_custom_fsdp"),
    ("policy.megatron_cfg.distributed_data_parallel_config", "unsupported", "", "as Megatron does by default",
     "grad_reduce_in_fp32"),
    ("policy.generation", "yours", "rl.server", "the trainer samples itself, or from servers that you start: "
     "docs/rollout_server.md", "backend"),
    ("policy.generation", "no_effect", "", _SAMPLER, "vllm_cfg vllm_kwargs sglang_cfg trtllm_cfg trtllm_kwargs dynamo_cfg "
     "mcore_generation_config port_range_high port_range_low refit_cfg refit_transport use_async_rollouts model_name colocated "
     "real_quant_export_cpu_offload"),
    ("policy.generation", "unsupported", "", "quantised generation", "quant_cfg real_quant "
     "real_quant_ignore"),
    ("policy.generation", "unsupported", "", "every token may be sampled", "bad_words"),
    ("teacher", "equal", "distillation.teacher", "null", "none"),
    ("teacher", "no_effect", "", "the student's tokenizer serves both", "tokenizer"),
    ("teacher", "no_effect", "", "a teacher neither trains nor samples", "generation optimizer scheduler max_grad_norm "
     "megatron_cfg.optimizer megatron_cfg.scheduler train_global_batch_size train_micro_batch_size"),
    ("checkpointing", "unsupported", "", "the newest checkpoints stay, not the best", "metric_name higher_is_better"),
    ("checkpointing", "no_effect", "", "a checkpoint has all that a run needs to resume", "save_optimizer model_save_format "
     "save_consolidated model_cache_dir model_repo_id is_peft peft_config"),
    ("checkpointing", "no_effect", "", "Slurm's notice before the time limit makes a run save: docs/slurm.md",
     "checkpoint_must_save_by"),
    ("logger", "yours", "run.loggers", "a tracker's package must be installed", "wandb_enabled mlflow_enabled"),
    ("logger", "unsupported", "", "no such tracker; `register_logger` takes your own", "swanlab_enabled"),
    ("logger", "yours", "run.loggers", "TensorBoard, if it is installed", "tensorboard_enabled=True"),
    ("logger", "no_effect", "", "named by run.dir", "log_dir wandb mlflow tensorboard swanlab num_val_samples_to_print"),
    ("logger", "no_effect", "", "of its reports", "gpu_monitoring monitor_gpus"),
    ("data", "yours", "data.columns", "columns with other names", "problem_key solution_key train.output_key "
     "train.input_key validation.output_key validation.input_key train.text_key train.prompt_key "
     "train.chosen_key train.rejected_key train.chat_key"),
    ("data", "no_effect", "", "of its data sets; a file here is read whole and in the order of its config",
     "train.split validation.split train.split_validation_size train.seed train.download_dir train.max_samples "
     "train.allowed_problem_types validation.allowed_problem_types validation.repeat train.characters_per_sample "
     "train.data_files train.env_name train.processor train.subset "
     "validation.subset repeat"),
    ("data", "yours", "data.too_long", "drop leaves longer records out", "max_input_seq_length"),
    ("data", "unsupported", "", "all but held_out is shuffled", "shuffle=True"),
    ("data", "unsupported", "", _NO_COUNTERPART, "use_multiple_dataloader custom_dataloader"),
    ("data", "no_effect", "", _SPEED, "num_workers"),
    ("data", "no_effect", "", "the chat template writes it", "add_bos add_eos add_generation_prompt add_system_prompt"),
)  # fmt: skip
_RUN = (
    ("unsupported", "", "an answer of one turn", "max_rollout_turns=1"),
    ("unsupported", "", "a run has all its steps", "stop_at_validation_metric stop_at_validation_threshold val_start_at=-1"),
    ("yours", "data.held_out", "all of it is evaluated", "max_val_samples"),
    ("no_effect", "", _SPEED, "val_batch_size calculate_advantages_on_gpu deduplicate_multimodal_data"),
    ("no_effect", "", "of a validation that this objective does not have here", "val_global_batch_size val_micro_batch_size "
     "val_batches val_num_generations_per_prompt"),
    ("unsupported", "", "an evaluation here is of rewards, in RL and distillation", "val_period=0 val_at_start val_at_end"),
    ("no_effect", "", "the reference's log-probs are computed if the loss or the reward reads them",
     "skip_reference_policy_logprobs_calculation"),
    ("no_effect", "", "of its reports", "debug_payload_metrics"),
    ("unsupported", "", _NO_COUNTERPART, "overlong_filtering reward_scaling seq_logprob_error_threshold async_grpo async_ppo "
     "invalid_tool_call_advantage invalid_tool_call_strategy malformed_thinking_advantage batch_multiplier=1 "
     "penalize_invalid_tool_call penalize_malformed_thinking zero_variance_prompt_filtering num_val_generations_per_prompt=1"),
    ("no_effect", "", "of another estimator", "normalize_rewards use_leave_one_out_baseline "
     "minus_baseline dynamic_sampling_max_gen_batches"),
)  # fmt: skip
_ALL = (
    *_GROUPS,
    *((run, *group) for run in ("grpo", "ppo", "dpo", "sft", "rm", "distillation") for group in _RUN),
    ("loss_fn", "unsupported", "", "a loss between tokenizers", "alpha ce_loss_scale dynamic_loss_scaling "
     "exact_token_match_only gold_loss kd_loss_mode kl_loss_weight normalize_teacher_by_vocab reverse_kl sum_weights_metric "
     "temperature=1.0 uncommon_topk vocab_topk xtoken_loss"),
    ("", "no_effect", "", "without a critic", "value_loss_fn"),
)  # fmt: skip
TABLE = Table.of(_ALL, {"value": ("policy", _CRITIC), "teacher": ("policy", _TEACHER)})
