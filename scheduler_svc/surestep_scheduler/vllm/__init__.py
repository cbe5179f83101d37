"""The gRPC service vllm.grpc.engine, for routers made for vLLM."""
