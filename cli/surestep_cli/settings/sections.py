"""The sections in which settings are shown, and their order."""

from __future__ import annotations

SECTIONS: dict[str, tuple[str, ...]] = {
    "Model": (
        *("model", "served_model_name", "revision", "tokenizer", "tokenizer_revision"),
        *("download_dir", "hf_token", "runner", "dtype", "quantization", "max_model_len"),
        *("generation_config", "override_generation_config", "seed", "max_logprobs"),
        *("pooler_config", "hf_overrides"),
    ),
    "Speculation": ("speculative_config", "adaptive_draft_length", "require_drafter"),
    "Memory": (
        *("gpu_memory_utilization", "kv_cache_memory", "num_gpu_blocks_override", "kv_cache_dtype"),
        "block_size",
        *("enable_prefix_caching", "snapshot_memory"),
        "share_prefix_cache_between_keys",
    ),
    "Steps": (
        *("max_num_seqs", "max_num_batched_tokens", "pipeline_depth", "max_queue_len"),
        "max_queue_tokens",
    ),
    "Devices": (
        *("device", "tensor_parallel_size", "enable_expert_parallel", "cpu_threads"),
        *("attention_backend", "linear_backend", "activation_dtype", "enforce_eager"),
        "programmatic_dependent_launch",
    ),
    "Server": (
        *("host", "port", "uds", "root_path", "api_key", "api_key_file", "admin_api_key"),
        *("admin_api_key_file", "protect_metrics", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
        *("ssl_cert_reqs", "ssl_ciphers", "allowed_origins", "allowed_methods", "allowed_headers"),
        *("allow_credentials", "disable_fastapi_docs", "ui", "config"),
    ),
    "Chats": (
        *("chat_template", "chat_template_content_format", "default_chat_template_kwargs"),
        *("reasoning_effort_map", "trust_request_chat_template", "reasoning_parser"),
        *("tool_call_parser", "enable_auto_tool_choice", "exclude_tools_when_tool_choice_none"),
        "structured_outputs_config",
        *("response_role", "allow_special_tokens_in_content", "return_tokens_as_token_ids"),
        "enable_force_include_usage",
    ),
    "Logs": (
        *("log_level", "log_json", "log_dir", "enable_log_requests", "max_log_len"),
        "otlp_traces_endpoint",
    ),
    "Limits": (
        *("max_concurrent_requests", "max_connections", "max_n", "max_body_bytes"),
        *("max_total_body_bytes", "max_answer_bytes", "text_processes", "text_memory_bytes"),
        *("responses_store", "responses_store_ttl", "responses_store_bytes"),
    ),
    "Timeouts": (
        *("startup_timeout_s", "drain_timeout_s", "request_timeout_s", "first_token_timeout_s"),
        *("inter_token_timeout_s", "admission_timeout_s", "body_timeout_s", "timeout_keep_alive"),
        *("sse_keep_alive_interval", "send_timeout_s", "chat_template_timeout_s"),
        "shutdown_delay_s",
    ),
    "Recovery": (
        *("standby", "heartbeat_timeout_s", "load_timeout_s", "step_deadline_floor_s"),
        *("step_deadline_ceiling_s", "step_warmup_s", "resume_timeout_s"),
    ),
    "Processes": (
        *("scheduler_url", "scheduler_listen", "worker_listen", "supervisor_listen", "tp_master"),
        *("worker_addresses", "supervisor_addresses", "rank", "local_ranks"),
        *("grpc_secret", "grpc_secret_file"),
        "vllm_grpc_public",
        *("grpc_api_key", "grpc_tls_cert", "grpc_tls_key", "grpc_tls_ca", "grpc_tls_server_name"),
    ),
}
