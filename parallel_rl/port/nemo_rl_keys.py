"""Keys of a config of NeMo-RL (its source and recipes of August 2026) that a port knows, in sections it does not read whole."""

ROOT = (
    "async_rl", "checkpointing", "cluster", "data", "data_plane", "distillation", "dpo", "env", "grpo", "logger", "loss_fn",
    "on_policy_distillation", "policy", "ppo", "reward_penalties", "rm", "sft", "teacher", "teachers", "value",
    "value_loss_fn",
)  # fmt: skip
POLICY = (
    "activation_checkpointing_enabled", "dequantize_base_checkpoint", "disable_modelopt_layer_spec", "draft", "dtensor_cfg",
    "dynamic_batching", "generation", "generation_batch_size", "hf_config_overrides", "is_vlm", "logprob_batch_size",
    "logprob_chunk_size", "make_sequence_length_divisible_by", "max_grad_norm", "max_total_sequence_length", "megatron_cfg",
    "model_name", "offload_optimizer_for_logprob", "optimizer", "precision", "pretrained_checkpoint", "quant_batch_size",
    "quant_calib_data", "quant_calib_size", "quant_cfg", "quant_sequence_length", "refit_buffer_size_gb",
    "reward_model_cfg", "router_replay", "scheduler", "sequence_packing", "tokenizer", "train_global_batch_size",
    "train_micro_batch_size",
)  # fmt: skip
MEGATRON = (
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "activation_checkpointing",
    "apply_rope_fusion", "attention_backend", "bias_activation_fusion", "calculate_per_token_loss", "checkpoint",
    "clear_memory_caches_before_refit", "context_parallel_size", "converter_type", "cp_normalize", "cuda_graph_impl",
    "cuda_graph_modules", "cuda_graph_warmup_steps", "defer_fp32_logits", "distributed_data_parallel_config",
    "do_not_average_loss", "empty_unused_memory_level", "enabled", "env_vars", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "fine_grained_activation_offloading", "first_last_layers_bf16",
    "force_reconvert_from_hf", "fp8_cfg", "freeze_config", "freeze_moe_router", "freeze_sound_encoder",
    "freeze_sound_projection", "freeze_vision_model", "freeze_vision_projection", "fused_linear_logprobs_chunk_size",
    "gradient_accumulation_fusion", "hybridep_num_ranks_per_nvlink_domain", "hybridep_use_mnnvl",
    "inference_cuda_graph_scope", "inference_grouped_gemm_backend", "inference_moe_token_dispatcher_type",
    "layernorm_epsilon", "model_overrides", "moe_aux_loss_coeff", "moe_enable_deepep", "moe_flex_dispatcher_backend",
    "moe_grouped_gemm", "moe_hybridep_num_sms", "moe_pad_experts_for_cuda_graph_inference", "moe_per_layer_logging",
    "moe_permute_fusion", "moe_router_bias_update_rate", "moe_router_dtype", "moe_router_enable_expert_bias",
    "moe_router_group_topk", "moe_router_load_balancing_type", "moe_router_num_groups", "moe_shared_expert_overlap",
    "moe_token_dispatcher_type", "mtp_detach_heads", "mtp_loss_scaling_factor", "mtp_num_layers", "mtp_use_repeated_layer",
    "num_layers_at_end_in_bf16", "num_layers_at_start_in_bf16", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "offload_modules", "optimizer", "peft", "pipeline_dtype",
    "pipeline_model_parallel_layout", "pipeline_model_parallel_size", "radio_force_cpe_eval_mode", "recompute_granularity",
    "recompute_modules", "scale_loss_by_dp_cp_size", "scheduler", "sequence_parallel", "tensor_model_parallel_size",
    "track_moe_metrics", "train_iters", "transformer_impl", "use_fused_linear_logprobs", "use_fused_weighted_squared_relu",
    "use_gloo_process_groups", "virtual_pipeline_model_parallel_size",
)  # fmt: skip
GENERATION = (
    "backend", "bad_words", "colocated", "dynamo_cfg", "max_new_tokens", "mcore_generation_config",
    "model_name", "port_range_high", "port_range_low", "quant_cfg", "real_quant", "real_quant_export_cpu_offload",
    "real_quant_ignore", "refit_cfg", "refit_transport", "sglang_cfg", "stop_strings", "stop_token_ids", "temperature",
    "top_k", "top_p", "trtllm_cfg", "trtllm_kwargs", "use_async_rollouts", "val_temperature", "val_top_k", "val_top_p",
    "vllm_cfg", "vllm_kwargs",
)  # fmt: skip
PACKING = (
    "algorithm", "enabled", "fuse_loss", "logprob_mb_tokens", "microbatch_order", "sequence_length_round",
    "train_mb_tokens",
)  # fmt: skip
RUN = (  # of grpo, ppo, dpo, sft, rm and distillation: how a run is driven, evaluated and logged
    "max_rollout_turns", "max_num_epochs", "max_num_steps", "val_period", "val_start_at", "val_at_start", "val_at_end",
    "max_val_samples", "val_num_generations_per_prompt", "stop_at_validation_metric", "stop_at_validation_threshold",
    "val_batch_size", "val_global_batch_size", "val_micro_batch_size", "val_batches", "seed", "normalize_rewards",
    "use_leave_one_out_baseline", "dynamic_sampling_max_gen_batches", "minus_baseline", "calculate_advantages_on_gpu",
    "skip_reference_policy_logprobs_calculation", "deduplicate_multimodal_data", "debug_payload_metrics",
)  # fmt: skip
DISTILLATION = (*RUN, "num_prompts_per_step", "num_generations_per_prompt", "topk_logits_k")
ADVANTAGES = ("normalize_rewards", "use_leave_one_out_baseline", "minus_baseline")
SHAPING = (
    "max_response_length", "overlong_buffer_length", "overlong_buffer_penalty", "stop_properly_penalty_coef",
)  # fmt: skip
