"""Keys of a config of verl (0.9.1) that a port knows and reads no number of the loss from."""

# loss_agg_mode, and our aggregation
AGGREGATIONS = {
    "token-mean": "token-mean", "seq-mean-token-mean": "seq-mean-token-mean", "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-norm": "constant-length", "token-sum": "token-sum",
}  # fmt: skip
# kl_loss_type and kl_penalty, and our estimator
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
ROOT = (
    "critic", "custom_reward_function", "distillation", "global_profiler", "ray_kwargs", "reward", "reward_model",
    "sandbox_fusion", "skip", "trainer", "transfer_queue",
)  # fmt: skip
JOINT = ("hybrid_engine", "nccl_timeout", "ref")
ACTOR = (
    "_target_", "rollout_n", "strategy", "ppo_micro_batch_size", "freeze_vision_tower", "use_prefix_grouper",
    "use_torch_compile", "shuffle", "data_loader_seed", "checkpoint", "optim", "use_fused_kernels", "profiler", "router_replay",
    "fsdp_config", "megatron", "grad_clip", "ulysses_sequence_parallel_size", "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size", "entropy_checkpointing", "use_remove_padding", "pad_to_length", "load_weight", "qat",
    "veomni", "torchtitan", "mtp", "calculate_entropy", "calculate_sum_pi_squared", "sum_pi_squared_checkpointing", "engine",
    "recompute_old_log_prob", "global_batch_info", "use_rollout_log_probs", "log_prob_micro_batch_size", "model_config",
    "nccl_timeout", "kl_reference",
)  # fmt: skip
CRITIC = (
    *ACTOR, "enable", "fsdp", "model", "forward_max_token_len_per_gpu", "forward_micro_batch_size",
    "forward_micro_batch_size_per_gpu", "ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu",
    "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "loss_agg_mode", "loss_scale_factor",
)  # fmt: skip
ALGORITHM = ("_target_", "pf_ppo")
ROLLOUT = (
    "_target_", "agent", "calculate_log_probs", "checkpoint_engine", "cudagraph_capture_sizes", "data_parallel_size",
    "disable_log_stats", "disaggregation", "do_sample", "dtype", "enable_chunked_prefill", "enable_prefix_caching",
    "enable_rollout_routing_replay", "enforce_eager", "engine_kwargs", "expert_parallel_size", "free_cache_engine",
    "full_determinism", "gpu_memory_utilization", "ignore_eos", "layered_summon", "limit_images", "load_format",
    "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz", "logprobs_mode", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "mode",
    "moe_load_balance_metrics_interval", "mtp", "multi_stage_wake_up", "multi_turn", "n_gpus_per_node", "name", "nnodes",
    "over_sample_rate", "pipeline_model_parallel_size", "profiler", "prometheus", "prompt_length", "qat", "quantization",
    "quantization_config_file", "response_length", "router_config_path", "scheduling_policy", "seed", "skip_tokenizer_init",
    "tensor_model_parallel_size", "trace", "val_kwargs",
)  # fmt: skip
DATA = (
    "apply_chat_template_kwargs", "audio_key", "custom_cls", "dataloader_num_workers", "filter_overlong_prompts",
    "filter_overlong_prompts_workers", "function_tool_path", "gen_batch_size", "image_key", "image_patch_size",
    "max_prompt_length", "mm_processor_kwargs", "prompt_key", "return_full_prompt", "return_multi_modal_inputs",
    "return_raw_chat", "return_raw_input_ids", "reward_fn_key", "sampler", "datagen", "seed", "shuffle", "tokenizer",
    "tool_config_path", "train_files", "train_max_samples", "truncation", "trust_remote_code", "use_shm", "val_batch_size",
    "val_files", "val_max_samples", "validation_shuffle", "video_key",
)  # fmt: skip
